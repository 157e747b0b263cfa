"""Watches what is under way on a stream: one task for all of it, not one for each operation.

A task costs its rank more than a launch does. So this one goes on as long as there is something on
the stream: from one operation to the next, whose label and number it has meanwhile.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringcomm.engine.core.ledger import Ticket
from ringcomm.gpu.executor.streams import Mark, Reached
from ringcomm.transport.channel import Wait

if TYPE_CHECKING:
    from ringcomm.engine.core.context import EngineContext


@dataclass(slots=True, eq=False)
class _StreamOperation:
    label: str
    number: int
    mark: Mark  # reached once the operation is done
    keeps: object  # lives until then


class _Never:
    """Request that is never over: its task ends by the error of which another rank knows."""

    source = -1

    def test(self) -> bool:
        return False

    def cancel(self) -> None: ...


class WatchedStream:
    """The operations of a team that are under way on a stream.

    If a rank dies or the time is over, the waits of the stream are ended. The deadline of an
    operation begins when it is the earliest one.

    Args:
        engine: the engine.
        members: ranks of the job; the death of one ends what is under way.
        base: of the operations' tickets.
        late: function that returns the ranks of the job for which the stream waits.
        end_waits: function of (is_over, keeps) that ends the stream's waits until is_over(), and
            keeps an object until then.
        is_released: function that returns True once any rank has ended waits of streams: what is
            not known to be done by then has failed, and is watched until the error is known here.

    Attributes:
        n_added: the number of operations that have been put on the stream.
    """

    def __init__(
        self,
        engine: EngineContext,
        members: tuple[int, ...],
        base: int,
        late: Callable[[], tuple[int, ...]],
        end_waits: Callable[[Callable[[], bool], object], None],
        *,
        is_released: Callable[[], bool] = lambda: False,
    ) -> None:
        self._engine = engine
        self._members, self._base = members, base
        self._late, self._end_waits, self._is_released = late, end_waits, is_released
        self._lock = threading.Lock()
        self._under_way: deque[_StreamOperation] = deque()
        self._watching: object = None  # identifies the task that watches; None: there is none
        self.n_added = 0

    def add(self, label: str, mark: Mark, keeps: object) -> None:
        """Watch an operation that is on the stream, behind all others, unless it is done."""
        watching = object()
        with self._lock:
            self.n_added += 1
            if self._is_done(mark):  # a task, and the thread it wakes, cost more than a launch
                return
            self._under_way.append(_StreamOperation(label, self.n_added, mark, keeps))
            if self._watching is not None:
                return
            self._watching = watching
        ticket = Ticket(None, self._base, self.n_added)
        self._engine.extensions.follow_up(
            label,
            self._members,
            self._watch(ticket.key),
            ticket,
            late=self._late,
            give_up=lambda: self._give_up(watching),
        )

    def earliest(self, n_least: int = 1) -> Mark | None:
        """Return the mark of the earliest operation; None if fewer than n_least are under way."""
        if len(self._under_way) < n_least:
            return None
        done = []
        with self._lock:
            while self._under_way and self._is_done(self._under_way[0].mark):
                done.append(self._under_way.popleft())
            found = self._under_way[0].mark if len(self._under_way) >= n_least else None
        del done  # without the lock: arrays that are dropped may call anything
        return found

    def _is_done(self, mark: Mark) -> bool:
        # In this order: a stream may reach the mark because its waits have been ended.
        return mark.is_reached and not self._is_released()

    async def _watch(self, key: int) -> None:
        pending, peers = self._engine.pending, self._engine.watch.peers
        while True:
            self.earliest()
            with self._lock:
                if not self._under_way:
                    self._watching = None
                    return
                first = self._under_way[0]
            peers.forget(key)  # what others have told of the operation before
            pending.go_on(key, first.label, first.number)
            mark = first.mark
            del first  # and what it keeps
            await Wait((Reached(mark),))
            if self._is_released():
                await Wait((_Never(),))

    def _give_up(self, watching: object) -> None:
        """End the waits if a task ends while it watches; it may never have begun."""
        with self._lock:
            if self._watching is not watching:
                return
            self._watching = None
            left = tuple(self._under_way)
            self._under_way.clear()
        if left:
            last = left[-1].mark
            self._end_waits(lambda: last.is_reached, left)
