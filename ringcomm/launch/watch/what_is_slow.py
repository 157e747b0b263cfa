"""Says what is slow in a job: the part of a step where that is known, else the rank. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

from ringcomm.launch.watch.late_rank import History
from ringcomm.launch.watch.rank_rows import RankSample
from ringcomm.launch.watch.slow_link import Pair, Traffic, slow_link
from ringcomm.launch.watch.slow_part import slow_parts, slow_server
from ringcomm.status.page_enums import BUSY

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
