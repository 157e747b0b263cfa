"""The interface between the engine and the arrays of any library."""

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
_DIMENSIONS: Final = 64  # the maximum of numpy


@dataclass(frozen=True)
class Flat:
    """Consecutive elements of one dtype, as their bytes; a slice shares memory.

    Algorithms use it because numpy alone has no bfloat16, and messages are bytes.
    """

    bytes: Bytes
    dtype: DType

    @property
    def count(self) -> int:
        return self.bytes.nbytes // self.dtype.itemsize

    def __getitem__(self, part: slice) -> Flat:
        item = self.dtype.itemsize
        start, stop, _ = part.indices(self.count)
        return Flat(self.bytes[start * item : stop * item], self.dtype)

    def like(self, count: int) -> Flat:
        return Flat(np.empty(count * self.dtype.itemsize, np.uint8), self.dtype)


def overlap(x: Flat, y: Flat) -> bool:
    return bool(np.may_share_memory(x.bytes, y.bytes))  # exact for contiguous arrays


def is_same(x: Flat, y: Flat) -> bool:
    return x.bytes.ctypes.data == y.bytes.ctypes.data and x.bytes.nbytes == y.bytes.nbytes


@dataclass(frozen=True)
class Span:
    """Consecutive elements in a GPU's memory, which `owner` keeps alive. Slices share it."""

    address: int
    count: int
    dtype: DType
    owner: object = None

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    @property
    def end(self) -> int:
        return self.address + self.nbytes

    def __getitem__(self, part: slice) -> Span:
        start, stop, _ = part.indices(self.count)
        at = self.address + start * self.dtype.itemsize
        return Span(at, max(stop - start, 0), self.dtype, self.owner)


class AnyAdapter(Protocol):
    kind: str  # "numpy", "torch", "cupy" or "torch cuda"
    place: str | None  # "cuda" for memory of a GPU, None for host memory

    def dtype(self, x: Array) -> DType:
        """Return the dtype. Raises TypeError if arrays of this kind or dtype cannot be sent."""
        ...

    def shape(self, x: Array) -> tuple[int, ...]:
        return tuple(x.shape)

    def is_contiguous(self, x: Array) -> bool:
        """Return True if the memory is aligned, in C order and without gaps."""
        ...

    def copy(self, x: Array) -> Array:
        """Return a contiguous copy that shares no memory with x."""
        ...

    def empty(self, like: Array, shape: tuple[int, ...]) -> Array:
        """Return an uninitialised contiguous array of like's dtype, in the same memory."""
        ...

    def make(self, dtype: DType, shape: tuple[int, ...]) -> Array:
        """Return an uninitialised contiguous array. Raises TypeError if the library lacks dtype."""
        ...

    def assign(self, target: Array, source: Array) -> None:
        """Copy source into target, which may be strided."""
        ...

    def require_writable(self, x: Array) -> None:
        """Raise ValueError if x cannot be written in place, element by element."""
        return  # not abstract: by default all arrays can be written

    def written(self, x: Array) -> None:
        """Notify the library that ringcomm wrote to x."""
        return  # not abstract: most libraries do not count versions


class ArrayAdapter(AnyAdapter, Protocol):
    """Adapter of a library of arrays in host memory."""

    place: str | None = None

    def flat(self, x: Array) -> Flat:
        """Return the memory of a contiguous array; writing to it writes to x."""
        ...


class DeviceAdapter(AnyAdapter, Protocol):
    """Adapter of a library of arrays in a GPU's memory.

    Methods that write to arrays only enqueue the work, on the library's current stream of the
    calling thread.
    """

    place: str | None = "cuda"

    def span(self, x: Array) -> Span: ...

    def device(self, x: Array) -> int:
        """Return the number of x's GPU, as CUDA numbers GPUs in this process."""
        ...

    def wrap(self, memory: Span, shape: tuple[int, ...], device: int) -> Array:
        """Return an array in `memory`, which the array keeps alive."""
        ...

    def current_device(self) -> int: ...

    def stream(self, device: int) -> int:
        """Return the handle of the library's current stream on this GPU, in this thread."""
        ...

    def stream_owner(self, device: int) -> object:
        """Return an object that keeps that stream alive."""
        ...

    def on_stream(self, device: int, stream: int) -> AbstractContextManager[object]: ...


def lengths_of(label: str, shape: int | Iterable[int]) -> tuple[int, ...]:
    """Return a shape as a tuple of ints. Raises TypeError or ValueError if it is no shape."""
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
