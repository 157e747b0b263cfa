"""Limits of an operation's wait: a warning, then an error that ends it on all ranks."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ringcomm.config import Settings
from ringcomm.engine.progress.clock_without_stops import RunningTime
from ringcomm.engine.progress.task import Task
from ringcomm.errors import CommTimeoutError, PeerFailedError
from ringcomm.ranks_as_text import ranks_text
from ringcomm.transport.control_header import ControlKind
from ringcomm.transport.control_messages import Watch
from ringcomm.transport.peer_state import GaveUp

_log = logging.getLogger("ringcomm")

# Time for ranks to answer "who is here?" before a warning or an error names ranks.
ANSWER_S = 0.5
_LINES = 4  # ranks whose line is looked up; a rank that does not answer takes a second
_SHOWN = 16  # an error names the operations of at most so many ranks
_CROSSED = (
    " Each waits in a call that another has not made: make the same calls on every rank. Is one of "
    "these within an `if` about the rank, or in a loop that has more rounds on one of them?"
)
PROGRAM_ENDED = "left the job: its program ended"


class Awaited(Protocol):
    """A Task, or a wait of the parameter server's client."""

    label: str
    key: int
    members: tuple[int, ...]
    ends_alone: bool
    helps_if_data_are_unequal: str

    @property
    def what_came_instead(self) -> Callable[[], str]:
        """Return a function: a sentence about what has come instead of what this waits for."""

    @property
    def awaited(self) -> tuple[int, ...]:
        """Ranks of the job; if all of them leave, the wait is in vain."""

    @property
    def late(self) -> tuple[int, ...]:
        """Ranks that delay this wait, as far as known; if one leaves, the wait is in vain."""


class Patience:
    """One wait of an operation: warns once, then ends the operation on all ranks.

    Before the warning and before the end, it asks the other ranks whether they have entered the
    operation, so that the text names those that have not. may_warn() returns False if this rank
    has just warned of another operation. `start` is the time.monotonic() when the wait began.
    """

    def __init__(
        self,
        task: Task,
        watch: Watch,
        settings: Settings,
        may_warn: Callable[[float], bool],
        start: float,
    ) -> None:
        self._may_warn = may_warn
        self._task = task
        self._watch = watch
        self._settings = settings
        self._timeout_s = settings.timeout_or_inf if task.timeout_s is None else task.timeout_s
        self._start = start
        self._running = RunningTime(start)
        self._ask_at = start + settings.stall_warning_or_inf
        self._warn_at = math.inf
        self._deadline = start + self._timeout_s
        self._give_up_at = math.inf
        self._asked: set[int] = (
            set()
        )  # ranks that have left; perhaps after they had done their part

    def check(self, now: float) -> None:
        """Warn or give up if that is due, by the time in which this process ran."""
        now = self._running.at(now)
        if self._task.asks_who_left and self._watch.peers.left:
            self._ask_who_left()
        if now >= self._ask_at:
            self._ask_at = math.inf
            self._warn_at = now + ANSWER_S
            ask_around(self._task, self._watch)
        if now >= self._warn_at:
            self._warn_at = math.inf
            if self._may_warn(now):
                end = "" if self._deadline == math.inf else f" The timeout is {self._limit}."
                _log.warning("%s%s", self._text(now), end, extra={"event": "stall"})
        if now >= self._deadline:
            self._deadline = math.inf
            self._give_up_at = now + min(ANSWER_S, self._timeout_s)
            ask_around(self._task, self._watch)
        if now >= self._give_up_at:
            self._give_up_at = math.inf
            of = "of " if self._task.timeout_s else ""
            message = (
                f"{self._text(now)} The timeout {of}{self._limit} is over. "
                "The engine cannot be used any more; end this job, or raise the limit. If all "
                "ranks are alive, they can also go on: all call shutdown(), then init()."
            )
            missing = self._watch.peers.blamed(self._task.key, self._task.members)
            self._watch.announce_gave_up(GaveUp(tuple(missing or self._task.late), message))

    def _ask_who_left(self) -> None:
        for rank in self._task.members:
            if rank in self._watch.peers.left and rank not in self._asked:
                self._asked.add(rank)
                _ask(rank, self._task, self._watch)

    @property
    def _limit(self) -> str:
        if self._task.timeout_s:
            return f"{self._timeout_s:g} s"
        return f"{self._settings.timeout_name}={self._timeout_s:g}"

    def _text(self, now: float) -> str:
        return describe_wait(self._task, self._watch, now - self._start)


class Farewell:
    """The wait of a leaving rank for the others: at most limit_s, with one warning."""

    def __init__(self, watch: Watch, settings: Settings, limit_s: float = math.inf) -> None:
        self._watch = watch
        self._start = time.monotonic()
        self._warn_at = self._start + settings.stall_warning_or_inf
        self._limit_s = limit_s

    def is_over(self) -> bool:
        """Return True once all have left, a death ends the job, or limit_s is over; warn once."""
        peers, now = self._watch.peers, time.monotonic()
        if peers.are_all_gone or peers.is_fatal or now >= self._start + self._limit_s:
            return True
        if now >= self._warn_at:
            self._warn_at = math.inf
            _log.warning(
                "shutdown: rank %d has waited %.1f s for ranks that have not left: %s. They may be "
                "busy, or hang; this wait %s.",
                self._watch.transport.rank,
                now - self._start,
                ranks_text(peers.still_here),
                "has no deadline" if self._limit_s == math.inf else f"ends at {self._limit_s:g} s",
            )
        return False


def ask_around(task: Task, watch: Watch) -> None:
    """Ask the ranks of an operation whether they have entered it; poll() receives the answers."""
    for rank in task.members:
        if rank != watch.transport.rank and rank not in watch.peers.dead:
            _ask(rank, task, watch)


def _ask(rank: int, task: Task, watch: Watch) -> None:
    watch.tell(rank, ControlKind.ASK, key=task.key, fingerprint=task.base, value=task.number)


def describe_wait(task: Task, watch: Watch, waited_s: float) -> str:
    """Return a text: which rank waits for which ranks, and which operations those are in."""
    waited = f"{task.label}: rank {watch.transport.rank} has waited {waited_s:.1f} s"
    missing = watch.peers.missing(task.key, task.members)
    if not missing and task.late:
        ranks = ranks_text(task.late)
        return f"{waited}. All ranks entered it, but some went no further: rank(s) {ranks}."
    if not missing:
        return f"{waited}; all ranks have entered it, so the network or a rank is slow."
    blamed = watch.peers.blamed(task.key, task.members)
    ranks = ranks_text(blamed)
    plural = "s" if len(blamed) > 1 else ""
    shown = _whereabouts(task, watch, sorted(missing, key=lambda rank: rank not in blamed))
    where = "; ".join(shown[:_SHOWN] + ["..."] * (len(shown) > _SHOWN))
    text = f"{waited} for rank{plural} {ranks}, which did not answer or did not enter it"
    text = f"{text} ({where})." if where else f"{text}."
    if watch.is_crossed(task.key):
        text += _CROSSED
    return f"{text} {task.what_came_instead()}".rstrip()


def _whereabouts(task: Task, watch: Watch, missing: Sequence[int]) -> list[str]:
    elsewhere = watch.peers.whereabouts(task.key)
    texts = {rank: f"is in {label or 'no operation'}" for rank, label in elsewhere.items()}
    for rank in missing[:_LINES]:
        if line := watch.line_of(rank):
            texts[rank] = f"{texts.get(rank, 'does not answer')}, at {line}"
    return [f"rank {rank} {text}" for rank, text in sorted(texts.items())]


def refuse_hopeless(task: Awaited, watch: Watch, cause: Exception | None = None) -> None:
    """Raise PeerFailedError or CommTimeoutError if a task cannot complete."""
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
    advice = "Fix that rank's failure first; this rank only waited for it."
    if PROGRAM_ENDED in reason:
        advice = (
            f"If it had less to do than others, {task.helps_if_data_are_unequal}; "
            "else fix the cause of its end."
        )
    elif task.ends_alone and watch.own_failure is None and watch.peers.are_parted(task.members):
        advice = (
            "The job goes on without it, but no group that it belongs to does: "
            "ps.live_workers() makes one of the workers that live; see "
            '"Collectives after a death" in docs/parameter_server.md.'
        )
    advice = f"{task.what_came_instead()} {advice}".lstrip()
    raise PeerFailedError(
        f"{task.label}: {who} {reason}; the operation cannot complete. {advice}",
        rank=rank,
        reason=reason,
        view=watch.transport.view.number,
    ) from cause
