"""Names the rank for which the others wait, by the time that each spends in operations. Pure.

A collective makes all ranks equally fast, so the duration of steps says nothing. But ranks that
come early to an operation wait in it, and the one that comes last does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

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
