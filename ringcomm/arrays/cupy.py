"""cupy arrays. Imported when a program first uses one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import cupy

from ringcomm.arrays.base import DeviceAdapter, Span
from ringcomm.arrays.dtypes import DTYPES, DType
from ringcomm.arrays.self_overlap import overlaps


class _CupyAdapter(DeviceAdapter):
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
        return cupy.empty(shape, _cupy_dtype(dtype))

    def assign(self, target: Any, source: Any) -> None:
        with cupy.cuda.Device(target.device.id):
            target[...] = source

    def require_writable(self, x: Any) -> None:
        # Compares bytes, as numpy.py does. Elements overlap after broadcast_to().
        if not x.flags.c_contiguous and overlaps((*x.shape, x.itemsize), (*x.strides, 1)):
            raise ValueError("cannot write in place: elements overlap in memory. Pass a copy")

    def span(self, x: Any) -> Span:
        return Span(x.data.ptr, x.size, self.dtype(x), x)

    def device(self, x: Any) -> int:
        return int(x.device.id)

    def wrap(self, memory: Span, shape: tuple[int, ...], device: int) -> Any:
        owned = cupy.cuda.UnownedMemory(memory.address, memory.nbytes, memory.owner, device)
        return cupy.ndarray(shape, _cupy_dtype(memory.dtype), cupy.cuda.MemoryPointer(owned, 0))

    def current_device(self) -> int:
        return int(cupy.cuda.runtime.getDevice())

    def stream(self, device: int) -> int:
        return int(cupy.cuda.get_current_stream(device).ptr)

    def stream_owner(self, device: int) -> object:
        owner: object = cupy.cuda.get_current_stream(device)
        return owner

    @contextlib.contextmanager
    def on_stream(self, device: int, stream: int) -> Iterator[None]:
        with cupy.cuda.Device(device), cupy.cuda.Stream.from_external(_Foreign(stream)):
            yield


def _cupy_dtype(dtype: DType) -> Any:
    if dtype.name != "bfloat16":
        return dtype.name
    try:
        from ml_dtypes import bfloat16
    except ModuleNotFoundError as error:
        raise TypeError("cupy has bfloat16 only with: pip install ml_dtypes") from error
    return bfloat16


class _Foreign:
    """A stream that cupy did not make, in the protocol by which libraries exchange streams."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


CUPY = _CupyAdapter()
