"""Functions of the driver that cupy lacks or calls slowly: stream values, launches, contexts."""

from __future__ import annotations

import ctypes
import functools
import uuid
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ringcomm.errors import ConfigError, RingcommError

# The numbers of cuda.h.
_WAIT_GEQ, _WRITE_WITH_BARRIER = 0, 0
_ERROR_NOT_SUPPORTED = 801
_ERROR_IMPLICIT_CAPTURE = 906  # of the default stream, while a stream that it waits for captures
_CAPTURE_MODE_RELAXED = 2
CAN_FLUSH_REMOTE_WRITES = 98
_WAIT_FLUSH = 1 << 30
_MOST_AT_ONCE = 255  # operations of cuStreamBatchMemOp
# CUstreamBatchMemOpParams, for operations on 32 bits
_OPERATION: Final = np.dtype(
    {
        "names": ["operation", "address", "value", "flags"],
        "formats": ["u4", "u8", "u4", "u4"],
        "offsets": [0, 8, 16, 24],
        "itemsize": 48,
    }
)
_AWAIT, _WRITE = 1, 2  # values of "operation"


class CudaDriver:
    """The library libcuda.so.1. Its methods raise RingcommError if a call fails.

    Raises:
        ConfigError: the library cannot be loaded, or is too old.
    """

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
            self._write = self._cuda.cuStreamWriteValue32_v2
            self._wait = self._cuda.cuStreamWaitValue32_v2
            self._batch = self._cuda.cuStreamBatchMemOp_v2
            self._uuid = self._cuda.cuDeviceGetUuid_v2
            self._device_pointer = self._cuda.cuMemHostGetDevicePointer_v2
            self._retain = self._cuda.cuDevicePrimaryCtxRetain
            self._is_capturing = self._cuda.cuStreamIsCapturing
            self._exchange_mode = self._cuda.cuThreadExchangeStreamCaptureMode
            self._launch = self._cuda.cuLaunchKernel
            self.push = self._cuda.cuCtxPushCurrent_v2
            self.pop = self._cuda.cuCtxPopCurrent_v2
        except (OSError, AttributeError) as error:
            raise ConfigError(
                f"a GPU array needs NVIDIA's driver for CUDA 12 or newer: {error}. Run `ringcomm "
                "check`"
            ) from error
        for function in (self._write, self._wait):
            function.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
        self._batch.argtypes = (ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint)
        handle, number = ctypes.c_void_p, ctypes.c_uint
        self._launch.argtypes = (handle, *(number,) * 7, handle, handle, handle)
        self._is_capturing.argtypes = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))

    def write_value(self, stream: int, address: int, value: int) -> None:
        code = self._write(stream, address, value, _WRITE_WITH_BARRIER)
        self.require("cuStreamWriteValue32", code)

    def await_value(self, stream: int, address: int, value: int, *, flushes: bool) -> None:
        """See Device; `flushes`: the stream then sees earlier writes of other GPUs, too."""
        flags = _WAIT_GEQ | (_WAIT_FLUSH if flushes else 0)
        self.require("cuStreamWaitValue32", self._wait(stream, address, value, flags))

    def write_and_await(
        self, stream: int, own: int, others: tuple[int, ...], value: int, *, flushes: bool
    ) -> None:
        for table, at, count in _batches(own, others, flushes=flushes):
            table["value"] = value
            code: int = self._batch(stream, count, at, 0)
            self.require("cuStreamBatchMemOp", code)

    def can_write_values(self, stream: int, address: int) -> bool:
        """Return True if writes work, alone and as a batch; sets 32 registered bits to 0.

        No attribute of the device says whether it works.
        """
        ((_, at, count),) = _batches(address, (), flushes=False)
        codes = (
            self._write(stream, address, 0, _WRITE_WITH_BARRIER),
            self._batch(stream, count, at, 0),
        )
        return _ERROR_NOT_SUPPORTED not in codes

    def load_function(self, code: bytes, name: str) -> int:
        """Return a function of machine code or PTX, for the current context; see Device.load()."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        code_of = self._cuda.cuModuleLoadData(ctypes.byref(module), code)
        self.require("cuModuleLoadData", code_of)
        found = self._cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode())
        self.require("cuModuleGetFunction", found)
        assert function.value is not None
        return function.value

    def launch(self, function: int, grid: int, block: int, extra: int, stream: int) -> None:
        """Enqueue a function; for `extra` see Parameters.

        All parameters lie in one buffer: to pass them one by one takes longer than all else here.
        """
        code: int = self._launch(function, grid, 1, 1, block, 1, 1, 0, stream, None, extra)
        self.require("cuLaunchKernel", code)

    def is_capturing(self, stream: int) -> bool:
        status = ctypes.c_int()
        code: int = self._is_capturing(stream, ctypes.byref(status))
        if code == _ERROR_IMPLICIT_CAPTURE:
            return True
        self.require("cuStreamIsCapturing", code)
        return status.value != 0

    def relax_captures(self) -> None:
        mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
        code = self._exchange_mode(ctypes.byref(mode))
        self.require("cuThreadExchangeStreamCaptureMode", code)

    def context(self, index: int) -> Context:
        """Return the primary context of a GPU, which CUDA's runtime, torch and cupy use."""
        context = ctypes.c_void_p()
        code = self._retain(ctypes.byref(context), self._device(index))
        self.require("cuDevicePrimaryCtxRetain", code)
        return Context(self, context)

    def device_pointer(self, address: int) -> int:
        found = ctypes.c_uint64()
        code = self._device_pointer(ctypes.byref(found), ctypes.c_void_p(address), 0)
        self.require("cuMemHostGetDevicePointer", code)
        return found.value

    def uuid(self, index: int) -> str:
        raw = ctypes.create_string_buffer(16)
        self.require("cuDeviceGetUuid", self._uuid(raw, self._device(index)))
        return str(uuid.UUID(bytes=raw.raw))

    def _device(self, index: int) -> ctypes.c_int:
        """Return the handle of a GPU; CUDA numbers the GPUs that this process sees."""
        device = ctypes.c_int()
        self.require("cuInit", self._cuda.cuInit(0))
        self.require("cuDeviceGet", self._cuda.cuDeviceGet(ctypes.byref(device), index))
        return device

    def require(self, what: str, code: int) -> None:
        """Raise RingcommError unless `code`, which the function `what` returned, is 0."""
        if code == 0:
            return
        name = ctypes.c_char_p()
        self._cuda.cuGetErrorName(code, ctypes.byref(name))
        text = (name.value or b"").decode() or f"error {code}"
        raise RingcommError(f"{what} failed with {text}: the GPU cannot be used any more")


class Context:
    """A CUDA context. `with` makes it current; any thread may do so, any number of times.

    CUDA's runtime and driver use the current context. cudaSetDevice() is no alternative: switching
    back to the previous GPU makes a context there. In a thread of ringcomm that is GPU 0, even if
    this rank uses another GPU.
    """

    def __init__(self, driver: CudaDriver, handle: ctypes.c_void_p) -> None:
        self._driver = driver
        self._handle = handle

    def __enter__(self) -> None:
        self._driver.require("cuCtxPushCurrent", self._driver.push(self._handle))

    def __exit__(self, *_: object) -> None:
        code = self._driver.pop(ctypes.byref(ctypes.c_void_p()))
        self._driver.require("cuCtxPopCurrent", code)


@functools.lru_cache(maxsize=64)
def _batches(
    own: int, others: tuple[int, ...], *, flushes: bool
) -> list[tuple[NDArray[Any], int, int]]:
    """Return tables of operations that lack the value: (table, its address, its length) of each."""
    flags = _WAIT_GEQ | (_WAIT_FLUSH if flushes else 0)
    rows = [(_WRITE, own, 0, _WRITE_WITH_BARRIER), *((_AWAIT, at, 0, flags) for at in others)]
    cuts = [rows[k : k + _MOST_AT_ONCE] for k in range(0, len(rows), _MOST_AT_ONCE)]
    tables = [np.array(cut, _OPERATION) for cut in cuts]
    return [(table, table.ctypes.data, len(table)) for table in tables]
