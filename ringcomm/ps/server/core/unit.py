"""One unit of a server: a partition of a dense table, or its shard of a hash table. Pure.

| state | event | what follows |
|---|---|---|
| without values | a push but the initial one, a read | it waits |
| without values | the initial push | Write; what waited is carried out |
| any | a push that came before | Acknowledge, unless its answer is to come |
| with values | an assignment | Write |
| with values, without rounds | a gradient | Apply |
| with values, with rounds | a gradient, a release, a decision | see the module rounds |
| any | a read for which enough is there | Serve |
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ringcomm.ps.server.core.actions import (
    Acknowledge,
    Action,
    Apply,
    CoreRequest,
    Key,
    Retry,
    RoundContribution,
    Serve,
    Write,
)
from ringcomm.ps.server.core.rounds import Clocks, Release, Rounds
from ringcomm.ps.update_modes import Mode


# --- requests that wait ---------------------------------------------------------------------------
@dataclass(order=True, slots=True)
class _WaitingRead:
    wanted: float
    number: int  # ascends with the time of arrival: of equals the first goes first
    then: Retry | Serve = field(compare=False)


class Waiting:
    """The waiting requests of one unit. due() looks at those that it returns, and at one more."""

    def __init__(self) -> None:
        self._heap: list[_WaitingRead] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, wanted: float, then: Retry | Serve) -> None:
        """Keep what is to be done once due() is called with at least `wanted`."""
        heapq.heappush(self._heap, _WaitingRead(wanted, next(self._numbers), then))

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


class Applied(Protocol):
    """The number (Header.sequence) of each rank's last push that was carried out.

    Of a dense block C++ keeps it, which carries out pushes, too.
    """

    def last_of(self, rank: int) -> int:
        """Return the last push of a rank; 0 if there is none."""
        ...

    def note_last(self, rank: int, sequence: int) -> None:
        """Take note of a push; 0: there is none."""
        ...

    def all_last(self) -> dict[int, int]: ...


class AppliedHere:
    """Applied, kept in a dictionary."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}

    def last_of(self, rank: int) -> int:
        return self._last.get(rank, 0)

    def note_last(self, rank: int, sequence: int) -> None:
        if sequence == 0:
            self._last.pop(rank, None)
        else:
            self._last[rank] = sequence

    def all_last(self) -> dict[int, int]:
        return dict(self._last)


class Unit:
    """Decides what becomes of the requests to one unit.

    Args:
        key: see actions.Key.
        mode: when pushes become updates.
        applied: whose pushes are in it.
        is_ready: it has values.
        workers: those that contribute to rounds.

    Attributes:
        key, mode, applied, is_ready: see above.
        rounds: of a mode that has them.
        waiting: reads, and pushes that came before the values.
        stands_still: it moves, so that pushes may have been kept that are older than clocks say.
        fence: clocks of workers that have not sent again all that came back from a move.
    """

    def __init__(
        self, key: Key, mode: Mode, applied: Applied, workers: Iterable[int], *, is_ready: bool
    ) -> None:
        self.key, self.mode, self.applied, self.is_ready = key, mode, applied, is_ready
        self.rounds: Rounds | None = None
        if mode.has_rounds:
            k = mode.bound if mode.name == "first_of" else None
            self.rounds = Rounds(key, workers, k)
        self.waiting = Waiting()
        self.stands_still = False
        self.fence: dict[int, int] = {}

    # --- pushes ---------------------------------------------------------------------------------
    def came_before(self, request: CoreRequest) -> bool:
        header = request.header
        return header.sequence <= self.applied.last_of(header.origin)

    def answer_again(self, request: CoreRequest) -> list[Action]:
        """Answer a request that came before; one whose answer is to come gets no other."""
        header = request.header
        name = header.origin, header.sequence
        waiting = () if self.rounds is None else self.rounds.requests()
        if any((each.header.origin, each.header.sequence) == name for each in waiting):
            return []
        return [Acknowledge(self.key, request)]

    def begin(self, request: CoreRequest) -> list[Action] | None:
        """Take note of a push that is carried out now; else return what happens instead."""
        if not self.is_ready:  # the chief's values would undo it
            self.waiting.add(0, Retry(request))
            return []
        if self.came_before(request):
            return self.answer_again(request)
        header = request.header
        self.applied.note_last(header.origin, header.sequence)
        return None

    def initialize(self, request: CoreRequest, payload: Any) -> list[Action]:
        first = not self.is_ready  # one that comes again writes nothing. It is not taken note of:
        # what this rank has pushed before it became the chief waits for it, and is yet to come.
        self.is_ready = True
        return [Write(self.key, request, payload if first else None)]

    def assign(self, request: CoreRequest, payload: Any) -> list[Action]:
        """Replace values; that is no part of a round."""
        refused = self.begin(request)
        return [Write(self.key, request, payload)] if refused is None else refused

    def push(
        self, request: CoreRequest, payload: Any, *, is_held: bool = False, lets_in: bool = False
    ) -> list[Action]:
        """Carry out a gradient, or keep it for its round; see Rounds.contribute()."""
        refused = self.begin(request)
        if refused is not None:
            return refused
        if self.rounds is None:
            return [Apply(self.key, request, payload)]
        header = request.header
        contribution = RoundContribution(header.origin, request, payload, is_held)
        return self.rounds.contribute(header.clock, contribution, lets_in=lets_in)

    def release(self, request: CoreRequest, payload: Any, *, drops: bool) -> list[Action]:
        """End the round whose mean is held."""
        refused = self.begin(request)
        if refused is not None:
            return refused
        assert self.rounds is not None
        return self.rounds.release(Release(request.header.clock, request, payload, drops))

    # --- reads ----------------------------------------------------------------------------------
    def progress(self, clocks: Clocks) -> float:
        """Return how far the unit has got, in what reads wait for; see wanted()."""
        if not self.is_ready:
            return -1
        if self.rounds is not None:
            return math.inf if self.rounds.is_over else self.rounds.current
        if self.mode.name != "ssp":
            return math.inf
        # What waited for the values alone goes first, also before what came since it stands still.
        return 0 if self.stands_still else clocks.slowest_with(self.fence)

    def read(self, request: CoreRequest, clocks: Clocks) -> list[Action]:
        """Serve a read once enough is in the values: rounds, or steps of the slowest worker."""
        clock = request.header.clock
        if self.has_enough(clock, clocks):
            return [Serve(request)]
        self.waiting.add(self._wanted(clock), Serve(request))
        return []

    def has_enough(self, clock: int, clocks: Clocks) -> bool:
        return self.progress(clocks) >= self._wanted(clock)

    def _wanted(self, clock: int) -> int:
        return clock if self.rounds is not None or self.mode.name == "ssp" else 0

    def due(self, clocks: Clocks) -> list[Action]:
        if not len(self.waiting):
            return []
        return [*self.waiting.due(self.progress(clocks))]

    def missing(self, rank: int, clocks: Clocks, chief: int) -> tuple[str, set[int]] | None:
        """Return what requests of a rank wait for here, and for whom; None: none waits.

        Args:
            rank: whose requests.
            clocks: of the workers.
            chief: the worker that sends initial values.
        """
        wanted = self.waiting.wanted_by(rank)
        if wanted is not None and not self.is_ready:
            return "the first value", {chief}
        if self.rounds is not None:
            return self.rounds.missing(rank) if wanted is None else self.rounds.missing_now()
        if wanted is None:
            return None
        return f"step {wanted:g}", {*clocks.behind(wanted)}

    # --- moves and checkpoints ------------------------------------------------------------------
    def applied_without_pending(self) -> dict[int, int]:
        """Return the last push of each rank before those that have not been answered."""
        applied = self.applied.all_last()
        for request in () if self.rounds is None else self.rounds.requests():
            rank = request.header.origin
            applied[rank] = min(applied.get(rank, 0), request.header.sequence - 1)
        return applied

    def requests(self) -> list[Any]:
        """Return all requests that wait; those of one rank in the order in which it made them."""
        of_rounds = [] if self.rounds is None else self.rounds.requests()
        of_rounds.sort(key=lambda each: each.header.sequence)
        return of_rounds + self.waiting.requests()

    def give_back(self) -> list[Any]:
        """Return all requests that wait, which are forgotten here and may be sent again."""
        applied, back = self.applied_without_pending(), []
        if self.rounds is not None:
            back = self.rounds.give_back()
            for rank, last in applied.items():
                self.applied.note_last(rank, last)
        return [*back, *self.waiting.take_all()]

    def leave(self, rank: int) -> list[Action]:
        self.waiting.forget(rank)
        return self.rest(rank)

    def die(self, rank: int) -> list[Action]:
        self.waiting.forget(rank, is_dead=True)
        self.fence.pop(rank, None)
        return [] if self.rounds is None else self.rounds.die(rank)

    def join(self, rank: int, rounds: Mapping[int, int]) -> list[Action]:
        """Wait for a worker from a round on, by table."""
        return [] if self.rounds is None else self.rounds.join(rank, rounds.get(self.key[0], 0))

    def rest(self, rank: int) -> list[Action]:
        """Wait for nothing of a worker that completes no more steps."""
        self.fence.pop(rank, None)
        return [] if self.rounds is None else self.rounds.leave(rank)
