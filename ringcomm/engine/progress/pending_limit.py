"""The limit of unnamed operations of a group that are under way at a time. Pure.

All ranks begin unnamed operations in one order, so the later ones can wait until the earlier ones
are over. Without the limit each step of the loop would poll thousands of tasks. Named operations
may begin in any order, so they are not limited.
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
class _Line(Generic[T]):
    n_under_way: int = 0
    last: int = 0  # number of the last operation that began
    waiting: list[tuple[int, T]] = field(default_factory=list)


class Admission(Generic[T]):
    """The unnamed operations of all groups."""

    def __init__(self) -> None:
        self._groups: dict[int, _Line[T]] = {}

    def may_begin(self, task: T) -> bool:
        """Return True if a task may begin now; else a later leave() returns it."""
        group = self._groups.setdefault(task.base, _Line())
        # Other ranks may wait for a task that another thread's later task has overtaken.
        if group.n_under_way < UNDER_WAY_MAX or task.number < group.last:
            group.n_under_way += 1
            group.last = max(group.last, task.number)
            return True
        heapq.heappush(group.waiting, (task.number, task))
        return False

    def leave(self, task: T) -> T | None:
        """Note that a task is over; return the one that begins in its place, or None."""
        group = self._groups[task.base]
        group.n_under_way -= 1
        if group.waiting and group.n_under_way < UNDER_WAY_MAX:
            group.n_under_way += 1
            group.last, successor = heapq.heappop(group.waiting)
            return successor
        if group.n_under_way == 0:
            del self._groups[task.base]
        return None

    def admit_all(self) -> list[T]:
        begun = []
        for group in self._groups.values():
            group.n_under_way += len(group.waiting)
            begun += [task for _, task in sorted(group.waiting, key=lambda each: each[0])]
            group.waiting.clear()
        return begun
