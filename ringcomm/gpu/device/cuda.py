"""A CUDA GPU: through cupy's binding of the runtime, and the driver for what cupy lacks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import cupy

from ringcomm.arrays.base import Bytes
from ringcomm.errors import ConfigError, RingcommError
from ringcomm.gpu.device.base import KernelPack, KernelReduction, KernelUpdate
from ringcomm.gpu.device.driver import CAN_FLUSH_REMOTE_WRITES, Driver
from ringcomm.gpu.device.host_pool import PAGE_NBYTES, whole_pages
from ringcomm.gpu.device.memory import Memory
from ringcomm.gpu.device.packing import Layouts
from ringcomm.gpu.device.regions import Regions
from ringcomm.gpu.kernels.compiling import Kernels
from ringcomm.gpu.kernels.reduce import ReduceKernel
from ringcomm.gpu.kernels.update import UpdateKernel
from ringcomm.nvidia.presence import require
from ringcomm.nvidia.probing import probe

# Values from CUDA's headers.
_NON_BLOCKING, _HIGHEST_PRIORITY = 1, -100  # CUDA clamps the latter to the highest
_WITHOUT_TIMING = 2
_ANY_DIRECTION = 4
_NOT_READY = 600
_PORTABLE_AND_MAPPED = 3
_LAZY_PEER_ACCESS = 1
_ROOM_FOR_TABLES = 1 << 20  # bytes: enough for the layouts of 350 million elements


class CudaDevice:
    """A Device of CUDA: one per GPU, which lives as long as the process.

    Args:
        index: the GPU's number in this process, as CUDA counts.

    Raises:
        ConfigError: there is no such GPU, or something that it needs is missing.
    """

    def __init__(self, index: int) -> None:
        stack = probe()
        require(stack)
        if not 0 <= index < len(stack.driver.gpus):
            raise ConfigError(
                f"there is no GPU {index}: this process sees {len(stack.driver.gpus)}. Look at "
                "CUDA_VISIBLE_DEVICES"
            )
        self._runtime: Any = cupy.cuda.runtime
        self._driver = Driver()
        self.index = index
        self.name = stack.driver.gpus[index].name
        self.uuid = self._driver.uuid(index)
        self._context = self._driver.context(index)
        self._registered: dict[int, tuple[Bytes, int]] = {}
        self.regions = Regions(self)
        with self.active():
            room = whole_pages(lambda _: None, _ROOM_FOR_TABLES)
            self._layouts = Layouts(room, self.register(room))
            self.kernels = Kernels(index)
            self.reaches = self._neighbours()
            self._flushes = bool(self._runtime.deviceGetAttribute(CAN_FLUSH_REMOTE_WRITES, index))
            self.can_export = self._try_export()
            self.has_stream_values = self._try_values()

    def active(self) -> AbstractContextManager[object]:
        """Return a context in which this is the calling thread's GPU."""
        return self._context

    def new_stream(self) -> int:
        """Return a stream of the highest priority, beside the default stream."""
        stream: int = self._runtime.streamCreateWithPriority(_NON_BLOCKING, _HIGHEST_PRIORITY)
        return stream

    def free_stream(self, stream: int) -> None:
        """See Device."""
        with self.active():
            self._runtime.streamDestroy(stream)

    def new_event(self) -> int:
        """Return an event without timing."""
        event: int = self._runtime.eventCreateWithFlags(_WITHOUT_TIMING)
        return event

    def free_event(self, event: int) -> None:
        """See Device."""
        self._runtime.eventDestroy(event)

    def record(self, event: int, stream: int) -> None:
        """See Device."""
        self._runtime.eventRecord(event, stream)

    def await_event(self, stream: int, event: int) -> None:
        """See Device."""
        self._runtime.streamWaitEvent(stream, event)

    def is_reached(self, event: int) -> bool:
        """See Device."""
        status = self._runtime.eventQuery(event)
        if status not in (0, _NOT_READY):
            raise RingcommError(
                f"GPU {self.index} ({self.name}) failed with CUDA's error {status}; nothing that "
                "is on it can be used any more. The cause may be a kernel of this program: run it "
                "with CUDA_LAUNCH_BLOCKING=1"
            )
        return bool(status == 0)

    def copy(self, stream: int, target: int, source: int, nbytes: int) -> None:
        """See Device."""
        self._runtime.memcpyAsync(target, source, nbytes, _ANY_DIRECTION, stream)

    def reduce(self, stream: int, what: KernelReduction) -> None:
        """See Device."""
        kernel = ReduceKernel(what.dtype, what.op, len(what.sources), len(what.targets))
        arguments = kernel.pack_arguments(
            what.sources, what.targets, hi=what.count, divisor=what.divisor
        )
        self.kernels.launch(stream, kernel, arguments, what.count)

    def update(self, stream: int, what: KernelUpdate) -> None:
        """See Device."""
        counts = len(what.sources), len(what.targets)
        kernel = UpdateKernel(what.gradient, what.weight, what.rule, *counts)
        arguments = kernel.pack_arguments(
            *(what.sources, what.targets, what.owned, what.numbers), hi=what.count, scale=what.scale
        )
        self.kernels.launch(stream, kernel, arguments, what.count)

    def pack(self, stream: int, what: KernelPack) -> bool:
        """See Device."""
        launches = self._layouts.launches(what)
        for each in launches or ():
            self.kernels.launch(stream, each.kernel, each.arguments, each.n_chunks)
        return launches is not None

    def allocate(self, nbytes: int) -> Memory:
        """Return memory from cudaMalloc, because memory of pools cannot be exported."""
        try:
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
        """See Device."""
        exported: bytes = self._runtime.ipcGetMemHandle(memory.address)
        return exported

    def map(self, exported: bytes) -> int:
        """See Device."""
        with self.active():
            address: int = self._runtime.ipcOpenMemHandle(exported, _LAZY_PEER_ACCESS)
        return address

    def unmap(self, address: int) -> None:
        """See Device."""
        with self.active():
            self._runtime.ipcCloseMemHandle(address)

    def register(self, memory: Bytes) -> int:
        """See Device."""
        at = memory.ctypes.data
        if at not in self._registered:
            with self.active():
                self._runtime.hostRegister(at, memory.nbytes, _PORTABLE_AND_MAPPED)
                self._registered[at] = memory, self._driver.device_pointer(at)
        return self._registered[at][1]

    def write_value(self, stream: int, address: int, value: int) -> None:
        """See Device."""
        self._driver.write_value(stream, address, value)

    def await_value(self, stream: int, address: int, value: int) -> None:
        """See Device."""
        self._driver.await_value(stream, address, value, flushes=self._flushes)

    def synchronize(self) -> None:
        """See Device."""
        with self.active():
            self._runtime.deviceSynchronize()

    def unregister(self, memory: Bytes) -> None:
        """See Device."""
        at = memory.ctypes.data
        if self._registered.pop(at, None) is not None:
            with self.active():
                self._runtime.hostUnregister(at)

    def _neighbours(self) -> tuple[str, ...]:
        """Return the uuids of the GPUs whose memory this one can reach."""
        others = (i for i in range(self._runtime.getDeviceCount()) if i != self.index)
        near = [i for i in others if self._runtime.deviceCanAccessPeer(self.index, i)]
        return (self.uuid, *(self._driver.uuid(i) for i in near))

    def _try_export(self) -> bool:
        """Return True if memory can be exported; containers and partitioned GPUs may refuse it."""
        address = self._runtime.malloc(PAGE_NBYTES)
        try:
            self._runtime.ipcGetMemHandle(address)
        except self._runtime.CUDARuntimeError:
            return False
        finally:
            self._runtime.free(address)
        return True

    def _try_values(self) -> bool:
        page = whole_pages(lambda _: None, PAGE_NBYTES)
        return self._driver.can_write_values(self.new_stream(), self.register(page))
