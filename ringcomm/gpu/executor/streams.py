"""How operations use the streams of GPUs: events, waits, and the point of a call on a stream."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, TypeVar

from ringcomm.arrays.base import Array, Bytes, DeviceAdapter, Flat, Span
from ringcomm.engine.core.engine_state import n_forks
from ringcomm.engine.core.plan import Deferred
from ringcomm.gpu.device.base import Device
from ringcomm.gpu.device.shared_pinned_pool import HostPool

R = TypeVar("R")
_LOOK_EVERY_S = 2e-5


class GpuMemory:
    """A GPU that this rank uses, with host memory that the GPU can access.

    Args:
        device: the GPU.
        take: function that returns host memory that the ranks of the node share, or None.

    Attributes:
        host: host memory for copies, shared by the ranks of the node if possible.
        copy_stream: the stream for copies to and from host memory.
    """

    def __init__(self, device: Device, take: Callable[[int], Bytes | None]) -> None:
        self.device = device
        with device.active():
            self.copy_stream = device.new_stream()
        self.host = HostPool(device, take)

    def upload(self, x: Flat, target: Span, ready: Event) -> None:
        """Copy host memory to the GPU once `ready` is reached; blocks until the copy is done."""
        if not target.nbytes:
            return
        block = self.host.take(target.nbytes)
        block.bytes[:] = x.bytes
        with self.device.active():
            self.device.await_event(self.copy_stream, ready.handle)
            self.device.copy(self.copy_stream, target.address, block.address, target.nbytes)
        here = Event(self.device, self.copy_stream)
        while not here.is_reached:
            time.sleep(_LOOK_EVERY_S)  # only this short copy is awaited
        self.host.give_back(block)


class Event:
    """The present end of a stream's work; the event is reached once that work is done.

    Attributes:
        was_reached: is_reached has returned True.
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
        """True if the event is reached. Raises RingcommError if the GPU has failed."""
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

    `behind` is an earlier event of the same stream, for which another Reached waits. So only the
    earliest of many events of a stream is polled.
    """

    source = -1

    def __init__(self, event: Event, behind: Event | None = None) -> None:
        self._event = event
        self._behind = behind

    def test(self) -> bool:
        """Return True if the event is reached. Raises RingcommError if the GPU has failed."""
        if self._behind is not None:
            if not self._behind.was_reached:
                return False
            self._behind = None
        return self._event.is_reached

    def cancel(self) -> None:
        """Do nothing: a stream cannot be stopped."""


@dataclass(frozen=True)
class Issue:
    """The point on the caller's stream at which an operation was called."""

    adapter: DeviceAdapter
    memory: GpuMemory
    stream: int  # the current stream of the array library at the call
    ready: list[Event]  # all are reached once the arrays can be read, or be written to

    def on(self, stream: int) -> AbstractContextManager[object]:
        """Return a context in which `stream` is the array library's current stream on the GPU."""
        return self.adapter.on_stream(self.memory.device.index, stream)

    def empty(self, like: Array, shape: tuple[int, ...]) -> Array:
        """Return an array that belongs to the caller's stream.

        Work enqueued on that stream after the call may still use this memory, so let_wait() also
        waits for that work.
        """
        with self.on(self.stream):
            made = self.adapter.empty(like, shape)
        self.ready.append(Event(self.memory.device, self.stream))
        return made

    def let_wait(self, stream: int) -> None:
        """Make a stream wait until all arrays are ready."""
        device = self.memory.device
        with device.active():
            for event in self.ready:
                device.await_event(stream, event.handle)


class Launched(Deferred, Generic[R]):
    """The result of an operation that is enqueued on a stream.

    Args:
        result: the operation's result.
        issue: the operation's Issue.
        done: the event that is reached once the result is complete.
        require_unbroken: function that raises the error that has broken the engine, if any.
    """

    def __init__(
        self, result: R, issue: Issue, done: Event, require_unbroken: Callable[[], None]
    ) -> None:
        self._result = result
        self._issue = issue
        self._done = done
        self._require_unbroken = require_unbroken

    def take(self) -> R:
        """Return the result, and make the caller's stream wait for it.

        Raises:
            PeerFailedError, CommTimeoutError: the operation will never complete.
        """
        self._require_unbroken()
        device = self._issue.memory.device
        with device.active():
            device.await_event(self._issue.adapter.stream(device.index), self._done.handle)
        return self._result
