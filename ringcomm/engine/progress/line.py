"""How many unnamed operations of a group are under way at a time. Pure.

All ranks begin them in one order, so the later ones need not be looked at before the earlier ones
are over: a look at each of thousands, at every step, made each of them as slow as they were many.
Named operations may be begun in any order, so all of those are under way.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ringcomm.engine.progress.loop import Task

UNDER_WAY_MAX: Final = 64  # several times the slots of a group in shared memory


@dataclass(slots=True)
class _Line:
    """One group's: how many are under way, the last one of them, and those that are not yet."""

    n_under_way: int = 0
    last: int = 0
    waiting: list[tuple[int, Task]] = field(default_factory=list)


class Lines:
    """The unnamed operations of all groups."""

    def __init__(self) -> None:
        self._lines: dict[int, _Line] = {}

    def may_begin(self, task: Task) -> bool:
        """Return True if a task is under way from now on; else a later leave() returns it."""
        line = self._lines.setdefault(task.base, _Line())
        # One that comes behind a later one, of another thread, may be what other ranks wait for.
        if line.n_under_way < UNDER_WAY_MAX or task.number < line.last:
            line.n_under_way += 1
            line.last = max(line.last, task.number)
            return True
        heapq.heappush(line.waiting, (task.number, task))
        return False

    def leave(self, task: Task) -> Task | None:
        """Take note that one that was under way is over; return the one that is from now on."""
        line = self._lines[task.base]
        line.n_under_way -= 1
        if line.waiting and line.n_under_way < UNDER_WAY_MAX:
            line.n_under_way += 1
            line.last, after = heapq.heappop(line.waiting)
            return after
        if line.n_under_way == 0:
            del self._lines[task.base]
        return None

    def give_up(self) -> list[Task]:
        """Return those that were not under way yet; they are from now on."""
        given_up = []
        for line in self._lines.values():
            line.n_under_way += len(line.waiting)
            given_up += [task for _, task in sorted(line.waiting, key=lambda each: each[0])]
            line.waiting.clear()
        return given_up
