"""Decides from measured traffic, period by period, which partitions move by themselves.

Pure: nothing here sends, locks or reads a clock.

Three rules keep partitions from moving to and fro. A server must be well above the mean for several
periods in a row. The moves are planned from all these periods, so that traffic that goes to and fro
moves nothing. And a partition that has moved stays for a while.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Final

from ringcomm.ps.placement.view import Move, Partition, View, plan_moves

THRESHOLD: Final = 0.3  # a server that has this share more than the mean is overloaded
SLACK: Final = 0.1  # that a plan leaves; less than the threshold, or the next noise would undo it
PATIENCE: Final = 3  # periods in a row
REST: Final = 20  # periods that a partition stays where it has moved to
LEAST: Final = 100.0  # requests per period and server; of fewer, chance decides


class Balance:
    """Decides which partitions move.

    Args:
        servers: that can own.
        request: what a request weighs, in units of traffic.
    """

    def __init__(self, servers: Sequence[int], request: float) -> None:
        self._servers = servers
        self._least = LEAST * len(servers) * request
        self._before: dict[Partition, float] = {}
        self._window: deque[dict[Partition, float]] = deque(maxlen=PATIENCE)
        self._rests: dict[Partition, int] = {}

    def moves(self, view: View, traffic: Mapping[Partition, float]) -> list[Move]:
        """Return the moves at the end of a period.

        Args:
            view: as it is; a partition that moves is not in it.
            traffic: of each partition of the view since it was made.
        """
        recent = {p: max(0.0, x - self._before.get(p, 0.0)) for p, x in traffic.items()}
        self._before.update(traffic)
        self._rests = {p: n - 1 for p, n in self._rests.items() if n > 1}
        if sum(recent.values()) < self._least or self._overload(view, recent) <= THRESHOLD:
            self._window.clear()
            return []
        self._window.append(recent)
        if len(self._window) < PATIENCE:
            return []
        total = self._total(view)
        moves = plan_moves(view, total, self._servers, SLACK, self._rests.keys())
        after = view.with_({move.partition: (move.dest,) for move in moves})
        if self._overload(view, total) - self._overload(after, total) < SLACK:
            return []
        self._window.clear()
        self._rests.update({move.partition: REST for move in moves})
        return moves

    def _total(self, view: View) -> Counter[Partition]:
        """Return the traffic of the window, without partitions that move by now."""
        total: Counter[Partition] = Counter()
        for each in self._window:
            total.update({p: x for p, x in each.items() if p in view.chains})
        return total

    def _overload(self, view: View, traffic: Mapping[Partition, float]) -> float:
        """Return the share by which the busiest server is above the mean."""
        load = dict.fromkeys(self._servers, 0.0)
        for partition, x in traffic.items():
            load[view.owner(partition)] += x
        mean = sum(load.values()) / len(load)
        return max(load.values()) / mean - 1 if mean else 0.0
