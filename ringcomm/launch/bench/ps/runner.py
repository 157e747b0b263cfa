"""The measurement: check, let everybody take turns, check again.

A turn is one call that is not recorded, a barrier, and then calls back to back. The first takes
what came before it: caches as the one before left them, threads that sleep.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ringcomm.engine.api.collectives import allgather_object, barrier
from ringcomm.launch.bench.ps.cases import OPS, PULL, PUSH, Case
from ringcomm.launch.bench.ps.report import Row, summarize
from ringcomm.launch.bench.ps.work import Turn
from ringcomm.launch.bench.runner import quiet
from ringcomm.ps.job import is_chief

_TURN_S = 0.02  # at least, so that the CPUs' clocks can judge it
_FEWEST_CALLS, _MOST_CALLS = 5, 500
_PILOT_CALLS = 3


class Contestant(Protocol):
    """A client and its server. All is called within awake(), but for close().

    All methods but n_pushes() and server_cpu_s() are collective.

    Attributes:
        name: of its lines in the table.
    """

    name: str

    def awake(self) -> contextlib.AbstractContextManager[None]:
        """Let its processes run in a block; outside of it they take no CPU time."""

    def prepare(self, case: Case) -> None:
        """Make a table of zeros."""

    def run(self, op: str, n: int) -> Turn:
        """Do an operation n times, each when the one before is over."""

    def n_pushes(self) -> list[int]:
        """Return how often this client has pushed to each set of keys."""

    def count_wrong(self, n_pushes: list[int]) -> int:
        """Return how many elements are not what so many pushes add up to."""

    def server_cpu_s(self) -> float:
        """Return the CPU time of the server so far; on the chief."""

    def close(self) -> None:
        """End what was started."""


@dataclass
class _Lane:
    """A contestant's pushes, or its pulls."""

    who: Contestant
    op: str
    calls: int = _PILOT_CALLS
    turns: list[Turn] = field(default_factory=list)
    server_s: list[float] = field(default_factory=list)


def measure(
    case: Case, contestants: Sequence[Contestant], memcpy: Contestant | None, rounds: int
) -> list[Row]:
    """Return the rows of one case, the same on every worker. Collective over the workers.

    Args:
        case: what is pushed and pulled.
        contestants: who does it.
        memcpy: the yardstick of pulls, if there is to be one.
        rounds: in which everybody has a turn.
    """
    for who in contestants:
        with _awake(who):
            who.prepare(case)
            who.run(PUSH, case.n_sets)  # makes the rows
            who.run(PULL, case.n_sets)
    wrong = {who.name: _count_wrong(who) for who in contestants}
    lanes = [_Lane(who, op) for op in OPS for who in contestants]
    if memcpy is not None:
        with _awake(memcpy):
            memcpy.prepare(case)
        lanes.append(_Lane(memcpy, PULL))
        wrong[memcpy.name] = 0
    _time(lanes, rounds)
    for who in contestants:
        wrong[who.name] += _count_wrong(who)
    return [_row(case, lane, wrong[lane.who.name]) for lane in lanes]


@contextlib.contextmanager
def _awake(who: Contestant) -> Iterator[None]:
    """Let a contestant's processes run until all workers are done with them."""
    with who.awake():
        barrier()  # the server is the chief's
        yield
        barrier()


def _count_wrong(who: Contestant) -> int:
    """Return the wrong elements that all workers see, the same number on each of them."""
    with _awake(who):
        of_all: list[list[int]] = allgather_object(who.n_pushes())  # all are in the table by now
        mine = who.count_wrong([sum(each) for each in zip(*of_all, strict=True)])
        wrong: list[int] = allgather_object(mine)  # nobody pushes before all have looked
    return sum(wrong)


def _time(lanes: Sequence[_Lane], rounds: int) -> None:
    with quiet():
        for lane in lanes:
            _take_turn(lane)
            _take_turn(lane)
            call_s = max(allgather_object(sum(lane.turns[-1].times_s) / _PILOT_CALLS))
            lane.calls = min(max(math.ceil(_TURN_S / call_s), _FEWEST_CALLS), _MOST_CALLS)
            lane.turns.clear()
            lane.server_s.clear()
        for number in range(rounds):
            # Back and forth: else one would always follow the same other one.
            for lane in lanes if number % 2 == 0 else reversed(lanes):
                _take_turn(lane)


def _take_turn(lane: _Lane) -> None:
    who = lane.who
    with _awake(who):
        who.run(lane.op, 1)
        barrier()
        before = who.server_cpu_s() if is_chief() else 0.0
        barrier()
        lane.turns.append(who.run(lane.op, lane.calls))
        barrier()
        after = who.server_cpu_s() if is_chief() else 0.0
        lane.server_s.append(after - before)


def _row(case: Case, lane: _Lane, wrong: int) -> Row:
    mine = ([turn.times_s for turn in lane.turns], [turn.cpu_s for turn in lane.turns])
    everyone = allgather_object((*mine, lane.server_s))
    times, clients, server = zip(*everyone, strict=True)
    return Row(
        op=lane.op,
        case=case.name,
        engine=lane.who.name,
        wrong=wrong,
        **summarize(times, clients, server[0]),
    )
