"""Streams of GPUs as operations use them: events, waits, and the moment of a call."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, TypeVar

from ringcomm.arrays.base import Array, Bytes, DeviceAdapter, Flat, Span
from ringcomm.engine.core.execution import Deferred
from ringcomm.engine.core.state import n_forks
from ringcomm.gpu.device.base import Device
from ringcomm.gpu.device.host_pool import HostPool

R = TypeVar("R")
_LOOK_EVERY_S = 2e-5


class GpuMemory:
    """A GPU that this rank uses, and the host memory that it reaches.

    Attributes:
        regions: its memory that other ranks can map.
        host: memory of this rank's node, if `take` returns such.
        copy_stream: for copies to and from host memory.
    """

    def __init__(self, device: Device, take: Callable[[int], Bytes | None]) -> None:
        self.device = device
        with device.active():
            self.copy_stream = device.new_stream()
        self.regions = device.regions
        self.host = HostPool(device, take)

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
    """A point in the work of a stream, reached once all is done that it has been given until now.

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

    `behind` is an earlier one of the same stream, which somebody else waits for: the GPU is asked
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


@dataclass(frozen=True)
class Issue:
    """The moment of a call, on the caller's stream as the arrays' library counts it."""

    adapter: DeviceAdapter
    memory: GpuMemory
    stream: int
    ready: list[Event]  # are reached once the arrays have their contents, or can be written to

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
        """Make a stream wait until the arrays are ready."""
        device = self.memory.device
        with device.active():
            for event in self.ready:
                device.await_event(stream, event.handle)


class Launched(Deferred, Generic[R]):
    """The result of an operation that is on its stream, before the event `done`.

    `refuse` raises what has gone wrong since.
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
