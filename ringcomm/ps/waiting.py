"""Requests that a server cannot answer yet, and what lets each of them go."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ringcomm.ps.link import Delivery
    from ringcomm.ps.placement import Partition


class Fail(Protocol):
    """Tells who made a request that it failed."""

    def __call__(self, request: Delivery, error: Exception) -> None:
        """Send the error."""
        ...


@dataclass(order=True, slots=True)
class _Waiting:
    """A request that waits until a partition has got so far; of equals the first goes first.

    Attributes:
        wanted: how far that is.
        number: ascends with the time of arrival.
        answer: carries out the request.
        request: what is answered.
        goes_along: it is for whoever has the partition: it goes where the partition goes.
    """

    wanted: float
    number: int
    answer: Callable[[], None] = field(compare=False)
    request: Delivery = field(compare=False)
    goes_along: bool = field(compare=False, default=True)


class Waiters:
    """Requests that wait, by partition and by how far that must have got.

    A change of one partition looks at the requests that it lets go, and at one more.

    Args:
        progress: returns how far a partition has got, in what its requests wait for: rounds, or the
            clock of the slowest worker; less than 0 before it has values.
        fail: called with a request that waited and then raised an error.
    """

    def __init__(self, progress: Callable[[Partition], float], fail: Fail) -> None:
        self._progress = progress
        self._fail = fail
        self._at: dict[Partition, list[_Waiting]] = {}  # heaps
        self._others: list[tuple[Callable[[], bool], Callable[[], None], Delivery]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return sum(map(len, self._at.values())) + len(self._others)

    def wait(
        self,
        partition: Partition,
        wanted: float,
        answer: Callable[[], None],
        request: Delivery,
        *,
        goes_along: bool = True,
    ) -> None:
        """Call answer() once a partition has got so far: now, or in look_at().

        Args:
            partition: which one; of a hash table its number and 0.
            wanted: how far.
            answer: carries out the request.
            request: what is answered.
            goes_along: see take().
        """
        if self._progress(partition) >= wanted:
            answer()
            return
        waiting = _Waiting(wanted, next(self._numbers), answer, request, goes_along)
        heapq.heappush(self._at.setdefault(partition, []), waiting)

    def when(
        self, ready: Callable[[], bool], answer: Callable[[], None], request: Delivery
    ) -> None:
        """Call answer() once ready(): now, or in look_at_all()."""
        if ready():
            answer()
        else:
            self._others.append((ready, answer, request))

    def look_at(self, partition: Partition) -> None:
        """Answer what a change of one partition lets go."""
        heap = self._at.get(partition)
        if heap is None:
            return
        progress, due = self._progress(partition), []
        while heap and heap[0].wanted <= progress:
            due.append(heapq.heappop(heap))
        if not heap:
            del self._at[partition]
        for each in due:
            self._answer(each.answer, each.request)

    def look_at_all(self) -> None:
        """Answer what can be answered by now, after what concerns more than one partition."""
        for partition in tuple(self._at):
            self.look_at(partition)
        waiting, self._others = self._others, []
        for ready, answer, request in waiting:
            if ready():
                self._answer(answer, request)
            else:
                self._others.append((ready, answer, request))

    def take(self, partition: Partition) -> list[Delivery]:
        """Return the requests that go along with a partition, as they came; forget them."""
        heap = self._at.pop(partition, [])
        if staying := [each for each in heap if not each.goes_along]:
            heapq.heapify(staying)
            self._at[partition] = staying
        gone = sorted((each for each in heap if each.goes_along), key=lambda each: each.number)
        return [each.request for each in gone]

    def _answer(self, answer: Callable[[], None], request: Delivery) -> None:
        try:
            answer()
        except Exception as error:  # noqa: BLE001 - it is for who asked, and others wait behind it
            self._fail(request, error)
