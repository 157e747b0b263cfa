"""Evaluators: ranks that read snapshots while others train, and report to the chief."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeVar

from ringcomm.errors import CommTimeoutError, PeerFailedError, RingcommError, ServerLostError
from ringcomm.ps.checkpoint.recover import follow
from ringcomm.ps.client.future import require_timeout
from ringcomm.ps.client.pauses import hold, new_id, release
from ringcomm.ps.client.request import Request
from ringcomm.ps.protocol.frame_meta import packed_json
from ringcomm.ps.protocol.frames import FrameHeader, FrameKind, NewsOption, Status
from ringcomm.ps.protocol.link import Delivery
from ringcomm.ps.session import Session, require_not_begun, session

_log = logging.getLogger("ringcomm")

F = TypeVar("F", bound=Callable[..., Any])
_LAST_WORDS_S: Final = 1.0  # a report of an evaluator that has left comes in this time


class Report(NamedTuple):
    """The result of an evaluation.

    Attributes:
        step: of the training.
        metrics: name -> number.
        rank: of the evaluator, in the job.
    """

    step: int
    metrics: dict[str, float]
    rank: int


def evaluator(every: int) -> Callable[[F], F]:
    """Mark the function that evaluators run: function(step), every so many steps of the slowest.

    `step` is how many steps the slowest worker has completed when the snapshot is requested: a
    multiple of `every`, or more if the evaluation before took longer: then those between are
    skipped, and the first time a warning is logged. With every=50: 50, 135, 150, 200. The
    snapshot may be some steps further. Within the function ps.table(...) and pull() read it. The
    function must be marked before ps.init(), which calls it on ranks that evaluate. An error that
    it raises ends the evaluator; in an elastic job training goes on without it, in any other the
    job ends, as with the failure of any rank.
    """
    if every < 1:
        raise ValueError(f"ps.evaluator: every is {every}; it must be 1 or more")

    def mark(function: F) -> F:
        global _evaluation  # noqa: PLW0603 - one program has one evaluation
        require_not_begun("ps.evaluator", "which calls it")
        _evaluation = _Evaluation(function, every)
        return function

    return mark


@contextlib.contextmanager
def snapshot() -> Iterator[int]:
    """Make pulls of this rank read all tables as they are at one moment, until the block ends.

    A table with rounds is read exactly between two of them; of others, each block at one instant.
    No partition moves to another server meanwhile. Dense tables are copied. Of a hash table,
    servers keep the old values of rows that change meanwhile: so a snapshot takes no time, however
    large the table is, and a push takes longer by the rows that it is the first to change. Metadata
    and numbers of rows are the present ones.

    Yields:
        The number of rounds, of the table with rounds that has had the most; 0 without one.
    """
    current = session()
    if current.snapshot:
        raise RingcommError("ps.snapshot: this rank is in one already")
    number = new_id(current.client)
    try:
        rounds = hold(current.client, number).rounds
        current.snapshot = number
        yield max(rounds.values(), default=0)
    except ServerLostError:
        current.lost_in.add(number)
        raise
    finally:
        current.snapshot = 0
        release(current.client, number)


def report(step: int, metrics: dict[str, float]) -> None:
    """Send metrics to the chief, where ps.reports() returns them."""
    if not isinstance(metrics, Mapping):
        raise TypeError(f"ps.report: metrics must be a dict of name -> number, not {metrics!r}")
    current = session()
    chief = current.layout.chief
    header = FrameHeader(
        FrameKind.NEWS, origin=current.engine.job_rank, option=NewsOption.REPORT
    )  # fmt: skip
    numbers = {name: float(x) for name, x in metrics.items()}
    current.client.link.send(chief, header, packed_json([int(step), numbers]))
    current.engine.nudge()


def reports(*, until: int | None = None, timeout_s: float | None = None) -> list[Report]:
    """Return the reports that have come since the last call; on the chief.

    Args:
        until: wait for one of this step, or of a later one; None: for nothing.
        timeout_s: how long, in seconds; None: ps.init(deadline_s=). Reports that have come by then
            are returned by the next call.

    Raises:
        CommTimeoutError: no evaluator has reported such a step by then.
        PeerFailedError: a rank died that the job needs, or all evaluators died, or left, before
            they had.
    """
    require_timeout("ps.reports", timeout_s)
    current = session()
    arrived = current.dispatcher.reports

    def has_come() -> bool:
        present = arrived.present()
        return until is None or any(json.loads(each.meta)[0] >= until for each in present)

    if until is not None:
        _await_report(current, has_come, until, timeout_s)
    reports = []
    for delivery in arrived.take_all():
        step, metrics = json.loads(delivery.meta)
        reports.append(Report(step, metrics, delivery.source))
    return reports


def _await_report(
    current: Session, has_come: Callable[[], bool], step: int, timeout_s: float | None
) -> None:
    evaluators = current.layout.evaluators
    if not evaluators:
        raise RingcommError("ps.reports: nobody evaluates. Pass evaluators=1 to ps.init()")
    peers = current.engine.watch.peers
    end = math.inf

    def is_over() -> bool:
        nonlocal end
        layout, now = current.layout, time.monotonic()
        are_gone = all(rank in peers.gone for rank in layout.evaluators)
        may_return = layout.standing_by and any(rank in peers.dead for rank in layout.evaluators)
        end = min(end, now + _LAST_WORDS_S) if are_gone and not may_return else math.inf
        are_dead = all(rank in peers.dead for rank in layout.evaluators)
        return has_come() or now >= end or (are_dead and end < math.inf)

    if not current.client.drive_until(is_over, "ps.reports", timeout_s):
        label = current.engine.transport.label
        raise CommTimeoutError(
            f"ps.reports: no report of step {step} or later has come in time from "
            + ", ".join(label(rank) for rank in evaluators)
            + ". Does the function marked @ps.evaluator call ps.report()? Else wait longer with "
            "timeout_s=",
            missing=list(evaluators),
        )
    if not has_come():
        transport, rank = current.engine.transport, evaluators[-1]
        reason = peers.dead.get(rank, "has left before the workers")
        raise PeerFailedError(
            f"ps.reports: {transport.label(rank)}, an evaluator, {reason}, and no other one is "
            f"left, so no report of step {step} will come. Training can go on without it",
            rank=rank,
            reason=reason,
            view=transport.view.number,
        )


def wait_for_step(step: int, timeout_s: float | None = None) -> int | None:
    """Return the steps that every worker has completed once they are `step` or more.

    None if all left before.
    """
    client = session().client
    request = Request(FrameKind.TICK, server=client.leader, clock=step, option=1)

    def read(reply: Delivery) -> int | None:
        return reply.header.clock if reply.header.status == Status.OK else None

    return client.call_one(f"step {step}", request, read).wait(timeout_s)


class _Evaluation(NamedTuple):
    """A function that is marked @ps.evaluator."""

    function: Callable[[int], object]
    every: int


_evaluation: _Evaluation | None = None


def is_marked() -> bool:
    return _evaluation is not None


def evaluate() -> None:
    """Run the function that is marked until the workers have left."""
    assert _evaluation is not None
    function, every = _evaluation
    due, has_skipped = every, False
    while True:
        try:
            step = wait_for_step(due, float("inf"))
            if step is None:
                return
            if step >= due + every and not has_skipped:
                has_skipped = True
                _log.warning(
                    "an evaluation takes longer than %d steps of training, so this one is of step "
                    "%d, not %d: evaluations of steps that have passed are skipped",
                    every, step, due,
                )  # fmt: skip
            with snapshot():
                function(step)
        except ServerLostError:
            manifest = follow(session())
            if manifest is None:
                return
            step = manifest["clock"]
        due = (step // every + 1) * every
