"""How long one operation waits, and what it tells the user and the others when it is too long."""

from __future__ import annotations

import logging
import math
import time
from typing import Protocol

from ringcomm.config import Settings
from ringcomm.errors import CommTimeoutError, PeerFailedError
from ringcomm.transport.header import Kind
from ringcomm.transport.members import ranks_text
from ringcomm.transport.peers import GaveUp
from ringcomm.transport.watch import Watch

_log = logging.getLogger("ringcomm")

# Time for "who is here?" to be answered before a warning or an error names ranks.
ANSWER_S = 0.5
_SHOWN = 16  # ranks of which an error says where they are
PROGRAM_ENDED = "left the job: its program ended"


class Waiting(Protocol):
    """An operation, as far as its patience goes; see Task."""

    label: str
    key: int
    base: int
    number: int
    members: tuple[int, ...]
    timeout_s: float | None

    @property
    def awaited(self) -> tuple[int, ...]:
        """Ranks of the job; if all of them leave, it cannot complete."""

    @property
    def late(self) -> tuple[int, ...]:
        """Ranks that hold it up, as far as is known; if one leaves, it cannot complete."""


class Warnings:
    """Keeps a rank that waits for many operations from saying so of each."""

    def __init__(self, settings: Settings) -> None:
        self._period_s = settings.stall_warning_or_inf
        self._next = -math.inf

    def may_warn(self, now: float) -> bool:
        """Return True if the last warning is a while ago; another one is due then."""
        if now < self._next:
            return False
        self._next = now + self._period_s
        return True


class Patience:
    """Warns once, then gives up for all ranks; asks around first, so that both name the missing.

    start: when the wait began, of the monotonic clock.
    """

    def __init__(
        self, task: Waiting, watch: Watch, settings: Settings, warnings: Warnings, start: float
    ) -> None:
        self._warnings = warnings
        self._task = task
        self._watch = watch
        self._timeout_s = settings.timeout_or_inf if task.timeout_s is None else task.timeout_s
        self._start = start
        self._ask_at = start + settings.stall_warning_or_inf
        self._warn_at = math.inf
        self._deadline = start + self._timeout_s
        self._give_up_at = math.inf

    def check(self, now: float) -> None:
        """Warn or give up if it is time to."""
        if now >= self._ask_at:
            self._ask_at = math.inf
            self._warn_at = now + ANSWER_S
            ask_around(self._task, self._watch)
        if now >= self._warn_at:
            self._warn_at = math.inf
            if self._warnings.may_warn(now):
                _log.warning("%s", self._text(now))
        if now >= self._deadline:
            self._deadline = math.inf
            self._give_up_at = now + min(ANSWER_S, self._timeout_s)
            ask_around(self._task, self._watch)
        if now >= self._give_up_at:
            self._give_up_at = math.inf
            own = f"of {self._timeout_s:g} s"
            limit = own if self._task.timeout_s else f"RINGCOMM_TIMEOUT_S={self._timeout_s:g}"
            message = (
                f"{self._text(now)} The timeout {limit} is over. "
                "The engine cannot be used any more; end this job, or raise the limit. Ranks that "
                "all live can go on if all of them call shutdown() and init()."
            )
            missing = self._watch.peers.missing(self._task.key, self._task.members)
            self._watch.announce_gave_up(GaveUp(tuple(missing or self._task.late), message))

    def _text(self, now: float) -> str:
        return describe_wait(self._task, self._watch, now - self._start)


class Farewell:
    """The wait of a rank that is done for those that are not, limit_s long: not in silence."""

    def __init__(self, watch: Watch, settings: Settings, limit_s: float = math.inf) -> None:
        self._watch = watch
        self._start = time.monotonic()
        self._warn_at = self._start + settings.stall_warning_or_inf
        self._limit_s = limit_s

    def is_over(self) -> bool:
        """Return True once every rank has left, or one is dead, or it is too long; warns once."""
        peers, now = self._watch.peers, time.monotonic()
        if peers.are_all_gone or peers.dead or now >= self._start + self._limit_s:
            return True
        if now >= self._warn_at:
            self._warn_at = math.inf
            ranks = ranks_text(peers.still_here)
            _log.warning(
                "shutdown: rank %d has waited %.1f s for ranks that have not left: %s. They may be "
                "busy, or hang; this wait %s.",
                self._watch.transport.rank,
                now - self._start,
                ranks,
                "has no deadline" if self._limit_s == math.inf else f"ends at {self._limit_s:g} s",
            )
        return False


def ask_around(task: Waiting, watch: Watch) -> None:
    """Ask the ranks of an operation whether they have entered it; the answers come by poll()."""
    for rank in task.members:
        if rank != watch.transport.rank and rank not in watch.peers.dead:
            watch.tell(rank, Kind.ASK, key=task.key, fingerprint=task.base, value=task.number)


def describe_wait(task: Waiting, watch: Watch, waited_s: float) -> str:
    """Return who waits for whom, and where those are instead."""
    waited = f"{task.label}: rank {watch.transport.rank} has waited {waited_s:.1f} s"
    missing = watch.peers.missing(task.key, task.members)
    if not missing and task.late:
        ranks = ranks_text(task.late)
        return f"{waited} for what entered it and went no further: rank(s) {ranks}."
    if not missing:
        return f"{waited}; all ranks have entered it, so the network or a rank is slow."
    ranks = ranks_text(missing)
    plural = "s" if len(missing) > 1 else ""
    elsewhere = watch.peers.whereabouts(task.key)
    shown = [f"rank {r} is in {w or 'no operation'}" for r, w in elsewhere.items()]
    where = "; ".join(shown[:_SHOWN] + ["..."] * (len(shown) > _SHOWN))
    text = f"{waited} for rank{plural} {ranks}, which did not answer or did not enter it"
    return f"{text} ({where})." if where else f"{text}."


def refuse_hopeless(task: Waiting, watch: Watch, cause: Exception | None = None) -> None:
    """Raise if an operation cannot complete.

    Raises:
        PeerFailedError: a rank of it died, failed or left.
        CommTimeoutError: the deadline of one of its ranks passed.
    """
    gave_up = watch.peers.quitter(task.members)
    if gave_up is not None:
        raise CommTimeoutError(gave_up.message, missing=gave_up.missing)
    me = watch.transport.rank
    rank, reason = me, watch.own_failure
    if reason is None:
        obstacle = watch.peers.obstacle(task.key, task.members)
        awaited = task.awaited
        is_alone = bool(awaited) and all(r in watch.peers.left for r in awaited)
        gone = [r for r in task.late if r in watch.peers.left]
        if obstacle is not None:
            rank, reason = obstacle.rank, obstacle.reason
        elif is_alone:
            rank, reason = awaited[0], watch.peers.left[awaited[0]]
        elif gone:
            rank, reason = gone[0], watch.peers.left[gone[0]]
        else:
            return
    who = "this rank" if rank == me else watch.transport.label(rank)
    raise PeerFailedError(
        f"{task.label}: {who} {reason}; the operation cannot complete. {_advice(reason)}",
        rank=rank,
        reason=reason,
    ) from cause


def _advice(reason: str) -> str:
    if PROGRAM_ENDED in reason:
        return (
            "If it had less to do than others, let each rank call join() where its loop ends; "
            "else fix what ended it."
        )
    return "Fix that rank's failure first; this rank only waited for it."
