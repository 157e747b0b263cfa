"""What the engine needs to know of an array, whoever made it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ringcomm.arrays.dtypes import DType

Array = Any  # numpy.ndarray or torch.Tensor: each adapter narrows it
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Flat:
    """Consecutive elements of one dtype, as the bytes they are; a slice shares memory.

    numpy alone has no bfloat16, and the wire knows bytes only: so algorithms hold this.
    """

    bytes: Bytes
    dtype: DType

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.bytes.nbytes // self.dtype.itemsize

    def __getitem__(self, part: slice) -> Flat:
        item = self.dtype.itemsize
        start, stop, _ = part.indices(self.count)
        return Flat(self.bytes[start * item : stop * item], self.dtype)

    def like(self, count: int) -> Flat:
        """Return `count` uninitialised elements of this dtype."""
        return Flat(np.empty(count * self.dtype.itemsize, np.uint8), self.dtype)


class ArrayAdapter(Protocol):
    """One per array library. `stream` is the seam for devices; on the CPU it is None.

    Attributes:
        kind: "numpy" or "torch".
    """

    kind: str

    def dtype(self, x: Array) -> DType:
        """Return the dtype. Raises TypeError for a kind of array that cannot be sent."""
        ...

    def shape(self, x: Array) -> tuple[int, ...]:
        """Return the shape."""
        ...

    def is_contiguous(self, x: Array) -> bool:
        """Return True if flat(x) is possible: aligned, in C order, without gaps."""
        ...

    def copy(self, x: Array) -> Array:
        """Return a contiguous copy that shares nothing with x."""
        ...

    def empty(self, like: Array, shape: tuple[int, ...]) -> Array:
        """Return an uninitialised contiguous array of x's dtype and kind."""
        ...

    def make(self, dtype: DType, shape: tuple[int, ...]) -> Array:
        """Return an uninitialised contiguous array. Raises TypeError for a dtype it lacks."""
        ...

    def flat(self, x: Array) -> Flat:
        """Return the memory of a contiguous array; writing to it writes to x."""
        ...

    def assign(self, target: Array, source: Array) -> None:
        """Copy source into target, which may be strided."""
        ...

    def require_writable(self, x: Array) -> None:
        """Raise ValueError if x cannot be written in place, element by element."""
        ...

    def written(self, x: Array) -> None:
        """Note that x was written through flat(), behind its library's back."""
        ...

    def stream(self, x: Array) -> object | None:
        """Return the device stream that x's contents depend on, None on the CPU."""
        ...
