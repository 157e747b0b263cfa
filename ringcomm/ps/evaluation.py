"""Evaluators: ranks that read snapshots while others train, and report to the chief."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from ringcomm.errors import CommTimeoutError, RingcommError
from ringcomm.ps.client import Ask
from ringcomm.ps.frames import Header, Kind, Status
from ringcomm.ps.future import Future, require_timeout
from ringcomm.ps.job import Session, evaluate_by, session
from ringcomm.ps.link import Delivery
from ringcomm.ps.messages import packed_json
from ringcomm.ps.moments import hold, new_id, release

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

    `step` is what the slowest worker has completed when the snapshot is asked for: a multiple of
    `every`, or more if the evaluation before took longer; none is made up for. What is seen may be
    some steps further. Within it ps.table(...) and pull() see a snapshot. It must be marked before
    ps.init(), which calls it on ranks that evaluate. What it raises ends the whole job, training
    too, as the failure of any rank does.
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

    Of tables with rounds, exactly between two of them; of others, each block at one instant. No
    partition moves to another server meanwhile. Dense tables are copied; of a hash table, servers
    keep the rows that change meanwhile as they were, so that it takes no time however large it is,
    and a push takes longer by the rows that it is the first to change. Metadata and numbers of rows
    are those of now.

    Yields:
        The number of rounds, of the table with rounds that has had the most; 0 without one.
    """
    current = session()
    if current.snapshot:
        raise RingcommError("ps.snapshot: this rank is in one already")
    number = new_id(current)
    try:
        rounds = hold(current, number).rounds
        current.snapshot = number
        yield max(rounds.values(), default=0)
    finally:
        current.snapshot = 0
        release(current, number)


def report(step: int, metrics: dict[str, float]) -> None:
    """Send what was found to the chief, where ps.reports() returns it."""
    if not isinstance(metrics, Mapping):
        raise TypeError(f"ps.report: metrics must be a dict of name -> number, not {metrics!r}")
    current = session()
    chief = current.layout.workers[0]
    said = Report(int(step), {name: float(x) for name, x in metrics.items()}, 0)
    header = Header(Kind.REPORT, origin=current.engine.job_rank)
    current.desk.link.send(chief, header, packed_json([said.step, said.metrics]))
    current.engine.nudge()


def reports(*, until: int | None = None, timeout_s: float | None = None) -> list[Report]:
    """Return the reports that have come since the last call; on the chief.

    Args:
        until: wait for one of this step, or of a later one; None: for nothing.
        timeout_s: how long, in seconds; None: ps.init(deadline_s=). What has come by then is told
            by the next call.

    Raises:
        CommTimeoutError: no evaluator has reported such a step by then.
        PeerFailedError: a rank died.
    """
    require_timeout("ps.reports", timeout_s)
    current = session()
    told = current.desk.reports

    def has_come() -> bool:
        return until is None or any(json.loads(each.meta)[0] >= until for each in told)

    if until is not None:
        _await_report(current, has_come, until, timeout_s)
    came = []
    while told:
        delivery = told.popleft()
        step, metrics = json.loads(delivery.meta)
        came.append(Report(step, metrics, delivery.source))
    return came


def _await_report(
    current: Session, has_come: Callable[[], bool], step: int, timeout_s: float | None
) -> None:
    evaluators = current.layout.evaluators
    if not evaluators:
        raise RingcommError("ps.reports: nobody evaluates. Pass evaluators=1 to ps.init()")
    if not current.client.drive_until(has_come, "ps.reports", timeout_s):
        label = current.engine.transport.label
        raise CommTimeoutError(
            f"ps.reports: no report of step {step} or later has come in time from "
            + ", ".join(label(rank) for rank in evaluators)
            + ". Does the function marked @ps.evaluator call ps.report()? Else wait longer with "
            "timeout_s=",
            missing=list(evaluators),
        )


def wait_for_step(step: int, timeout_s: float | None = None) -> int | None:
    """Return what every worker has completed once that is `step` or more.

    None if all left before.
    """
    current = session()
    client = current.client
    reached: list[int | None] = [None]

    def note(reply: Delivery) -> None:
        if reply.header.status == Status.OK:
            reached[0] = reply.header.clock

    future = Future(client, f"step {step}", 1, lambda: reached[0], client.timestamp())
    client.ask([Ask(Kind.TICK, server=0, clock=step, option=1, on_reply=note)], future)
    return future.wait(timeout_s)


def _run(current: Session, function: Callable[[int], object], every: int) -> None:
    """Evaluate until the workers have left."""
    due = every
    while (step := wait_for_step(due, float("inf"))) is not None:
        with snapshot():
            function(step)
        due = (step // every + 1) * every
