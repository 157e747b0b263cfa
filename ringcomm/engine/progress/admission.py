"""How many unnamed operations of a group are under way at a time. Pure.

All ranks begin them in one order, so the later ones need not be looked at before the earlier ones
are over: a look at each of thousands, at every step, made each of them as slow as they were many.
Named operations may be begun in any order, so all of those are under way.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar

UNDER_WAY_MAX: Final = 64  # several times the slots of a group in shared memory


class _Numbered(Protocol):
    base: int  # see Ticket
    number: int


T = TypeVar("T", bound=_Numbered)


@dataclass(slots=True)
class _Group(Generic[T]):
    """How many of a group are under way, the last one of them, and those that wait."""

    n_under_way: int = 0
    last: int = 0
    waiting: list[tuple[int, T]] = field(default_factory=list)


class Admission(Generic[T]):
    """The unnamed operations of all groups."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group[T]] = {}

    def may_begin(self, task: T) -> bool:
        """Return True if a task is under way from now on; else a later leave() returns it."""
        group = self._groups.setdefault(task.base, _Group())
        # One that comes behind a later one, of another thread, may be what other ranks wait for.
        if group.n_under_way < UNDER_WAY_MAX or task.number < group.last:
            group.n_under_way += 1
            group.last = max(group.last, task.number)
            return True
        heapq.heappush(group.waiting, (task.number, task))
        return False

    def leave(self, task: T) -> T | None:
        """Take note that one that was under way is over; return the one that is from now on."""
        group = self._groups[task.base]
        group.n_under_way -= 1
        if group.waiting and group.n_under_way < UNDER_WAY_MAX:
            group.n_under_way += 1
            group.last, after = heapq.heappop(group.waiting)
            return after
        if group.n_under_way == 0:
            del self._groups[task.base]
        return None

    def give_up(self) -> list[T]:
        """Return those that were not under way yet; they are from now on."""
        given_up = []
        for group in self._groups.values():
            group.n_under_way += len(group.waiting)
            given_up += [task for _, task in sorted(group.waiting, key=lambda each: each[0])]
            group.waiting.clear()
        return given_up
