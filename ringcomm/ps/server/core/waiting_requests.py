"""Requests that wait until a unit has made enough updates. Pure."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field
from typing import Any

from ringcomm.ps.server.core.actions import Retry, Serve


@dataclass(order=True, slots=True)
class _Waiting:
    wanted: float
    number: int  # ascends with the time of arrival: of equals the first goes first
    then: Retry | Serve = field(compare=False)


class Waiting:
    """The waiting requests of one unit. due() looks at those that it returns, and at one more."""

    def __init__(self) -> None:
        self._heap: list[_Waiting] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, wanted: float, then: Retry | Serve) -> None:
        """Keep what is to be done once due() is called with at least `wanted`."""
        heapq.heappush(self._heap, _Waiting(wanted, next(self._numbers), then))

    def due(self, progress: float) -> list[Retry | Serve]:
        due = []
        while self._heap and self._heap[0].wanted <= progress:
            due.append(heapq.heappop(self._heap).then)
        return due

    def wanted_by(self, rank: int) -> float | None:
        return min((w.wanted for w in self._heap if w.then.request.source == rank), default=None)

    def requests(self) -> list[Any]:
        return [w.then.request for w in sorted(self._heap, key=lambda each: each.number)]

    def take_all(self) -> list[Any]:
        taken = self.requests()
        self._heap.clear()
        return taken

    def forget(self, rank: int, *, is_dead: bool = False) -> None:
        """Drop the reads of a rank that has left; what it has pushed counts, unless it died."""
        self._heap = [
            each
            for each in self._heap
            if each.then.request.source != rank or (isinstance(each.then, Retry) and not is_dead)
        ]
        heapq.heapify(self._heap)
