"""An operation in flight: coroutines that advance as what they wait for arrives."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final

from ringcomm.engine.core.ledger import Ticket
from ringcomm.engine.progress.deadlines import Patience
from ringcomm.transport.base import Request, WireFault
from ringcomm.transport.channel import Channel

TaskCoroutine = Coroutine[tuple[Request, ...], None, Any]  # yields what it waits for


class Task:
    """An operation in flight: coroutines that advance as what they wait for arrives.

    Args:
        label: "allreduce[layer3.weight]".
        ticket: which operation it is.
        members: the ranks of the job that take part.
    """

    def __init__(self, label: str, ticket: Ticket, members: tuple[int, ...]) -> None:
        self.label = label
        self.key, self.base, self.number = ticket.key, ticket.base, ticket.number
        self.members = members
        self.channels: list[Channel] = []  # other ranks may be sending on them until it is over
        self.result: Any = None  # of its first coroutine
        self.error: BaseException | None = None
        self.is_over = False  # result and error are final
        self.is_asked = False  # somebody has waited to its end, so that its error has been raised
        self.is_dropped = False  # nobody can wait for it any more
        # The wire refused a message of it: a death that is not known yet, or a defect from then on.
        self.fault: WireFault | None = None
        self.fault_until = math.inf
        self.patience: Patience | None = None  # of the wait at hand, once it has lasted a moment
        self.timeout_s: float | None = None  # its own deadline, None for RINGCOMM_TIMEOUT_S
        # Returns ranks of the job that hold it up where no channel sees it.
        self.late_elsewhere: Callable[[], tuple[int, ...]] = tuple
        self.needs_admission = False  # need not begin before those of its base with smaller numbers
        self._callbacks: deque[Callable[[], None]] = deque()
        self._coroutines: list[tuple[TaskCoroutine, list[Request]]] = []
        self._first: TaskCoroutine | None = None

    def start(self, *coroutines: TaskCoroutine) -> None:
        """Give it what it is to do; the first one's result is the task's."""
        self._coroutines = [(coroutine, []) for coroutine in coroutines]
        self._first = coroutines[0]

    def when_over(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, at the end: at once if it is over; see Handle.when_done()."""
        self._callbacks.append(callback)
        if self.is_over:
            self.call_back()

    def call_back(self) -> None:
        """Tell those who want to know that it is over; whoever takes a callback calls it."""
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:  # another thread was faster
                return
            callback()

    @property
    def awaited(self) -> tuple[int, ...]:
        """Ranks of the job; if all of them leave, it cannot complete."""
        return tuple(rank for channel in self.channels for rank in channel.awaited)

    @property
    def late(self) -> tuple[int, ...]:
        """Ranks of the job that have not come to where it waits for them, where that is known."""
        in_memory = tuple(rank for channel in self.channels for rank in channel.late)
        return in_memory + self.late_elsewhere()

    @property
    def waits_in_cpp(self) -> bool:
        """True if it has begun, and can go on only when C++ is done with something."""
        pending = [request for _, requests in self._coroutines for request in requests]
        return bool(pending) and all(hasattr(request, "is_in_cpp") for request in pending)

    def advance(self) -> bool:
        """Go on as far as possible without waiting; return True if anything moved."""
        has_moved = False
        for entry in tuple(self._coroutines):
            pending = entry[1]
            n_before = len(pending)
            pending[:] = [request for request in pending if not request.test()]
            has_moved |= len(pending) < n_before
            if not pending:
                has_moved = True
                self._resume(entry)
        if has_moved:
            self.patience = None
        return has_moved

    def stop(self) -> None:
        """Do nothing more; buffers that peers may still touch are kept alive."""
        for coroutine, _ in self._coroutines:
            coroutine.close()
        self._coroutines.clear()
        for channel in self.channels:
            channel.abandon()

    @property
    def has_work(self) -> bool:
        """False once all of its coroutines have returned."""
        return bool(self._coroutines)

    def _resume(self, entry: tuple[TaskCoroutine, list[Request]]) -> None:
        coroutine, pending = entry
        try:
            while not pending:
                pending[:] = [request for request in coroutine.send(None) if not request.test()]
        except StopIteration as stop:
            self._coroutines.remove(entry)
            if coroutine is self._first:
                self.result = stop.value


class CompletedTask:
    """Stands for the task of an operation that was over before one was made."""

    __slots__ = ("_label", "is_asked", "is_dropped", "number", "result")
    is_over: Final = True
    error: Final = None

    def __init__(self, result: Any, number: int, label: Callable[[], str]) -> None:
        self.result = result
        self.number = number
        self.is_asked = self.is_dropped = False
        self._label = label

    @property
    def label(self) -> str:
        """See Task."""
        return self._label()

    def when_over(self, callback: Callable[[], None]) -> None:
        """Call it: this is over."""
        callback()
