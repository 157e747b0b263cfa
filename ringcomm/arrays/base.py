"""The interface of the engine to arrays, whatever library made them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from ringcomm.arrays.dtypes import DType

Array = Any  # numpy.ndarray, cupy.ndarray or torch.Tensor: each adapter narrows it
Bytes = NDArray[np.uint8]
_DIMENSIONS: Final = 64  # of numpy's arrays, at most


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


def overlap(x: Flat, y: Flat) -> bool:
    """Return True if some byte is in both."""
    return bool(np.may_share_memory(x.bytes, y.bytes))  # exact for what is contiguous


def is_same(x: Flat, y: Flat) -> bool:
    """Return True if both are the same bytes of memory."""
    return x.bytes.ctypes.data == y.bytes.ctypes.data and x.bytes.nbytes == y.bytes.nbytes


@dataclass(frozen=True)
class Span:
    """Consecutive elements in a GPU's memory, which `owner` keeps alive; a slice shares them."""

    address: int
    count: int
    dtype: DType
    owner: object = None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.count * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Address behind the last element."""
        return self.address + self.nbytes

    def __getitem__(self, part: slice) -> Span:
        start, stop, _ = part.indices(self.count)
        at = self.address + start * self.dtype.itemsize
        return Span(at, max(stop - start, 0), self.dtype, self.owner)


class AnyAdapter(Protocol):
    """Base of the adapters of all array libraries, wherever the memory is.

    Attributes:
        kind: "numpy", "torch", "cupy" or "torch cuda".
        place: "cuda" for memory of a GPU, None for host memory.
    """

    kind: str
    place: str | None

    def dtype(self, x: Array) -> DType:
        """Return the dtype. Raises TypeError for a kind of array that cannot be sent."""
        ...

    def shape(self, x: Array) -> tuple[int, ...]:
        """Return the shape."""
        return tuple(x.shape)

    def is_contiguous(self, x: Array) -> bool:
        """Return True if the memory can be used as it is: aligned, in C order, without gaps."""
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

    def assign(self, target: Array, source: Array) -> None:
        """Copy source into target, which may be strided."""
        ...

    def require_writable(self, x: Array) -> None:
        """Raise ValueError if x cannot be written in place, element by element."""
        return  # not abstract: where all can be

    def written(self, x: Array) -> None:
        """Note that x was written behind its library's back."""
        return  # not abstract: where versions are not counted


class ArrayAdapter(AnyAdapter, Protocol):
    """One per library of arrays in host memory."""

    place: str | None = None

    def flat(self, x: Array) -> Flat:
        """Return the memory of a contiguous array; writing to it writes to x."""
        ...


class DeviceAdapter(AnyAdapter, Protocol):
    """One per library of arrays in a GPU's memory.

    What is done to such arrays is put on the current stream of their library, in the calling
    thread, and is carried out later.
    """

    place: str | None = "cuda"

    def span(self, x: Array) -> Span:
        """Return where the memory of a contiguous array is."""
        ...

    def device(self, x: Array) -> int:
        """Return the number of the GPU that x is on, as CUDA counts in this process."""
        ...

    def wrap(self, memory: Span, shape: tuple[int, ...], device: int) -> Array:
        """Return an array in memory of a GPU, which it keeps alive."""
        ...

    def current_device(self) -> int:
        """Return the number of the calling thread's current GPU."""
        ...

    def stream(self, device: int) -> int:
        """Return the handle of the library's current stream on this GPU, in this thread."""
        ...

    def on_stream(self, device: int, stream: int) -> AbstractContextManager[object]:
        """Return a context in which that is the current stream."""
        ...


def lengths_of(label: str, shape: int | Iterable[int]) -> tuple[int, ...]:
    """Return a shape as ints. Raises TypeError, ValueError."""
    lengths = itertools.islice(shape, _DIMENSIONS + 1) if isinstance(shape, Iterable) else (shape,)
    try:
        found = tuple(map(operator.index, lengths))
    except TypeError as error:
        raise TypeError(f"{label}: shape is {shape!r}; it must be an int, or ints") from error
    if any(n < 0 for n in found) or len(found) > _DIMENSIONS:
        raise ValueError(
            f"{label}: shape is {found}; it must be {_DIMENSIONS} lengths at most, each >= 0"
        )
    return found
