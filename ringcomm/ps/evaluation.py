"""Evaluators: ranks that read snapshots while others train, and report to the chief."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from ringcomm.errors import RingcommError
from ringcomm.ps.client import Ask
from ringcomm.ps.frames import Header, Kind, Status
from ringcomm.ps.future import Future
from ringcomm.ps.job import Session, evaluate_by, session
from ringcomm.ps.link import Delivery
from ringcomm.ps.messages import packed_json
from ringcomm.ps.snapshots import HOLD, RELEASE, VERSIONS

_TRIES = 100  # of a snapshot: rounds may be over before all servers have heard of it
_ids = itertools.count(1)
F = TypeVar("F", bound=Callable[..., Any])


class Report(NamedTuple):
    """What an evaluator has found.

    Attributes:
        step: of the training.
        metrics: name -> number.
        rank: of the job: who reports.
    """

    step: int
    metrics: dict[str, float]
    rank: int


def evaluator(every: int) -> Callable[[F], F]:
    """Mark the function that evaluators run: function(step), every so many steps of the slowest.

    Within it ps.table(...) and pull() see a snapshot. It must be marked before ps.init(), which
    calls it on ranks that evaluate.
    """
    if every < 1:
        raise ValueError(f"ps.evaluator: every is {every}; it must be 1 or more")

    def mark(function: F) -> F:
        evaluate_by(function, every, _run)
        return function

    return mark


@contextlib.contextmanager
def snapshot() -> Iterator[int]:
    """Let pulls of this rank see all tables at one moment, until the end of the block.

    Of tables with rounds, exactly between two of them; of others, each block at one instant.

    Yields:
        The number of rounds, of the table with rounds that has had the most; 0 without one.
    """
    current = session()
    if current.snapshot:
        raise RingcommError("ps.snapshot: this rank is in one already")
    number = current.engine.job_rank << 32 | next(_ids)
    rounds = _hold(current, number)
    current.snapshot = number
    try:
        yield max(rounds.values(), default=0)
    finally:
        current.snapshot = 0
        _ask_all(current, {"do": RELEASE, "id": number})


def report(step: int, metrics: dict[str, float]) -> None:
    """Send what was found to the chief, where ps.reports() returns it."""
    current = session()
    chief = current.layout.workers[0]
    said = Report(int(step), {name: float(x) for name, x in metrics.items()}, 0)
    header = Header(Kind.REPORT, origin=current.engine.job_rank)
    current.desk.link.send(chief, header, packed_json([said.step, said.metrics]))
    current.engine.nudge()


def reports() -> list[Report]:
    """Return the reports that have come since the last call; on the chief."""
    desk = session().desk
    came = []
    while desk.reports:
        delivery = desk.reports.popleft()
        step, metrics = json.loads(delivery.meta)
        came.append(Report(step, metrics, delivery.source))
    return came


def wait_for_step(step: int, timeout_s: float | None = None) -> bool:
    """Return True once every worker has completed `step` steps, False if all left before."""
    current = session()
    client, reached = current.client, [True]

    def note(reply: Delivery) -> None:
        reached[0] = reply.header.status == Status.OK

    future = Future(client, f"step {step}", 1, lambda: reached[0], client.timestamp())
    client.ask([Ask(Kind.TICK, server=0, clock=step, option=1, on_reply=note)], future)
    return future.wait(timeout_s)


def _run(current: Session, function: Callable[[int], object], every: int) -> None:
    """Evaluate until the workers have left."""
    for step in itertools.count(every, every):
        if not wait_for_step(step, float("inf")):
            return
        with snapshot():
            function(step)


def _hold(current: Session, number: int) -> dict[str, int]:
    for _ in range(_TRIES):
        rounds: Counter[str] = Counter()
        for told in _ask_all(current, {"do": VERSIONS}):
            for table, version in told.items():
                rounds[table] = max(rounds[table], version)
        replies = _ask_all(current, {"do": HOLD, "id": number, "rounds": rounds})
        if all(told["is_whole"] for told in replies):
            return dict(rounds)
        _ask_all(current, {"do": RELEASE, "id": number})
    raise RingcommError(
        f"ps.snapshot: in {_TRIES} attempts rounds were over before all servers had heard of it"
    )


def _ask_all(current: Session, what: dict[str, Any]) -> list[dict[str, Any]]:
    client = current.client
    told: list[dict[str, Any]] = []
    future = Future(client, "snapshot", client.n_servers, lambda: told, client.timestamp())
    meta = packed_json(what)

    def note(reply: Delivery) -> None:
        told.append(json.loads(reply.meta))

    client.ask(
        [
            Ask(Kind.SNAPSHOT, server=server, meta=meta, on_reply=note)
            for server in range(client.n_servers)
        ],
        future,
    )
    return future.wait()
