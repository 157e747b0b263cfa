"""What cupy lacks of NVIDIA's driver: values that streams write and await, and uuids."""

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
