"""NVIDIA's driver by ctypes, for probes that run before anything is built."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p

NOT_READY = 600  # the numbers of cuda.h
_OK = 0
_STICKY = frozenset({700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 46, 214, 220, 999})


class IpcHandle(ctypes.Structure):
    """What another process needs to map memory."""

    _fields_ = (("raw", ctypes.c_ubyte * 64),)


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams, for operations on 32 bits."""

    _fields_ = (
        ("operation", c_int),
        ("address", c_uint64),
        ("value", c_uint64),
        ("flags", c_uint),
        ("alias", c_uint64),
        ("pad", c_uint64),
    )


_ADDRESS, _HANDLE = c_uint64, c_void_p
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(_HANDLE), c_int),
    "cuCtxSetCurrent": (_HANDLE,),
    "cuCtxSynchronize": (),
    "cuMemAlloc_v2": (POINTER(_ADDRESS), c_size_t),
    "cuMemFree_v2": (_ADDRESS,),
    "cuMemsetD32_v2": (_ADDRESS, c_uint32, c_size_t),
    "cuMemsetD32Async": (_ADDRESS, c_uint32, c_size_t, _HANDLE),
    "cuMemcpyDtoH_v2": (c_void_p, _ADDRESS, c_size_t),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemHostGetDevicePointer_v2": (POINTER(_ADDRESS), c_void_p, c_uint),
    "cuStreamCreate": (POINTER(_HANDLE), c_uint),
    "cuStreamDestroy_v2": (_HANDLE,),
    "cuStreamQuery": (_HANDLE,),
    "cuStreamSynchronize": (_HANDLE,),
    "cuStreamWriteValue32_v2": (_HANDLE, _ADDRESS, c_uint32, c_uint),
    "cuStreamWaitValue32_v2": (_HANDLE, _ADDRESS, c_uint32, c_uint),
    "cuStreamBatchMemOp_v2": (_HANDLE, c_uint, POINTER(_Operation), c_uint),
    "cuEventCreate": (POINTER(_HANDLE), c_uint),
    "cuEventDestroy_v2": (_HANDLE,),
    "cuEventRecord": (_HANDLE, _HANDLE),
    "cuEventQuery": (_HANDLE,),
    "cuModuleLoadData": (POINTER(_HANDLE), c_char_p),
    "cuModuleGetFunction": (POINTER(_HANDLE), _HANDLE, c_char_p),
    "cuLaunchKernel": (_HANDLE, *(c_uint,) * 7, _HANDLE, c_void_p, c_void_p),
    "cuIpcGetMemHandle": (POINTER(IpcHandle), _ADDRESS),
    "cuIpcOpenMemHandle_v2": (POINTER(_ADDRESS), IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (_ADDRESS,),
}
_NON_BLOCKING, _WITHOUT_TIMING, _LAZY_PEER_ACCESS, _PORTABLE_AND_MAPPED = 1, 2, 1, 3
# A kernel that does nothing; the driver compiles it.
_PTX = b""".version 7.0
.target sm_80
.address_size 64
.visible .entry nothing() { ret; }
"""


class CudaError(Exception):
    """A function of the driver failed; `is_sticky`: every later call of this process will, too."""

    def __init__(self, what: str, code: int, name: str) -> None:
        super().__init__(f"{what} failed with {name or 'an unknown error'} ({code})")
        self.code = code
        self.is_sticky = code in _STICKY


class Driver:
    """The first GPU, in its primary context."""

    AWAIT, WRITE = 1, 2  # for in_one_call()

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        for name, types in _SIGNATURES.items():
            getattr(self._cuda, name).argtypes = types
        self.call("cuInit", 0)
        self._context = self.made("cuDevicePrimaryCtxRetain", _HANDLE, self._device())
        self.enter()

    def call(self, name: str, *arguments: object, may_return: tuple[int, ...] = ()) -> int:
        """Call a function of the driver; raise CudaError unless its code is 0 or in `may_return`.

        Returns:
            the code.
        """
        code: int = getattr(self._cuda, name)(*arguments)
        if code != _OK and code not in may_return:
            text = c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(text))
            raise CudaError(name, code, (text.value or b"").decode())
        return code

    def made(self, name: str, kind: type, *arguments: object) -> int:
        """Return the handle or address that a function stores in its first argument."""
        out = kind()
        self.call(name, ctypes.byref(out), *arguments)
        return out.value or 0

    def enter(self) -> None:
        """Make the context current in this thread."""
        self.call("cuCtxSetCurrent", self._context)

    @property
    def n_gpus(self) -> int:
        """How many GPUs this process sees."""
        return self.made("cuDeviceGetCount", c_int)

    def _device(self) -> int:
        return self.made("cuDeviceGet", c_int, 0)

    # --- memory -----------------------------------------------------------------------------------
    def allocate(self, nbytes: int) -> int:
        return self.made("cuMemAlloc_v2", _ADDRESS, nbytes)

    def register(self, address: int, nbytes: int) -> int:
        """Return the address on the GPU of host memory, to which the GPU gets access."""
        self.call("cuMemHostRegister_v2", address, nbytes, _PORTABLE_AND_MAPPED)
        return self.made("cuMemHostGetDevicePointer_v2", _ADDRESS, address, 0)

    def read(self, address: int) -> int:
        """Return 32 bits of GPU memory."""
        word = c_uint32()
        self.call("cuMemcpyDtoH_v2", ctypes.byref(word), address, 4)
        return word.value

    def export(self, address: int) -> bytes:
        handle = IpcHandle()
        self.call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle.raw)

    def map(self, exported: bytes) -> int:
        handle = IpcHandle.from_buffer_copy(exported)
        return self.made("cuIpcOpenMemHandle_v2", _ADDRESS, handle, _LAZY_PEER_ACCESS)

    # --- streams ----------------------------------------------------------------------------------
    def new_stream(self) -> int:
        return self.made("cuStreamCreate", _HANDLE, _NON_BLOCKING)

    def new_event(self) -> int:
        return self.made("cuEventCreate", _HANDLE, _WITHOUT_TIMING)

    def is_done(self, stream: int) -> bool:
        return self.call("cuStreamQuery", stream, may_return=(NOT_READY,)) == _OK

    def write_value(self, stream: int, address: int, value: int) -> None:
        self.call("cuStreamWriteValue32_v2", stream, address, value, 0)

    def await_value(self, stream: int, address: int, value: int) -> None:
        """Make a stream wait until the 32 bits there are `value` or more."""
        self.call("cuStreamWaitValue32_v2", stream, address, value, 0)

    def in_one_call(self, stream: int, operations: list[tuple[int, int, int]]) -> None:
        """Enqueue operations (WRITE or AWAIT, address, value) by one call."""
        table = (_Operation * len(operations))(*operations)
        self.call("cuStreamBatchMemOp_v2", stream, len(operations), table, 0)

    # --- a kernel ---------------------------------------------------------------------------------
    def load_module(self) -> int:
        return self.made("cuModuleLoadData", _HANDLE, _PTX)

    def load_function(self, module: int) -> int:
        return self.made("cuModuleGetFunction", _HANDLE, module, b"nothing")

    def launch(self, function: int, stream: int) -> None:
        self.call("cuLaunchKernel", function, *(1,) * 6, 0, stream, None, None)
