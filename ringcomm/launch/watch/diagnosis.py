"""Says what is slow in a job, from the latest looks at its ranks. Pure.

Each of these compares the ranks among themselves: the parts of their steps, where those are known;
else how long they wait in operations; the work of servers; and the links of hosts (slow_link.py).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median
from typing import Final, TypeVar

from ringcomm.launch.watch.rank_rows import RankSample
from ringcomm.launch.watch.slow_link import Pair, Traffic, slow_link
from ringcomm.status.page_enums import BUSY

# --- who is slow in which part of a step ----------------------------------------------------------
# Ranks wait for each other in the exchange of gradients, so all steps take equally long. But the
# time of a rank before the exchange and after it is its own. What is compared is the time of the
# same step on the ranks, without the time in which a rank was ready to run and had no core: that is
# the load's.
#
# Parts of a step, by the marks between which they lie; the exchange is not the rank's own time.
OWN_PARTS: Final = {
    0: "before backward: in its loader, or in the model's forward",
    1: "in backward",
    3: "in the optimizer, or in what follows",
}
_EXCHANGE: Final = 2
_STEPS: Final = 30  # the latest that are looked at
_LEAST_STEPS: Final = 20
_LEAST_SHARE: Final = 0.1  # of a step by which the slow rank is later than the others
_LEAST_NS: Final = 3_000_000
_SERVER_NS: Final = 10_000_000  # for which even the last worker waits
_SERVER_SHARE: Final = 0.3  # of a step in which a slow server is at work
_MOST: Final = 0.8  # of the steps in which this must be so
_MOST_WAITS: Final = 0.6  # the last worker may ask just before the server looks
_SERVER_RATIO: Final = 1.5  # of the work of a slow server to that of the others

Step = tuple[int, Sequence[int], Sequence[int]]  # as of StatusPage.steps()


@dataclass(frozen=True)
class SlowPart:
    """A rank that is slow in a part of its steps.

    Attributes:
        who: "rank 2", "server 0 (rank 3)" or "the servers".
        part: where, in words.
        extra_s: by how much, in the median of steps.
        step_s: the median duration of its steps; for a server, of those of the workers.
    """

    who: str
    part: str
    extra_s: float
    step_s: float

    def __str__(self) -> str:
        extra, step = self.extra_s * 1e3, self.step_s * 1e3
        return f"{self.who} is slow {self.part}: +{extra:.0f} ms of {step:.0f} ms per step"


def slow_parts(steps: Mapping[int, Sequence[Step]]) -> list[SlowPart]:
    """Return the ranks that are slow, and where; [] if there is none, or too little was seen.

    Args:
        steps: rank -> its latest steps.
    """
    rows = _common(steps)
    if len(rows) < _LEAST_STEPS or len(steps) < 2:
        return []
    step_ns = median(_duration(step) for row in rows for step in row.values())
    least_ns = max(_LEAST_NS, _LEAST_SHARE * step_ns)
    found = []
    for rank in sorted(steps):
        own_ns = median(_duration(row[rank]) for row in rows)
        for part, text in OWN_PARTS.items():
            extra = [_extra(row, rank, part) for row in rows]
            is_so = [each > least_ns / 2 for each in extra]
            if median(extra) > least_ns and mean(is_so) >= _MOST:
                found.append(SlowPart(f"rank {rank}", text, median(extra) / 1e9, own_ns / 1e9))
    return found


def slow_server(
    steps: Mapping[int, Sequence[Step]], at_work: Mapping[int, float], ranks: Mapping[int, int]
) -> SlowPart | None:
    """Return the server for which all workers wait, the last one included; None: there is none.

    A worker that comes last to a round of updates waits for nobody but the servers. They are slow
    by themselves if they are at work for a good part of a step; else they, too, lack cores. How
    long the workers lacked one does not matter: meanwhile the answer may have come.

    Args:
        steps: worker's rank -> its latest steps.
        at_work: number of a server -> share of the last seconds in which it was at work, without
            the time in which it had no core.
        ranks: number of a server -> its rank.
    """
    rows = _common(steps)
    if len(rows) < _LEAST_STEPS or not ranks:
        return None
    step_ns = median(_duration(step) for row in rows for step in row.values())
    lasted_ns = median(step[1][-1] - step[1][0] for row in rows for step in row.values())
    waits = [
        min(marks[_EXCHANGE + 1] - marks[_EXCHANGE] for _, marks, _ in row.values()) for row in rows
    ]
    least_ns = max(_SERVER_NS, _LEAST_SHARE * lasted_ns)
    if mean(waits) < least_ns or mean(wait > least_ns / 2 for wait in waits) < _MOST_WAITS:
        return None
    work_ns = {server: at_work.get(server, 0.0) * lasted_ns for server in ranks}
    slow = [s for s in ranks if work_ns[s] > max(_SERVER_NS, _SERVER_SHARE * step_ns)]
    if not slow:
        return None
    extra_ns = min(median(waits), max(work_ns.values()))
    return SlowPart(_busiest(slow, at_work, ranks), "to answer", extra_ns / 1e9, lasted_ns / 1e9)


def _busiest(slow: Sequence[int], at_work: Mapping[int, float], ranks: Mapping[int, int]) -> str:
    first, *others = sorted(slow, key=lambda server: -at_work[server])
    if others and at_work[first] < _SERVER_RATIO * at_work[others[0]]:
        return "each server"
    return f"server {first} (rank {ranks[first]})"


def _common(steps: Mapping[int, Sequence[Step]]) -> list[dict[int, Step]]:
    """Return the latest steps that all ranks have completed: rank -> its step."""
    by_number = [{step[0]: step for step in each} for each in steps.values()]
    if not by_number:
        return []
    common = sorted(set.intersection(*(set(each) for each in by_number)))[-_STEPS:]
    return [{rank: each[n] for rank, each in zip(steps, by_number, strict=True)} for n in common]


def _own(step: Step, part: int) -> int:
    _, marks, no_core = step
    return marks[part + 1] - marks[part] - no_core[part]


def _extra(row: Mapping[int, Step], rank: int, part: int) -> float:
    others = median(_own(step, part) for other, step in row.items() if other != rank)
    return _own(row[rank], part) - others


def _duration(step: Step) -> int:
    _, marks, no_core = step
    return marks[-1] - marks[0] - sum(no_core)


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


# --- what is slow in each job ---------------------------------------------------------------------
_WINDOW_NS: Final = 5_000_000_000
_TRAINING: Final = ("", "worker", "rank")  # the last one has taken another rank's place
T = TypeVar("T")
HostTraffic = Mapping[Pair, Traffic]


class Verdicts:
    """Looks at jobs from time to time."""

    def __init__(self) -> None:
        self._jobs: defaultdict[str, _LooksAtJob] = defaultdict(_LooksAtJob)

    def look(
        self,
        samples: Sequence[RankSample],
        traffic_of: Callable[[str], HostTraffic | None] = lambda job: None,
    ) -> dict[str, list[str]]:
        """Return what is slow in each job that has live ranks, in words.

        Args:
            samples: of the ranks of jobs; those that are over do not count.
            traffic_of: returns what the hosts of a job have sent until now, if that is known.
        """
        live: defaultdict[str, list[RankSample]] = defaultdict(list)
        for each in samples:
            if not each.is_over:
                live[each.job].append(each)
        return {job: self._jobs[job].look(ranks, traffic_of(job)) for job, ranks in live.items()}


class _LooksAtJob:
    def __init__(self) -> None:
        self._history = History()
        self._work: deque[tuple[int, dict[int, float]]] = deque()  # when, and server -> seconds
        self._traffic: deque[tuple[int, HostTraffic]] = deque()

    def look(self, ranks: Sequence[RankSample], traffic: HostTraffic | None) -> list[str]:
        now = ranks[0].time_ns
        self._history.add(now, {each.rank: each.busy_ns for each in _workers(ranks)})
        busy = {n: dict(_values(each)).get(BUSY, 0.0) for n, each in _servers(ranks).items()}
        _append(self._work, now, busy)
        _append(self._traffic, now, traffic or {})
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
