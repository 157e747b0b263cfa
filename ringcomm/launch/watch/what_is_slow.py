"""Says what is slow in a job: the part of a step where that is known, else the rank. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final, TypeVar

from ringcomm.launch.watch.rank_rows import RankSample
from ringcomm.launch.watch.slow_link import Pair, Traffic, slow_link
from ringcomm.launch.watch.slow_part import slow_parts, slow_server
from ringcomm.status.page_enums import BUSY

# --- the rank that comes last ---------------------------------------------------------------------
# A collective makes all ranks equally fast, so the duration of steps says nothing. But ranks that
# come early to an operation wait in it, and the one that comes last does not.
_LEAST_GAP: Final = 0.2  # share of the time by which the late rank waits less than any other
_LEAST_WAIT: Final = 0.25  # share of the time that the others wait
_INTERVALS: Final = 3
_INTERVAL_NS: Final = 700_000_000


_Look = tuple[int, dict[int, int]]  # when, and rank -> time in operations


@dataclass(frozen=True)
class LateRank:
    """A rank that comes last to most operations."""

    rank: int
    own_wait: float  # shares of the time
    others_wait: float

    def __str__(self) -> str:
        return (
            f"the others wait for rank {self.rank}: {self.others_wait:.0%} of the time, and it "
            f"{self.own_wait:.0%}"
        )


def late_rank(waits: Mapping[int, float]) -> LateRank | None:
    """Return the rank for which all others wait, or None if there is no such single one.

    Args:
        waits: rank -> share of the last seconds in which an operation was under way there.
    """
    if len(waits) < 2:
        return None
    first, second, *_ = sorted(waits, key=waits.__getitem__)
    others = median(wait for rank, wait in waits.items() if rank != first)
    if others < _LEAST_WAIT or waits[second] - waits[first] < _LEAST_GAP:
        return None
    return LateRank(first, waits[first], others)


class History:
    """Looks at the ranks of one job, from which it names the late rank.

    A rank is named if it is late in each of the last intervals, for a moment proves nothing.
    """

    def __init__(self) -> None:
        self._looks: deque[_Look] = deque(maxlen=_INTERVALS + 1)

    def add(self, time_ns: int, busy_ns: Mapping[int, int]) -> None:
        """Add a look, unless the last one was a moment ago.

        Args:
            time_ns: when it was.
            busy_ns: live rank -> time that it has spent in operations until then.
        """
        if not self._looks or time_ns - self._looks[-1][0] >= _INTERVAL_NS:
            self._looks.append((time_ns, dict(busy_ns)))

    def late_rank(self) -> LateRank | None:
        """Return the late rank, or None if there is none, or if too little was seen."""
        pairs = list(pairwise(self._looks))
        if len(pairs) < _INTERVALS:
            return None
        named = [late_rank(_waits(before, after)) for before, after in pairs]
        last = named[-1]
        is_sure = last is not None and all(each and each.rank == last.rank for each in named)
        return last if is_sure else None


def _waits(before: _Look, after: _Look) -> dict[int, float]:
    (t0, busy0), (t1, busy1) = before, after
    return {rank: (busy - busy0[rank]) / (t1 - t0) for rank, busy in busy1.items() if rank in busy0}


_WINDOW_NS: Final = 5_000_000_000
_TRAINING: Final = ("", "worker", "rank")  # the last one has taken another rank's place
T = TypeVar("T")


class Verdicts:
    """Looks at the live ranks of one job from time to time."""

    def __init__(self) -> None:
        self._history = History()
        self._work: deque[tuple[int, dict[int, float]]] = deque()  # when, and server -> seconds
        self._traffic: deque[tuple[int, Mapping[Pair, Traffic]]] = deque()

    def add(
        self, ranks: Sequence[RankSample], traffic: Mapping[Pair, Traffic] | None = None
    ) -> None:
        """Take a look at the live ranks of the job.

        Args:
            ranks: those that live.
            traffic: (from host, to host) -> what was sent until now, if that is known.
        """
        if not ranks:
            return
        now = ranks[0].time_ns
        self._history.add(now, {each.rank: each.busy_ns for each in _workers(ranks)})
        busy = {n: dict(_values(each)).get(BUSY, 0.0) for n, each in _servers(ranks).items()}
        _append(self._work, now, busy)
        _append(self._traffic, now, traffic or {})

    def texts(self, ranks: Sequence[RankSample]) -> list[str]:
        link = slow_link(self._sent())
        return [*self._slow_ranks(ranks), *([str(link)] if link else [])]

    def _slow_ranks(self, ranks: Sequence[RankSample]) -> list[str]:
        workers = _workers(ranks)
        steps = {each.rank: each.steps for each in workers}
        if workers and all(steps.values()):
            servers = {n: each.rank for n, each in _servers(ranks).items()}
            slow = slow_server(steps, self._at_work(), servers)
            return [str(each) for each in [*slow_parts(steps), *([slow] if slow else [])]]
        late = self._history.late_rank()
        return [] if late is None else [str(late)]

    def _sent(self) -> dict[Pair, Traffic]:
        if not self._traffic:
            return {}
        before, after = self._traffic[0][1], self._traffic[-1][1]
        return {pair: each.since(before[pair]) for pair, each in after.items() if pair in before}

    def _at_work(self) -> dict[int, float]:
        """Return server -> share of the last seconds in which it was at work."""
        (began, before), (now, after) = self._work[0], self._work[-1]
        lasted_s = (now - began) / 1e9
        if not lasted_s:
            return {}
        return {n: (busy - before[n]) / lasted_s for n, busy in after.items() if n in before}


def _append(looks: deque[tuple[int, T]], now: int, what: T) -> None:
    looks.append((now, what))
    while now - looks[0][0] > _WINDOW_NS:
        looks.popleft()


def _servers(ranks: Sequence[RankSample]) -> dict[int, RankSample]:
    return {
        int(number): each
        for each in ranks
        for name, _, number in [each.page["role"].partition(" ")]
        if name == "server"
    }


def _values(rank: RankSample) -> list[tuple[str, float]]:
    return [(name, value) for name, _, value in rank.scalars]


def _workers(ranks: Sequence[RankSample]) -> list[RankSample]:
    return [each for each in ranks if each.page["role"].partition(" ")[0] in _TRAINING]
