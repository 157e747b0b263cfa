"""A CUDA GPU, through cupy's binding of the runtime and through the driver."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import cupy

from ringcomm.arrays.base import Bytes
from ringcomm.errors import ConfigError, RingcommError
from ringcomm.gpu.device.base import Device
from ringcomm.gpu.device.driver import CAN_FLUSH_REMOTE_WRITES, CudaDriver
from ringcomm.gpu.device.ipc_pool import Regions
from ringcomm.gpu.device.memory import Memory
from ringcomm.gpu.device.pack_tables import Layouts
from ringcomm.gpu.device.pinned_pool import PAGE_NBYTES, whole_pages
from ringcomm.gpu.kernels.compiling import Kernels
from ringcomm.gpu.kernels.write_number import WriteKernel
from ringcomm.nvidia.find_software import probe
from ringcomm.nvidia.judge_software import require

# The numbers of CUDA's headers.
_NON_BLOCKING, _HIGHEST_PRIORITY = 1, -100  # CUDA clamps the latter to the highest
_SLEEPING_WAIT, _WITHOUT_TIMING = 1, 2
_ANY_DIRECTION = 4
_NOT_READY = 600
_PORTABLE_AND_MAPPED = 3
_LAZY_PEER_ACCESS = 1
_ROOM_FOR_TABLES = 1 << 20  # bytes: enough for the layouts of 350 million elements


@functools.cache
def open_cuda(index: int) -> Device:
    """Return a GPU of this process; it is never closed.

    Args:
        index: the GPU's number, as CUDA counts in this process.

    Raises:
        ConfigError: there is no such GPU, or software that it needs is missing.
    """
    return _CudaDevice(index)


class _CudaDevice:
    def __init__(self, index: int) -> None:
        stack = probe()
        require(stack)
        if not 0 <= index < len(stack.driver.gpus):
            raise ConfigError(
                f"there is no GPU {index}: this process sees {len(stack.driver.gpus)}. Look at "
                "CUDA_VISIBLE_DEVICES"
            )
        self._runtime: Any = cupy.cuda.runtime
        self._driver = CudaDriver()
        self.index = index
        self._name = stack.driver.gpus[index].name
        self.uuid = self._driver.uuid(index)
        self._context = self._driver.context(index)
        self._registered: dict[int, tuple[Bytes, int]] = {}
        # Functions of CUDA that serve as methods of Device.
        self.record: Any = self._runtime.eventRecord
        self.await_event: Any = self._runtime.streamWaitEvent
        self.regions = Regions(self)
        with self.active():
            room = whole_pages(_ROOM_FOR_TABLES)
            self.layouts = Layouts(room, self.register(room))
            kernels = Kernels(index, self._driver)
            self.launch, self.load = kernels.launch, kernels.load
            self.has_loaded = kernels.has_loaded
            self.reaches = self._neighbours()
            self._flushes = bool(self._runtime.deviceGetAttribute(CAN_FLUSH_REMOTE_WRITES, index))
            self.can_export = self._try_export()
            self.has_stream_values = self._try_values()
            if not self.has_stream_values:
                self.load(WriteKernel(0, 0))

    def active(self) -> AbstractContextManager[object]:
        return self._context

    def new_stream(self) -> int:
        stream: int = self._runtime.streamCreateWithPriority(_NON_BLOCKING, _HIGHEST_PRIORITY)
        return stream

    def free_stream(self, stream: int) -> None:
        self.regions.forget_stream(stream)
        with self.active():
            self._runtime.streamDestroy(stream)

    def new_event(self) -> int:
        event: int = self._runtime.eventCreateWithFlags(_WITHOUT_TIMING)
        return event

    def require_sound(self, stream: int) -> None:
        status = self._runtime.streamQuery(stream)
        if status not in (0, _NOT_READY):
            raise RingcommError(
                f"GPU {self.index} ({self._name}) failed with CUDA's error {status}; nothing that "
                "is on it can be used any more. The cause may be a kernel of this program: run it "
                "with CUDA_LAUNCH_BLOCKING=1"
            )

    def is_capturing(self, stream: int) -> bool:
        return self._driver.is_capturing(stream)

    def leave_captures_alone(self) -> None:
        self._driver.relax_captures()

    @contextlib.contextmanager
    def shown_as(self, label: str) -> Iterator[None]:
        cupy.cuda.nvtx.RangePush(label)
        try:
            yield
        finally:
            cupy.cuda.nvtx.RangePop()

    def copy(self, stream: int, target: int, source: int, nbytes: int) -> None:
        self._runtime.memcpyAsync(target, source, nbytes, _ANY_DIRECTION, stream)

    def allocate(self, nbytes: int) -> Memory:
        try:  # cudaMalloc(): memory of a pool cannot be exported
            address = self._runtime.malloc(nbytes)
        except self._runtime.CUDARuntimeError as error:
            free, whole = self._runtime.memGetInfo()
            raise MemoryError(
                f"GPU {self.index} has no room for {nbytes} bytes: {free} of {whole} are free "
                f"({error}). Pools of torch and cupy may hold more than they use: "
                "torch.cuda.empty_cache(), cupy.get_default_memory_pool().free_all_blocks()"
            ) from error
        return Memory(address, nbytes)

    def export(self, memory: Memory) -> bytes:
        exported: bytes = self._runtime.ipcGetMemHandle(memory.address)
        return exported

    def map(self, exported: bytes) -> int:
        with self.active():
            address: int = self._runtime.ipcOpenMemHandle(exported, _LAZY_PEER_ACCESS)
        return address

    def unmap(self, address: int) -> None:
        with self.active():
            self._runtime.ipcCloseMemHandle(address)

    def register(self, memory: Bytes) -> int:
        at = memory.ctypes.data
        if at not in self._registered:
            with self.active():
                self._runtime.hostRegister(at, memory.nbytes, _PORTABLE_AND_MAPPED)
                self._registered[at] = memory, self._driver.device_pointer(at)
        return self._registered[at][1]

    def write_value(self, stream: int, address: int, value: int) -> None:
        if self.has_stream_values:
            self._driver.write_value(stream, address, value)
        else:
            self.launch(stream, WriteKernel(address, value))

    def await_value(self, stream: int, address: int, value: int) -> None:
        self._driver.await_value(stream, address, value, flushes=self._flushes)

    def write_and_await(self, stream: int, own: int, others: tuple[int, ...], value: int) -> None:
        self._driver.write_and_await(stream, own, others, value, flushes=self._flushes)

    def finish(self, stream: int) -> None:
        with self.active():
            if self.is_capturing(stream):
                raise RingcommError(f"stream {stream:#x} captures a CUDA graph")
            event = self._runtime.eventCreateWithFlags(_SLEEPING_WAIT | _WITHOUT_TIMING)
            try:
                self._runtime.eventRecord(event, stream)
                self._runtime.eventSynchronize(event)
            finally:
                self._runtime.eventDestroy(event)

    def unregister(self, memory: Bytes) -> None:
        at = memory.ctypes.data
        if self._registered.pop(at, None) is not None:
            with self.active():
                self._runtime.hostUnregister(at)

    def _neighbours(self) -> tuple[str, ...]:
        others = (i for i in range(self._runtime.getDeviceCount()) if i != self.index)
        near = [i for i in others if self._runtime.deviceCanAccessPeer(self.index, i)]
        return (self.uuid, *(self._driver.uuid(i) for i in near))

    def _try_export(self) -> bool:
        """Return True if memory can be exported; containers and partitioned GPUs may refuse."""
        address = self._runtime.malloc(PAGE_NBYTES)
        try:
            self._runtime.ipcGetMemHandle(address)
        except self._runtime.CUDARuntimeError:
            return False
        finally:
            self._runtime.free(address)
        return True

    def _try_values(self) -> bool:
        page = whole_pages(PAGE_NBYTES)
        return self._driver.can_write_values(self.new_stream(), self.register(page))
