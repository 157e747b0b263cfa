"""The GPUs of one engine: devices, their shared memory, and the teams of its groups."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringcomm.arrays.base import Array, DeviceAdapter
from ringcomm.engine.core.layer_hooks import Extension
from ringcomm.errors import ConfigError
from ringcomm.gpu.device.base import Device
from ringcomm.gpu.executor.streams import Event, GpuMemory, Issue, refuse_capture
from ringcomm.gpu.executor.team import GpuTeam

if TYPE_CHECKING:
    from ringcomm.engine.core.context import EngineContext
    from ringcomm.engine.core.group import Group
    from ringcomm.gpu.transports.nccl_base import NcclBinding
    from ringcomm.gpu.transports.transport_choice import GpuChoice


@dataclass(frozen=True)
class Drivers:
    """Functions that open GPUs. Each raises ConfigError, which says what is missing.

    Attributes:
        open_device: function that returns the GPU with a given number.
        provider: function that returns the binding of NCCL.
        require: function that checks whether this process can use a GPU.
    """

    open_device: Callable[[int], Device]
    provider: Callable[[], NcclBinding]
    require: Callable[[], None] = lambda: None


def cuda_drivers() -> Drivers:
    """Return the drivers of CUDA, which import nothing yet."""

    def open_device(index: int) -> Device:
        from ringcomm.gpu.device.cupy_device import open_cuda

        return open_cuda(index)

    def provider() -> NcclBinding:
        from ringcomm.gpu.transports.nccl_cupy import CupyNccl

        return CupyNccl()

    return Drivers(open_device, provider, _require_cuda)


def _require_cuda() -> None:
    from ringcomm.nvidia.find_software import probe
    from ringcomm.nvidia.judge_software import require

    require(probe())


class Gpus:
    """The GPUs of one engine.

    Attributes:
        current: the current GPU of the thread that last called note_current_gpu(); see any_memory.
    """

    def __init__(self, engine: EngineContext, drivers: Drivers) -> None:
        self._engine = engine
        self._drivers = drivers
        self._lock = threading.Lock()
        self._memories: dict[int, GpuMemory] = {}
        self._teams: dict[int, GpuTeam] = {}
        self._closing: list[threading.Thread] = []
        self.current = 0
        self._provider: NcclBinding | None = None
        self._no_provider: ConfigError | None = None

    @classmethod
    def of(cls, engine: EngineContext) -> Gpus:
        found = engine.extensions.get(_GPUS)
        if found is None:
            made = cls(engine, cuda_drivers())
            found = engine.extensions.get_or_keep(_GPUS, made)
            found._attach(engine)
        return found

    @classmethod
    def use(cls, engine: EngineContext, drivers: Drivers) -> None:
        """Set the drivers of an engine, before its first operation on a GPU."""
        found = cls(engine, drivers)
        engine.extensions.keep(_GPUS, found)
        found._attach(engine)

    def _attach(self, engine: EngineContext) -> None:
        engine.extensions.before_closing(self.close)
        engine.extensions.free_with_groups(self._close_team)

    def _close_team(self, group_id: int) -> None:
        """Close a team, whose streams are idle on all ranks, in a thread: CUDA may block it."""
        with self._lock:  # close() waits for each thread that has begun
            team = self._teams.pop(group_id, None)
            if team is not None:
                thread = threading.Thread(target=team.close, kwargs={"is_clean": True}, daemon=True)
                thread.start()
                self._closing = [*(each for each in self._closing if each.is_alive()), thread]

    @property
    def provider(self) -> NcclBinding:
        """The binding of NCCL. Raises ConfigError, which says why there is none."""
        if self._no_provider is not None:
            raise self._no_provider
        if self._provider is None:
            try:
                self._provider = self._drivers.provider()
            except Exception as error:  # of any kind: another transport may work without NCCL
                is_config = isinstance(error, ConfigError)
                why = str(error) if is_config else f"{type(error).__name__}: {error}"
                self._no_provider = ConfigError(why)  # a second search would take 0.5 s
                raise self._no_provider from error
        return self._provider

    def require(self) -> None:
        """Check that this rank can use a GPU. Raises ConfigError, which says what is missing."""
        if not self._memories:  # a rank that uses a GPU already needs no search
            self._drivers.require()

    def memory(self, index: int) -> GpuMemory:
        """Return the memory of a GPU. Raises ConfigError, which says why it cannot be used."""
        if index not in self._memories:
            with self._lock:
                if index not in self._memories:
                    device = self._drivers.open_device(index)
                    self._memories[index] = GpuMemory(device, self._engine.shared_memory)
        return self._memories[index]

    def team(self, group: Group) -> GpuTeam:
        group_id = group.ledger_for(self._engine).group_id
        with self._lock:
            found = self._teams.get(group_id)
            if found is None:
                found = self._teams[group_id] = GpuTeam(lambda: self.provider, group, group_id)
            return found

    def choice(self, group: Group) -> GpuChoice | None:
        """Return the transport of a group; None before the group's first operation on a GPU."""
        team = self._teams.get(group.ledger_for(self._engine).group_id)
        return None if team is None else team.choice

    @property
    def any_memory(self) -> GpuMemory:
        """The GPU for a rank that passes no array: the first that it used, else the current one."""
        if self._memories:
            return next(iter(self._memories.values()))
        return self.memory(self.current)

    def close(self, *, is_clean: bool) -> None:
        """Free everything; `is_clean`: no rank of the job has an operation under way."""
        with self._lock:
            closing, teams = self._closing, [*self._teams.values()]
            self._teams.clear()
        for thread in closing if is_clean else ():
            thread.join()
        for team in teams:
            team.close(is_clean=is_clean)
        for memory in self._memories.values():
            memory.close(is_clean=is_clean)
        self._engine.extensions.drop(_GPUS)  # ends the reference cycle with the engine


_GPUS = Extension[Gpus]()


def issue_of(group: Group, adapter: DeviceAdapter, *arrays: Array) -> Issue:
    """Return an Issue that marks the present end of the work on the caller's stream.

    Raises:
        ConfigError: the GPU cannot be used.
        RingcommError: the caller's stream captures a CUDA graph.
        ValueError: the arrays are on several GPUs.
    """
    index = adapter.device(arrays[0])
    if len(arrays) > 1 and any(adapter.device(x) != index for x in arrays[1:]):
        indices = sorted({adapter.device(x) for x in arrays})
        raise ValueError(f"the arrays are on GPUs {indices}: one call takes arrays of one GPU")
    memory = Gpus.of(group.engine).memory(index)
    stream = adapter.stream(index)
    with memory.device.active():
        refuse_capture(memory.device, stream)
        return Issue(adapter, memory, stream, [Event(memory, stream)])
