"""Names who is slow, and in which part of a step, from the latest steps of all ranks. Pure.

Ranks wait for each other in the exchange of gradients, so all steps take equally long. But a rank's
time before the exchange and after it is its own. What is compared is the time of the same step on
the ranks, without the time in which a rank was ready to run and had no core: that is the load's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Final

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
        step_s: the median duration of a step.
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
        for part, text in OWN_PARTS.items():
            extra = [_extra(row, rank, part) for row in rows]
            is_so = [each > least_ns / 2 for each in extra]
            if median(extra) > least_ns and mean(is_so) >= _MOST:
                found.append(SlowPart(f"rank {rank}", text, median(extra) / 1e9, step_ns / 1e9))
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
