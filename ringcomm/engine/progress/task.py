"""Operations in flight, and those that were over at once."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final

from ringcomm._core import WireFault
from ringcomm.engine.core.ledger import Ticket
from ringcomm.transport.base import WireRequest
from ringcomm.transport.channel import Channel

TaskCoroutine = Coroutine[tuple[WireRequest, ...], None, Any]  # yields requests to wait for


def _nothing() -> None:
    pass


class Task:
    """An operation in flight: coroutines that advance when their requests are done.

    Args:
        label: name in texts, such as "allreduce[layer3.weight]".
        ticket: identity of the operation.
        members: the ranks of the job that take part.
    """

    helps_if_data_are_unequal = "call join() on every rank where its loop ends"

    def __init__(self, label: str, ticket: Ticket, members: tuple[int, ...]) -> None:
        self.label = label
        self.key, self.base, self.number = ticket.key, ticket.base, ticket.number
        self.members = members
        self.channels: list[Channel] = []  # other ranks may use them until the end
        self.result: Any = None  # the result of the first coroutine
        self.error: BaseException | None = None
        self.is_over = False  # result and error are final
        self.waiters: list[int] = []  # a number for each thread that waits for this task now
        self.is_asked = False  # a caller has got the result or the error
        self.is_dropped = False  # nobody can ask for the result any more
        # The wire refused a message. Until fault_until the cause may prove to be a rank's death.
        self.fault: WireFault | None = None
        self.fault_until = math.inf
        self.timeout_s: float | None = None  # None: RINGCOMM_TIMEOUT_S
        # Returns the ranks that are late in work that no channel sees, such as on a GPU.
        self.late_elsewhere: Callable[[], tuple[int, ...]] = tuple
        # Returns a sentence about what has come instead of what it waits for, or "".
        self.what_came_instead: Callable[[], str] = str
        self.needs_admission = False  # see Admission
        self.ends_alone = False  # if a rank dies and the job goes on, only its group ends
        self.asks_who_left = False  # ranks that leave without it do not say so by themselves
        self.ends_alone_if_left = False  # likewise if a rank leaves: no data moves
        # Gives up what began before the coroutines, and may be over.
        self.give_up: Callable[[], None] = _nothing
        self.is_patient = False  # its end may be noticed a millisecond late
        self.is_follow_up = False  # it watches what operations have left behind on a stream
        self._callbacks: deque[Callable[[], None]] = deque()
        self._coroutines: list[tuple[TaskCoroutine, list[WireRequest]]] = []
        self._first: TaskCoroutine | None = None

    def start(self, *coroutines: TaskCoroutine) -> None:
        """Set the coroutines; the result of the first one is the task's."""
        self._coroutines = [(coroutine, []) for coroutine in coroutines]
        self._first = coroutines[0]

    def when_over(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when the task is over; see Handle.when_done()."""
        self._callbacks.append(callback)
        if self.is_over:
            self.call_back()

    def call_back(self) -> None:
        """Call each callback once, even if several threads call this."""
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                callback()
            except BaseException as error:
                error.add_note(f"in a callback of {self.label}, which must not raise")
                raise

    @property
    def awaited(self) -> tuple[int, ...]:
        """Ranks of the job; if all of them leave, the task cannot complete."""
        return tuple(rank for channel in self.channels for rank in channel.awaited)

    @property
    def late(self) -> tuple[int, ...]:
        """Ranks that delay the task, as far as known; if one leaves, it cannot complete."""
        in_memory = tuple(rank for channel in self.channels for rank in channel.late)
        return in_memory + self.late_elsewhere()

    @property
    def waits_in_cpp(self) -> bool:
        pending = [request for _, requests in self._coroutines for request in requests]
        return bool(pending) and all(hasattr(request, "is_in_cpp") for request in pending)

    def advance(self) -> bool:
        """Advance as far as possible without waiting; return True if anything moved."""
        has_moved = False
        for entry in tuple(self._coroutines):
            pending = entry[1]
            n_before = len(pending)
            pending[:] = [request for request in pending if not request.test()]
            has_moved |= len(pending) < n_before
            if not pending:
                has_moved = True
                self._resume(entry)
        return has_moved

    def stop(self) -> None:
        """Close the coroutines; buffers that other ranks may still use are kept alive."""
        for coroutine, _ in self._coroutines:
            coroutine.close()
        self._coroutines.clear()
        for channel in self.channels:
            channel.abandon()
        self.give_up()

    @property
    def has_work(self) -> bool:
        return bool(self._coroutines)

    def _resume(self, entry: tuple[TaskCoroutine, list[WireRequest]]) -> None:
        coroutine, pending = entry
        try:
            while not pending:
                pending[:] = [request for request in coroutine.send(None) if not request.test()]
        except StopIteration as stop:
            self._coroutines.remove(entry)
            if coroutine is self._first:
                self.result = stop.value


class CompletedTask:
    """Replaces the Task of an operation that was over at once."""

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
        return self._label()

    def when_over(self, callback: Callable[[], None]) -> None:
        callback()
