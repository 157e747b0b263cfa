"""What one rank's engine has of GPUs: those it uses, their shared memory, its groups' teams."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from ringcomm.arrays.base import Array, DeviceAdapter, Flat, Span
from ringcomm.engine.core.execution import Deferred
from ringcomm.engine.core.extensions import Extension
from ringcomm.engine.core.state import n_forks
from ringcomm.errors import ConfigError
from ringcomm.gpu.device.base import Device
from ringcomm.gpu.device.host_pool import HostPool

if TYPE_CHECKING:
    from ringcomm.engine.core.context import EngineContext
    from ringcomm.engine.core.group import Group
    from ringcomm.gpu.executor.team import GpuTeam
    from ringcomm.gpu.transports.nccl import Provider

R = TypeVar("R")
_LOOK_EVERY_S = 2e-5


@dataclass(frozen=True)
class Drivers:
    """How a process comes to its GPUs.

    Attributes:
        open_device: returns the GPU of this number, or raises ConfigError.
        provider: returns the binding of NCCL, or raises ConfigError, whose text says why not.
        require: raises ConfigError if no GPU can be used; before the library of arrays is touched.
    """

    open_device: Callable[[int], Device]
    provider: Callable[[], Provider]
    require: Callable[[], None] = lambda: None


def cuda_drivers(nccl: str = "cupy") -> Drivers:
    """Return those of CUDA; imports nothing yet.

    Args:
        nccl: what binds NCCL, see Settings.
    """

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


class GpuMemory:
    """A GPU that this rank uses, with what it shares of it and of host memory.

    Attributes:
        device: the GPU.
        regions: its memory that other ranks can map.
        host: memory of this rank's node that the GPU can reach.
        copy_stream: what goes to and from it is on this one.
    """

    def __init__(self, device: Device, engine: EngineContext) -> None:
        self.device = device
        with device.active():
            self.copy_stream = device.new_stream()
        self.regions = device.regions
        self.host = HostPool(device, engine.shared_memory)

    def upload(self, x: Flat, target: Span, ready: Event) -> None:
        """Copy host memory to the GPU, once `ready` is reached; blocks until it is there."""
        if not target.nbytes:
            return
        block = self.host.take(target.nbytes)
        block.bytes[:] = x.bytes
        with self.device.active():
            self.device.await_event(self.copy_stream, ready.handle)
            self.device.copy(self.copy_stream, target.address, block.address, target.nbytes)
        here = Event(self.device, self.copy_stream)
        while not here.is_reached:
            time.sleep(_LOOK_EVERY_S)  # nothing but this copy is awaited
        self.host.give_back(block)


class Event:
    """A point in the work of a stream, freed with the last reference to it.

    Args:
        device: whose stream it is.
        stream: reached once all is done that it has been given until now.

    Attributes:
        was_reached: somebody has seen that it is.
    """

    def __init__(self, device: Device, stream: int) -> None:
        self._device = device
        self._n_forks = n_forks()
        self.was_reached = False
        with device.active():
            self.handle = device.new_event()
            device.record(self.handle, stream)

    @property
    def is_reached(self) -> bool:
        """True once it is. Raises RingcommError: the GPU has failed."""
        if not self.was_reached:
            with self._device.active():
                self.was_reached = self._device.is_reached(self.handle)
        return self.was_reached

    def __del__(self) -> None:
        if hasattr(self, "handle") and n_forks() == self._n_forks and not sys.is_finalizing():
            with self._device.active():
                self._device.free_event(self.handle)


class Reached:
    """Request that waits for an event.

    Args:
        event: the event.
        behind: an earlier one of the same stream, which somebody else waits for: the GPU is asked
            for the earliest alone, however many follow.
    """

    source = -1

    def __init__(self, event: Event, behind: Event | None = None) -> None:
        self._event = event
        self._behind = behind

    def test(self) -> bool:
        """Return True once it is reached. Raises RingcommError: the GPU has failed."""
        if self._behind is not None:
            if not self._behind.was_reached:
                return False
            self._behind = None
        return self._event.is_reached

    def cancel(self) -> None:
        """Do nothing: a stream cannot be stopped."""


class Gpus:
    """The GPUs of one engine.

    Args:
        engine: whose they are.
        drivers: how to come to them.

    Attributes:
        current: the GPU of the thread that last called join(), or the like; see any_memory.
    """

    def __init__(self, engine: EngineContext, drivers: Drivers) -> None:
        self._engine = engine
        self._drivers = drivers
        self._lock = threading.Lock()
        self._memories: dict[int, GpuMemory] = {}
        self._teams: dict[int, GpuTeam] = {}
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
            engine.extensions.before_closing(found.close)
        return found

    @classmethod
    def use(cls, engine: EngineContext, drivers: Drivers) -> Gpus:
        """Let this engine come to its GPUs by other drivers; before anything is on one."""
        found = cls(engine, drivers)
        engine.extensions.keep(_GPUS, found)
        engine.extensions.before_closing(found.close)
        return found

    @property
    def provider(self) -> Provider:
        """The binding of NCCL. Raises ConfigError, which says why there is none."""
        if self._no_provider is not None:
            raise self._no_provider
        if self._provider is None:
            try:
                self._provider = self._drivers.provider()
            except Exception as error:  # whatever a binding raises: other transports may do
                is_told = isinstance(error, ConfigError)
                why = str(error) if is_told else f"{type(error).__name__}: {error}"
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
                found = self._memories[index] = GpuMemory(device, self._engine)
            return found

    def team(self, group: Group) -> GpuTeam:
        """Return what carries out the operations of a group."""
        from ringcomm.gpu.executor.team import GpuTeam

        group_id = group.ledger_for(self._engine).group_id
        with self._lock:
            found = self._teams.get(group_id)
            if found is None:
                found = self._teams[group_id] = GpuTeam(self, group, group_id)
            return found

    def team_or_none(self, group: Group) -> GpuTeam | None:
        """Return it, if any operation of the group has been on a GPU."""
        return self._teams.get(group.ledger_for(self._engine).group_id)

    @property
    def any_memory(self) -> GpuMemory:
        """A GPU for what comes without one: the first that was used, else the caller's, else 0."""
        if self._memories:
            return next(iter(self._memories.values()))
        return self.memory(self.current)

    def close(self, *, is_clean: bool) -> None:
        """Give everything back; the engine does nothing more.

        Args:
            is_clean: no rank of the job has anything under way.
        """
        for team in self._teams.values():
            team.close(is_clean=is_clean)
        for memory in self._memories.values():
            memory.host.close(is_clean=is_clean)
        self._teams.clear()
        self._engine.extensions.drop(_GPUS)  # no cycle may keep the engine alive


_GPUS = Extension[Gpus]()


@dataclass(frozen=True)
class Issue:
    """An operation at the moment it was called: what the stream had been given until then.

    Attributes:
        adapter: of the arrays' library.
        memory: of their GPU.
        stream: the caller's, as the library counts it.
        ready: are reached once the arrays have their contents, or can be written to.
    """

    adapter: DeviceAdapter
    memory: GpuMemory
    stream: int
    ready: list[Event]

    @classmethod
    def of(cls, group: Group, adapter: DeviceAdapter, *arrays: Array) -> Issue:
        """Take note of this moment.

        Raises:
            ConfigError: the GPU cannot be used.
            ValueError: the arrays are on several GPUs.
        """
        indices = sorted({adapter.device(x) for x in arrays})
        if len(indices) > 1:
            raise ValueError(f"the arrays are on GPUs {indices}: one call takes those of one GPU")
        memory = Gpus.of(group.engine).memory(indices[0])
        stream = adapter.stream(indices[0])
        return cls(adapter, memory, stream, [Event(memory.device, stream)])

    def on(self, stream: int) -> AbstractContextManager[object]:
        """Return a context in which the library's current stream is this one, on the GPU."""
        return self.adapter.on_stream(self.memory.device.index, stream)

    def empty(self, like: Array, shape: tuple[int, ...]) -> Array:
        """Return an array that belongs to the caller's stream.

        Its memory may be what that stream was given since the call, and has not done with.
        """
        with self.on(self.stream):
            made = self.adapter.empty(like, shape)
        self.ready.append(Event(self.memory.device, self.stream))
        return made

    def let_wait(self, stream: int) -> None:
        """Let a stream wait until the arrays are ready."""
        device = self.memory.device
        with device.active():
            for event in self.ready:
                device.await_event(stream, event.handle)


class Launched(Deferred, Generic[R]):
    """The result of an operation that is on its stream: there, once the caller's stream waits.

    Args:
        result: the arrays.
        issue: of the operation.
        done: behind it on its stream.
        refuse: raises what has gone wrong since.
    """

    def __init__(self, result: R, issue: Issue, done: Event, refuse: Callable[[], None]) -> None:
        self._result = result
        self._issue = issue
        self._done = done
        self._refuse = refuse

    def take(self) -> R:
        """Return the result; what the caller's stream is given from now on comes after it.

        Raises:
            PeerFailedError, CommTimeoutError: it will never be there.
        """
        self._refuse()
        device = self._issue.memory.device
        with device.active():
            device.await_event(self._issue.adapter.stream(device.index), self._done.handle)
        return self._result
