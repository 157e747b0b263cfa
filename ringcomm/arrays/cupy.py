"""cupy arrays. Imported when the first of them arrives, never before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import cupy

from ringcomm.arrays.base import DeviceAdapter, Span
from ringcomm.arrays.dtypes import DTYPES, DType
from ringcomm.arrays.overlap import overlaps


class _CupyAdapter(DeviceAdapter):
    """DeviceAdapter of cupy.ndarray."""

    kind = "cupy"

    def dtype(self, x: Any) -> DType:
        known = DTYPES.get(x.dtype.name)
        if known is None:
            raise TypeError(f"cannot communicate dtype {x.dtype}; known: {', '.join(DTYPES)}")
        return known

    def is_contiguous(self, x: Any) -> bool:
        return bool(x.flags.c_contiguous) and x.data.ptr % x.dtype.itemsize == 0

    def copy(self, x: Any) -> Any:
        with cupy.cuda.Device(x.device.id):
            return cupy.array(x, order="C", copy=True)

    def empty(self, like: Any, shape: tuple[int, ...]) -> Any:
        with cupy.cuda.Device(like.device.id):
            return cupy.empty(shape, like.dtype)

    def make(self, dtype: DType, shape: tuple[int, ...]) -> Any:
        return cupy.empty(shape, _bfloat16() if dtype.name == "bfloat16" else dtype.name)

    def assign(self, target: Any, source: Any) -> None:
        with cupy.cuda.Device(target.device.id):
            target[...] = source

    def require_writable(self, x: Any) -> None:
        if not x.flags.c_contiguous and overlaps(
            (*x.shape, x.itemsize), (*x.strides, 1)
        ):  # of broadcast_to()
            raise ValueError("cannot write in place: elements overlap in memory. Pass a copy")

    def span(self, x: Any) -> Span:
        return Span(x.data.ptr, x.size, self.dtype(x), x)

    def device(self, x: Any) -> int:
        return int(x.device.id)

    def wrap(self, memory: Span, shape: tuple[int, ...], device: int) -> Any:
        kind = memory.dtype.name
        owned = cupy.cuda.UnownedMemory(memory.address, memory.nbytes, memory.owner, device)
        start = cupy.cuda.MemoryPointer(owned, 0)
        return cupy.ndarray(shape, _bfloat16() if kind == "bfloat16" else kind, start)

    def current_device(self) -> int:
        return int(cupy.cuda.runtime.getDevice())

    def stream(self, device: int) -> int:
        return int(cupy.cuda.get_current_stream(device).ptr)

    def on_stream(self, device: int, stream: int) -> AbstractContextManager[object]:
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


CUPY = _CupyAdapter()
