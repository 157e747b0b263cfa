"""The GPUs of one engine: devices, their shared memory, and the teams of its groups."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ringcomm.arrays.base import Array, DeviceAdapter
from ringcomm.engine.core.extensions import Extension
from ringcomm.errors import ConfigError
from ringcomm.gpu.device.base import Device
from ringcomm.gpu.executor.streams import Event, GpuMemory, Issue
from ringcomm.gpu.executor.team import GpuTeam

if TYPE_CHECKING:
    from ringcomm.engine.core.context import EngineContext
    from ringcomm.engine.core.group import Group
    from ringcomm.gpu.transports.choice import GpuChoice
    from ringcomm.gpu.transports.nccl import Provider

R = TypeVar("R")
_LOOK_EVERY_S = 2e-5


@dataclass(frozen=True)
class Drivers:
    """Functions that open GPUs; each raises ConfigError, whose text says what is missing.

    Attributes:
        open_device: returns the GPU of a number.
        provider: returns the binding of NCCL.
        require: returns if a GPU can be used; does not touch the library of arrays.
    """

    open_device: Callable[[int], Device]
    provider: Callable[[], Provider]
    require: Callable[[], None] = lambda: None


def cuda_drivers(nccl: str = "cupy") -> Drivers:
    """Return those of CUDA, with a binding of NCCL (see Settings); imports nothing yet."""

    def provider() -> Provider:
        if nccl == "nccl4py":
            from ringcomm.gpu.transports.nccl_nccl4py import Nccl4pyProvider

            return Nccl4pyProvider()
        from ringcomm.gpu.transports.nccl_cupy import CupyProvider

        return CupyProvider()

    return Drivers(_cuda_device, provider, _require_cuda)


def _require_cuda() -> None:
    from ringcomm.nvidia.presence import require
    from ringcomm.nvidia.probing import probe

    require(probe())


@functools.cache
def _cuda_device(index: int) -> Device:
    from ringcomm.gpu.device.cuda import CudaDevice

    return CudaDevice(index)


class Gpus:
    """The GPUs of one engine.

    Attributes:
        current: the GPU of the thread that last called join(), or the like; see any_memory.
    """

    def __init__(self, engine: EngineContext, drivers: Drivers) -> None:
        self._engine = engine
        self._drivers = drivers
        self._lock = threading.Lock()
        self._memories: dict[int, GpuMemory] = {}
        self._teams: dict[int, GpuTeam] = {}
        self._freeing: list[threading.Thread] = []
        self.current = 0
        self._provider: Provider | None = None
        self._no_provider: ConfigError | None = None

    @classmethod
    def of(cls, engine: EngineContext) -> Gpus:
        """Return those of this engine."""
        found = engine.extensions.get(_GPUS)
        if found is None:
            made = cls(engine, cuda_drivers(engine.settings.nccl))
            found = engine.extensions.get_or_keep(_GPUS, made)
            found._attach(engine)
        return found

    @classmethod
    def use(cls, engine: EngineContext, drivers: Drivers) -> Gpus:
        """Give this engine other drivers; before anything is on a GPU."""
        found = cls(engine, drivers)
        engine.extensions.keep(_GPUS, found)
        found._attach(engine)
        return found

    def _attach(self, engine: EngineContext) -> None:
        engine.extensions.before_closing(self.close)
        engine.extensions.free_with_groups(self._free_team)

    def _free_team(self, group_id: int) -> None:
        """Free a team whose streams are idle on all ranks; a thread of its own waits for CUDA."""
        with self._lock:
            team = self._teams.pop(group_id, None)
        if team is not None:
            thread = threading.Thread(target=team.close, kwargs={"is_clean": True}, daemon=True)
            thread.start()
            self._freeing = [*(each for each in self._freeing if each.is_alive()), thread]

    @property
    def provider(self) -> Provider:
        """The binding of NCCL. Raises ConfigError, which says why there is none."""
        if self._no_provider is not None:
            raise self._no_provider
        if self._provider is None:
            try:
                self._provider = self._drivers.provider()
            except Exception as error:  # whatever a binding raises: other transports may do
                is_config = isinstance(error, ConfigError)
                why = str(error) if is_config else f"{type(error).__name__}: {error}"
                self._no_provider = ConfigError(why)  # to look again would take half a second
                raise self._no_provider from error
        return self._provider

    def require(self) -> None:
        """Return if this rank can use a GPU. Raises ConfigError, which says what is missing."""
        if not self._memories:  # where one is in use, nothing need be looked for
            self._drivers.require()

    def memory(self, index: int) -> GpuMemory:
        """Return a GPU. Raises ConfigError, which says why it cannot be used."""
        with self._lock:
            found = self._memories.get(index)
            if found is None:
                device = self._drivers.open_device(index)
                found = self._memories[index] = GpuMemory(device, self._engine.shared_memory)
            return found

    def team(self, group: Group) -> GpuTeam:
        """Return what carries out the operations of a group."""
        group_id = group.ledger_for(self._engine).group_id
        with self._lock:
            found = self._teams.get(group_id)
            if found is None:
                found = self._teams[group_id] = GpuTeam(lambda: self.provider, group, group_id)
            return found

    def choice(self, group: Group) -> GpuChoice | None:
        """Return the transport of a group, None before its first operation on a GPU."""
        team = self._teams.get(group.ledger_for(self._engine).group_id)
        return None if team is None else team.choice

    @property
    def any_memory(self) -> GpuMemory:
        """A GPU for what comes without one: the first that was used, else the caller's, else 0."""
        if self._memories:
            return next(iter(self._memories.values()))
        return self.memory(self.current)

    def close(self, *, is_clean: bool) -> None:
        """Free everything; `is_clean`: no rank of the job has anything under way."""
        for thread in self._freeing if is_clean else ():
            thread.join()
        for team in self._teams.values():
            team.close(is_clean=is_clean)
        for memory in self._memories.values():
            memory.host.close(is_clean=is_clean)
        self._teams.clear()
        self._engine.extensions.drop(_GPUS)  # no cycle may keep the engine alive


_GPUS = Extension[Gpus]()


def issue_of(group: Group, adapter: DeviceAdapter, *arrays: Array) -> Issue:
    """Return this moment of the caller's stream.

    Raises:
        ConfigError: the GPU cannot be used.
        ValueError: the arrays are on several GPUs.
    """
    indices = sorted({adapter.device(x) for x in arrays})
    if len(indices) > 1:
        raise ValueError(f"the arrays are on GPUs {indices}: one call takes those of one GPU")
    memory = Gpus.of(group.engine).memory(indices[0])
    stream = adapter.stream(indices[0])
    return Issue(adapter, memory, stream, [Event(memory.device, stream)])
