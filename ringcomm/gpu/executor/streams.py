"""Streams of GPUs: events, waits, and the point of a call on a stream."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from ringcomm.arrays.base import Array, Bytes, DeviceAdapter, Flat, Span
from ringcomm.engine.core.plan import Deferred
from ringcomm.errors import RingcommError
from ringcomm.gpu.device.base import Device
from ringcomm.gpu.device.pinned_pool import PAGE_NBYTES, HostPool, whole_pages
from ringcomm.gpu.executor.idle_calls import IdleCalls
from ringcomm.gpu.executor.launcher import CudaLauncher

R = TypeVar("R")
_LOOK_EVERY_S = 2e-5
_LINE_NBYTES = 128  # no two words of different streams share a cache line


class GpuMemory:
    """A GPU that this rank uses, with host memory that the GPU can access.

    Args:
        device: the GPU.
        take: function that returns host memory that the ranks of the node share, or None.

    Attributes:
        host: host memory for copies, shared by the ranks of the node if possible.
        copy_stream: the stream for copies to and from host memory.
        copies: the marks of copy_stream.
        launcher: the thread that calls CUDA for the progress loop.
        idle_calls: makes the calls that may wait until all streams are idle.
        spare_events: events that nobody uses any more.
    """

    def __init__(self, device: Device, take: Callable[[int], Bytes | None]) -> None:
        self.device = device
        self.host = HostPool(device, take)
        self.spare_events: deque[int] = deque()
        self._spare_lines: deque[tuple[Bytes, int]] = deque()
        with device.active():
            self.copy_stream = device.new_stream()
        self.launcher = CudaLauncher(device, self.copy_stream)
        self.idle_calls = IdleCalls(device, self.launcher)
        self.copies = Marks(self, self.copy_stream)

    def upload(self, x: Flat, target: Span, ready: Event) -> None:
        """Copy host memory to the GPU once `ready` is reached; blocks until the copy is done."""
        if not target.nbytes:
            return
        block = self.host.take(target.nbytes)
        block.bytes[:] = x.bytes
        with self.device.active():
            self.device.await_event(self.copy_stream, ready.handle)
            at = self.host.address(block)
            self.device.copy(self.copy_stream, target.address, at, target.nbytes)
            here = Reached(self.copies.make())
        while not here.test():
            time.sleep(_LOOK_EVERY_S)  # only this short copy is awaited
        self.host.give_back(block)

    def take_line(self) -> tuple[Bytes, int]:
        """Return zeroed host memory for the word of one stream, and its address on the GPU."""
        if not self._spare_lines:
            page = whole_pages(PAGE_NBYTES)
            at = self.host.register(page)
            starts = range(0, PAGE_NBYTES, _LINE_NBYTES)
            self._spare_lines.extend((page[i : i + _LINE_NBYTES], at + i) for i in starts)
        line, address = self._spare_lines.popleft()
        line[:] = 0
        return line, address

    def give_line(self, line: Bytes, address: int) -> None:
        """Keep a line, to which no stream writes any more, for a later take_line()."""
        self._spare_lines.append((line, address))

    def close(self, *, is_clean: bool) -> None:
        self.launcher.stop()
        self.host.close(is_clean=is_clean)


class Marks:
    """Counts how far a stream has come, in a word of host memory that the stream writes.

    Who reads the word calls no function of CUDA. Such a call may block as long as the stream waits
    for another rank, and the query of an event ends the capture of a CUDA graph.
    """

    def __init__(self, memory: GpuMemory, stream: int) -> None:
        self.launcher = memory.launcher
        self._device, self._stream = memory.device, stream
        self._line, self._address = memory.take_line()
        self._word = self._line[:4].view(np.uint32)
        self._n_made = 0
        self._lock = threading.Lock()

    def make(self) -> Mark:
        """Return a mark of the stream's present end; within `device.active()`. Any thread."""
        with self._lock:  # the word must not go back
            self._n_made = (self._n_made + 1) % (1 << 32)
            self._device.write_value(self._stream, self._address, self._n_made)
            return Mark(self, self._n_made)

    def has_passed(self, number: int) -> bool:
        """Return True if the stream has written this number, or a later one."""
        return (int(self._word[0]) - number) % (1 << 32) < 1 << 31

    def close(self, memory: GpuMemory) -> None:
        """Give the word back, once the stream's work is done."""
        memory.give_line(self._line, self._address)


@dataclass(slots=True, eq=False)
class Mark:
    """A point in the work of a stream."""

    marks: Marks
    number: int

    @property
    def is_reached(self) -> bool:
        """True once the stream's work up to the mark is done. Calls no function of CUDA."""
        return self.marks.has_passed(self.number)


class Event:
    """The present end of a stream's work, for which other streams can wait.

    It is made within `device.active()`: in the launcher's thread, that is once for all events.
    """

    def __init__(self, memory: GpuMemory, stream: int) -> None:
        self._memory = memory
        device, spare = memory.device, memory.spare_events
        self.handle = spare.popleft() if spare else device.new_event()
        device.record(self.handle, stream)

    def __del__(self) -> None:
        # Any thread may come here, also one that must not call CUDA. A stream that waits for an
        # event waits for the recording that was the last at that time.
        if hasattr(self, "handle"):
            self._memory.spare_events.append(self.handle)


class Reached:
    """Request that waits for a mark."""

    source = -1

    def __init__(self, mark: Mark) -> None:
        self._mark = mark
        self._launcher = mark.marks.launcher

    def test(self) -> bool:
        if self._mark.is_reached:
            return True
        self._launcher.require_sound()
        return False

    def cancel(self) -> None:
        """Do nothing: a stream cannot be stopped."""


@dataclass(slots=True, eq=False)
class Issue:
    """The point on the caller's stream at which an operation was called."""

    adapter: DeviceAdapter
    memory: GpuMemory
    stream: int  # the current stream of the array library at the call
    ready: list[Event]  # all are reached once the arrays can be read, or be written to

    def on(self, stream: int) -> AbstractContextManager[object]:
        """Return a context in which `stream` is the array library's current stream on the GPU.

        Only for the launcher's thread, which is in the GPU's context: the libraries leave a stream
        by going back to the thread's former GPU, which is else GPU 0.
        """
        return self.adapter.on_stream(self.memory.device.index, stream)

    def empty(self, like: Array, shape: tuple[int, ...]) -> Array:
        """Return an array that belongs to the caller's stream.

        Work enqueued on that stream after the call may still use this memory, so let_wait() also
        waits for that work.
        """
        with self.on(self.stream):
            made = self.adapter.empty(like, shape)
        self.ready.append(Event(self.memory, self.stream))
        return made

    def let_wait(self, stream: int) -> None:
        """Make a stream wait until all arrays are ready; within `device.active()`."""
        device = self.memory.device
        for event in self.ready:
            device.await_event(stream, event.handle)


class Launched(Deferred, Generic[R]):
    """The result of an operation that is enqueued on a stream.

    Args:
        result: the operation's result.
        issue: the operation's Issue.
        done: the event that is reached once the result is complete.
        mark: a mark that is reached then, too.
        require_unbroken: function that raises the error that has broken the engine, if any.
    """

    def __init__(
        self,
        result: R,
        issue: Issue,
        done: Event,
        mark: Mark,
        require_unbroken: Callable[[], None],
    ) -> None:
        self.mark = mark
        self._result = result
        self._issue = issue
        self._done = done
        self._require_unbroken = require_unbroken

    def take(self) -> R:
        """Return the result, and make the caller's stream wait for it.

        Raises:
            PeerFailedError, CommTimeoutError: the operation will never complete.
            RingcommError: the caller's stream captures a CUDA graph.
        """
        self._require_unbroken()
        device = self._issue.memory.device
        with device.active():
            stream = self._issue.adapter.stream(device.index)
            refuse_capture(device, stream)
            device.await_event(stream, self._done.handle)
        return self._result


def refuse_capture(device: Device, stream: int) -> None:
    if device.is_capturing(stream):
        raise RingcommError(
            f"stream {stream:#x} of GPU {device.index} captures a CUDA graph, which cannot contain "
            "operations of ringcomm: the ranks agree on each of them on the CPU. Call ringcomm, "
            "and wait() of its handles, before the capture begins or after its end"
        )
