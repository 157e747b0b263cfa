"""When an update happens: rounds to which all workers contribute, and clocks that bound staleness.

Decisions only: events in, what is due out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Mode:
    """How pushes become updates; "sync" and "async" in a user's words, or SSP and FirstOf.

    Attributes:
        name: sync, async, ssp or first_of.
        bound: s of SSP, k of FirstOf.
    """

    name: str
    bound: int = 0

    def __str__(self) -> str:
        names = {"ssp": f"SSP({self.bound})", "first_of": f"FirstOf({self.bound})"}
        return names.get(self.name, repr(self.name))

    @property
    def has_rounds(self) -> bool:
        """True if an update is the mean over several workers."""
        return self.name in ("sync", "first_of")


def SSP(staleness: int) -> Mode:
    """Return bounded staleness: no worker is more than `staleness` steps ahead of the slowest."""
    if isinstance(staleness, bool) or not isinstance(staleness, int) or staleness < 0:
        raise ValueError(f"SSP takes a number of steps >= 0, not {staleness!r}")
    return Mode("ssp", staleness)


def FirstOf(k: int) -> Mode:
    """Return rounds that consist of the first k gradients; those that come later are dropped.

    A gradient has come once all of its blocks have been pushed, of the table or of all tables of an
    optimizer; it counts in all of them or in none.
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"FirstOf takes a number of workers >= 1, not {k!r}")
    return Mode("first_of", k)


def mode_of(mode: str | Mode) -> Mode:
    """Return what a user means by `mode`. Raises ValueError."""
    if isinstance(mode, Mode):
        return mode
    if mode not in ("sync", "async"):
        raise ValueError(
            f"mode is {mode!r}; it must be 'sync', 'async', ps.SSP(s) or ps.FirstOf(k)"
        )
    return Mode(mode)


class Entries:
    """Who is in which round, where the first k that ask for it are.

    It is asked once for all blocks, on whatever servers, that a gradient has a part in.

    Args:
        workers: who may ask, while they live.
        first_of: as many are in a round; fewer if fewer live.

    Attributes:
        current: rounds of which it is known who is in them.
    """

    def __init__(self, workers: Iterable[int], first_of: int) -> None:
        self._live = set(workers)
        self._first_of = first_of
        self._in: defaultdict[int, set[int]] = defaultdict(set)
        self._last: dict[int, int] = {}  # of each worker: the round that it was let in last
        self.current = 0

    def ask(self, worker: int, number: int) -> bool:
        """Let a worker be in a round; return False if it comes too late.

        Who asks again, for the answer was lost, hears the same again.
        """
        if number < self.current:
            return self._last.get(worker) == number
        if len(self._in[number]) >= self._first_of and worker not in self._in[number]:
            return False
        self._in[number].add(worker)
        self._last[worker] = number
        self._advance()
        return True

    def leave(self, worker: int) -> None:
        """Wait no more for a worker."""
        self._live.discard(worker)
        self._advance()

    def _advance(self) -> None:
        while entered := self._in.get(self.current):
            if len(entered) < self._first_of and not self._live <= entered:
                return
            del self._in[self.current]
            self.current += 1


class Rounds(Generic[T]):
    """Contributions to one partition, round by round.

    Args:
        workers: who contributes, while they live.
        first_of: so many are in a round, those that enter(); None: all who contribute.
    """

    def __init__(self, workers: Iterable[int], first_of: int | None = None) -> None:
        self._live = set(workers)
        self._first_of = first_of
        self._came: defaultdict[int, dict[int, T]] = defaultdict(dict)
        self._entered: defaultdict[int, set[int]] = defaultdict(set)
        self._limits: dict[int, int] = {}
        self.current = 0

    def add(self, worker: int, number: int, contribution: T) -> bool:
        """Take note of a contribution to round `number`; return False if that is over."""
        if number < self.current:
            return False
        self._came[number][worker] = contribution
        return True

    def enter(self, worker: int, number: int) -> None:
        """Let a worker be in a round; see Entries."""
        if number >= self.current:
            self._entered[number].add(worker)

    def drop(self, worker: int, number: int) -> T | None:
        """Return the contribution of a worker that is not in a round, and forget it."""
        came = self._came.get(number, {})
        dropped = came.pop(worker, None)
        if not came:
            self._came.pop(number, None)
        return dropped

    def entered(self) -> list[tuple[int, int]]:
        """Return who is in rounds that are not over: round, worker."""
        return [(n, worker) for n, workers in sorted(self._entered.items()) for worker in workers]

    def leave(self, worker: int) -> None:
        """Wait no more for a worker; what it has contributed counts."""
        self._live.discard(worker)

    def have_left(self, workers: Iterable[int]) -> bool:
        """Return True if all of these have left, while others are there."""
        return bool(self._live) and self._live.isdisjoint(workers)

    @property
    def missing(self) -> list[int]:
        """The workers that the round waits for."""
        return sorted(self._live - self._came[self.current].keys())

    def limit(self, who: int, count: int) -> None:
        """Let no round end that would be more than the first `count`, until unlimit(who)."""
        self._limits[who] = count

    def unlimit(self, *who: int) -> None:
        """Let rounds end again, as far as these are concerned."""
        for each in who:
            self._limits.pop(each, None)

    def unlimit_all(self) -> None:
        """Let rounds end again, whoever stopped them."""
        self._limits.clear()

    def may_end(self, count: int) -> bool:
        """Return True if so many rounds may have ended."""
        return not self._limits or count <= min(self._limits.values())

    def take(self) -> list[tuple[int, T]] | None:
        """Return what the current round consists of, by worker, and begin the next; None: not yet.

        Worker order makes the sum the same whatever the order of arrival. Contributions of those
        who are not in the round stay for drop().
        """
        if not self.may_end(self.current + 1) or (came := self.complete()) is None:
            return None
        for worker, _ in came:
            del self._came[self.current][worker]
        if not self._came[self.current]:
            del self._came[self.current]
        self._entered.pop(self.current, None)
        self.current += 1
        return came

    def complete(self) -> list[tuple[int, T]] | None:
        """Return what the current round consists of, if that is all of it; it goes on."""
        came = self._came.get(self.current, {})
        counting = set(came)
        if self._first_of is not None:
            counting &= self._entered.get(self.current, set())
        has_k = self._first_of is not None and len(counting) >= self._first_of
        if not counting or not (has_k or self._live <= counting):
            return None
        return sorted((worker, each) for worker, each in came.items() if worker in counting)

    def pending(self) -> list[tuple[int, int, T]]:
        """Return what has not been taken, or dropped: round, worker, contribution."""
        return [
            (number, worker, each)
            for number, came in sorted(self._came.items())
            for worker, each in sorted(came.items())
        ]

    def resume(
        self,
        current: int,
        pending: Iterable[tuple[int, int, T]],
        entered: Iterable[Sequence[int]] = (),
    ) -> None:
        """Go on where other rounds were; see pending() and entered()."""
        self.current = current
        self._came.clear()
        for number, worker, each in pending:
            self._came[number][worker] = each
        self._entered.clear()
        for number, worker in entered:
            self._entered[number].add(worker)


class Clocks:
    """How many steps each worker has completed, as one server knows it.

    Args:
        workers: those that count.
    """

    def __init__(self, workers: Iterable[int]) -> None:
        self._of = dict.fromkeys(workers, 0)

    def tick(self, worker: int, clock: int) -> None:
        """A worker has completed so many steps; all that it pushed in them has been applied."""
        if worker in self._of:
            self._of[worker] = max(self._of[worker], clock)

    def leave(self, worker: int) -> None:
        """A worker that has finished, or is dead, holds nobody up."""
        self._of.pop(worker, None)

    @property
    def slowest(self) -> float:
        """The least clock of those that count; infinite if nobody does."""
        return min(self._of.values(), default=math.inf)

    def as_they_are(self) -> dict[int, int]:
        """Return the clocks of those that count."""
        return dict(self._of)

    def slowest_with(self, floor: Mapping[int, int]) -> float:
        """Return the least clock if some count for no more than `floor` says of them."""
        if not floor:
            return self.slowest
        clocks = (min(clock, floor.get(worker, clock)) for worker, clock in self._of.items())
        return min(clocks, default=math.inf)

    def behind(self, clock: float) -> list[int]:
        """Return the workers whose clock is less."""
        return sorted(worker for worker, value in self._of.items() if value < clock)
