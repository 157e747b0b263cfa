"""Functions of NVIDIA's driver that cupy lacks: values that streams await, and uuids."""

from __future__ import annotations

import ctypes
import uuid

from ringcomm.errors import ConfigError, RingcommError

# As cuda.h numbers them.
_WAIT_GEQ, _WRITE_WITH_BARRIER = 0, 0
_ERROR_NOT_SUPPORTED = 801
CAN_MAP_HOST_MEMORY, CAN_REGISTER_HOST_MEMORY = 19, 99
COMPUTE_MODE, EXCLUSIVE_PROCESS = 20, 3
CAN_FLUSH_REMOTE_WRITES = 98
_WAIT_FLUSH = 1 << 30


class Driver:
    """libcuda.so.1.

    Raises:
        ConfigError: it cannot be loaded, or is too old.
    """

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
            self._write = self._cuda.cuStreamWriteValue32_v2
            self._wait = self._cuda.cuStreamWaitValue32_v2
            self._uuid = self._cuda.cuDeviceGetUuid_v2
            self._device_pointer = self._cuda.cuMemHostGetDevicePointer_v2
            self._retain = self._cuda.cuDevicePrimaryCtxRetain
            self._push = self._cuda.cuCtxPushCurrent_v2
            self._pop = self._cuda.cuCtxPopCurrent_v2
        except (OSError, AttributeError) as error:
            raise ConfigError(
                f"a GPU array needs NVIDIA's driver for CUDA 12 or newer: {error}. Run `ringcomm "
                "check`"
            ) from error
        for function in (self._write, self._wait):
            function.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)

    def write_value(self, stream: int, address: int, value: int) -> None:
        """See Device. Raises RingcommError."""
        self._require(
            "cuStreamWriteValue32", self._write(stream, address, value, _WRITE_WITH_BARRIER)
        )

    def await_value(self, stream: int, address: int, value: int, *, flushes: bool) -> None:
        """See Device; `flushes`: writes of other GPUs before that are seen, too."""
        flags = _WAIT_GEQ | (_WAIT_FLUSH if flushes else 0)
        self._require("cuStreamWaitValue32", self._wait(stream, address, value, flags))

    def can_write_values(self, stream: int, address: int) -> bool:
        """Try it, for no attribute tells: set 32 bits at a registered address to 0."""
        code: int = self._write(stream, address, 0, _WRITE_WITH_BARRIER)
        return code != _ERROR_NOT_SUPPORTED

    def context(self, index: int) -> Context:
        """Return the primary context of a GPU: that of the runtime, torch and cupy."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._require("cuInit", self._cuda.cuInit(0))
        self._require("cuDeviceGet", self._cuda.cuDeviceGet(ctypes.byref(device), index))
        code = self._retain(ctypes.byref(context), device)
        self._require("cuDevicePrimaryCtxRetain", code)
        return Context(self, context)

    def push(self, context: ctypes.c_void_p) -> None:
        """Make a context the calling thread's. Raises RingcommError."""
        self._require("cuCtxPushCurrent", self._push(context))

    def pop(self) -> None:
        """Make the one before current again. Raises RingcommError."""
        self._require("cuCtxPopCurrent", self._pop(ctypes.byref(ctypes.c_void_p())))

    def device_pointer(self, address: int) -> int:
        """Return where the current GPU finds registered host memory. Raises RingcommError."""
        found = ctypes.c_uint64()
        code = self._device_pointer(ctypes.byref(found), ctypes.c_void_p(address), 0)
        self._require("cuMemHostGetDevicePointer", code)
        return found.value

    def uuid(self, index: int) -> str:
        """Return the uuid of a GPU, as CUDA counts in this process. Raises RingcommError."""
        device, raw = ctypes.c_int(), ctypes.create_string_buffer(16)
        self._require("cuInit", self._cuda.cuInit(0))
        self._require("cuDeviceGet", self._cuda.cuDeviceGet(ctypes.byref(device), index))
        self._require("cuDeviceGetUuid", self._uuid(raw, device))
        return str(uuid.UUID(bytes=raw.raw))

    def _require(self, what: str, code: int) -> None:
        if code == 0:
            return
        name = ctypes.c_char_p()
        self._cuda.cuGetErrorName(code, ctypes.byref(name))
        text = (name.value or b"").decode() or f"error {code}"
        raise RingcommError(f"{what} failed with {text}: the GPU cannot be used any more")


class Context:
    """A context of CUDA, to be entered: by any thread, any number of times.

    The runtime works in the context that is current, and the driver in no other. To choose the GPU
    by cudaSetDevice() and to choose back would make a context on the one that was there before,
    which in a thread of ours is GPU 0, whichever this rank uses.
    """

    def __init__(self, driver: Driver, handle: ctypes.c_void_p) -> None:
        self._driver = driver
        self._handle = handle

    def __enter__(self) -> None:
        self._driver.push(self._handle)

    def __exit__(self, *_: object) -> None:
        self._driver.pop()
