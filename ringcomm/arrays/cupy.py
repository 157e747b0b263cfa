"""cupy arrays. Imported when the first of them arrives, never before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import cupy

from ringcomm.arrays.base import Span
from ringcomm.arrays.dtypes import DTYPES, DType
from ringcomm.arrays.overlap import overlaps


class CupyAdapter:
    """DeviceAdapter of cupy.ndarray."""

    kind = "cupy"

    def dtype(self, x: Any) -> DType:
        """Return the dtype; those that no collective knows are refused."""
        known = DTYPES.get(x.dtype.name)
        if known is None:
            raise TypeError(f"cannot communicate dtype {x.dtype}; known: {', '.join(DTYPES)}")
        return known

    def shape(self, x: Any) -> tuple[int, ...]:
        """Return the shape."""
        return tuple(x.shape)

    def is_contiguous(self, x: Any) -> bool:
        """Return True for an aligned C-ordered array."""
        return bool(x.flags.c_contiguous) and x.data.ptr % x.dtype.itemsize == 0

    def copy(self, x: Any) -> Any:
        """Return a C-ordered copy."""
        with cupy.cuda.Device(x.device.id):
            return cupy.array(x, order="C", copy=True)

    def empty(self, like: Any, shape: tuple[int, ...]) -> Any:
        """Return an uninitialised array of like's dtype, on its GPU."""
        with cupy.cuda.Device(like.device.id):
            return cupy.empty(shape, like.dtype)

    def make(self, dtype: DType, shape: tuple[int, ...]) -> Any:
        """Return an uninitialised array on the current GPU; bfloat16 needs ml_dtypes."""
        return cupy.empty(shape, _bfloat16() if dtype.name == "bfloat16" else dtype.name)

    def assign(self, target: Any, source: Any) -> None:
        """Copy source into target."""
        with cupy.cuda.Device(target.device.id):
            target[...] = source

    def require_writable(self, x: Any) -> None:
        """Raise ValueError for an array whose elements overlap (broadcast_to())."""
        if not x.flags.c_contiguous and overlaps((*x.shape, x.itemsize), (*x.strides, 1)):
            raise ValueError("cannot write in place: elements overlap in memory. Pass a copy")

    def written(self, x: Any) -> None:
        """Do nothing: cupy keeps no version of its arrays."""

    def span(self, x: Any) -> Span:
        """Return where x is."""
        return Span(x.data.ptr, x.size, self.dtype(x), x)

    def device(self, x: Any) -> int:
        """Return the number of its GPU."""
        return int(x.device.id)

    def wrap(self, memory: Span, shape: tuple[int, ...], device: int) -> Any:
        """Return an array in this memory."""
        kind = memory.dtype.name
        owned = cupy.cuda.UnownedMemory(memory.address, memory.nbytes, memory.owner, device)
        start = cupy.cuda.MemoryPointer(owned, 0)
        return cupy.ndarray(shape, _bfloat16() if kind == "bfloat16" else kind, start)

    def current_device(self) -> int:
        """Return the number of the calling thread's current GPU."""
        return int(cupy.cuda.runtime.getDevice())

    def stream(self, device: int) -> int:
        """Return the handle of cupy's current stream."""
        return int(cupy.cuda.get_current_stream(device).ptr)

    def on_stream(self, device: int, stream: int) -> AbstractContextManager[object]:
        """Return a context in which `stream` is cupy's current one."""
        return _on_stream(device, stream)


def _bfloat16() -> Any:
    try:
        from ml_dtypes import bfloat16
    except ModuleNotFoundError as error:
        raise TypeError("cupy has bfloat16 only with: pip install ml_dtypes") from error
    return bfloat16


class _Foreign:
    """A stream that cupy has not made, by the protocol in which libraries hand them over."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


@contextlib.contextmanager
def _on_stream(device: int, stream: int) -> Iterator[None]:
    with cupy.cuda.Device(device), cupy.cuda.Stream.from_external(_Foreign(stream)):
        yield


CUPY = CupyAdapter()
