"""Waits until replies are there, a deadline has passed, or a rank has died; says whom it is for.

A wait that takes long asks the servers which workers its requests wait for, and these workers what
they do. The answers are logged once, after RINGCOMM_STALL_WARNING_S, and stand in the error.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ringcomm.engine.peers.drive_until import drive_until
from ringcomm.engine.progress.deadlines import ANSWER_S
from ringcomm.errors import CommTimeoutError
from ringcomm.ps.client.json_requests import Asker, ask_json
from ringcomm.ps.control.commands import CLOSING, MOVING, STOPPING
from ringcomm.ps.protocol.frames import ServerOption
from ringcomm.transport.control_header import ControlKind

if TYPE_CHECKING:
    from ringcomm.engine.core.engine import Engine
    from ringcomm.ps.roles import Layout

_log: Final = logging.getLogger("ringcomm")
_ADVICE: Final = (
    "A worker without data for a round takes part with set_samples(0) or push(None); one that has "
    "finished leaves with rc.shutdown()."
)
_ADVICE_IF_LATE: Final = (
    "With ps.FirstOf(k), workers that make equally many steps end in different rounds. Let all end "
    "at a number of rounds (while optimizer.n_rounds < n: or table.n_rounds), or once the chief "
    "has called ps.stop() (while not ps.should_stop():)."
)
_ADVICE_OF: Final = {
    CLOSING: "Call close() on each rank that has opened the table.",
    MOVING: "Nothing moves while it is within ps.snapshot().",
    STOPPING: "Each worker calls should_stop() after each step.",
}
_BUSY: Final = "It is busy, or waits for other workers."
# A text says what at most so many workers do, names so many tables of one wait, and so many waits.
_SHOWN, _TABLES, _WAITS = 16, 3, 4
_QUESTION: Final = 0xFFFF_FFFF << 32  # keys of questions; no operation has one of these
_questions: Final = itertools.count()

IsOver = Callable[[], bool]
Servers = Callable[[], Iterable[int]]
Missing = dict[tuple[str, tuple[int, ...]], set[str]]  # what waits for which ranks -> its tables


class Lateness(NamedTuple):
    """How late a worker was in ps.FirstOf(k): rounds of a table without it, of those over."""

    table: str
    n_missed: int
    n_over: int


class Waits:
    """The waits of this rank for servers.

    Args:
        engine: of this rank.
        layout: who is who.
        asker: asks the servers.

    Attributes:
        label: of the call that waits now; "" if none does.
        tables: that this rank has opened, by name.
    """

    def __init__(self, engine: Engine, layout: Layout, asker: Asker) -> None:
        self._engine, self._layout, self._asker = engine, layout, asker
        self.label = ""
        self.tables: Mapping[str, Any] = {}

    def until(self, is_over: IsOver, label: str, servers: Servers, limit_s: float) -> None:
        """Drive until it is over.

        Args:
            is_over: looks.
            label: of the call.
            servers: returns those that have not answered.
            limit_s: how long, in seconds.

        Raises:
            CommTimeoutError: it is not over by then; names the servers, and missing workers.
            PeerFailedError: a rank died.
        """
        outer, self.label = self.label, label
        try:
            self._until(is_over, label, servers, limit_s)
        finally:
            self.label = outer

    def _until(self, is_over: IsOver, label: str, servers: Servers, limit_s: float) -> None:
        warn_after_s = min(self._engine.settings.stall_warning_or_inf, limit_s)
        if drive_until(self._engine, is_over, label, warn_after_s):
            return
        if warn_after_s < limit_s:
            why = self._reasons(servers, is_over)
            if not is_over():
                _log.warning(
                    "%s. %s", self._waited(label, servers, warn_after_s), why,
                    extra={"event": "stall"},
                )  # fmt: skip
            if drive_until(self._engine, is_over, label, limit_s - warn_after_s):
                return
        # A wait that is as short as this is a look.
        why = self._reasons(servers, is_over) if limit_s >= ANSWER_S else _BUSY
        if not is_over():
            raise CommTimeoutError(
                f"{self._waited(label, servers, limit_s)}. {why} The request is still under way: "
                "wait again, or raise the limit with ps.init(deadline_s=)",
                missing=[self._layout.rank_of(server) for server in sorted(servers())],
            )

    def _waited(self, label: str, servers: Servers, waited_s: float) -> str:
        name = self._engine.transport.label
        ranks = ", ".join(
            f"server {server} ({name(self._layout.rank_of(server))})"
            for server in sorted(servers())
        )
        return f"{label}: no answer within {waited_s:g} s from {ranks or 'the servers'}"

    def _reasons(self, servers: Servers, is_over: IsOver) -> str:
        """Return sentences that say whom the servers wait for; takes at most 2 x ANSWER_S."""
        if self._engine.progress.is_own_turn:
            return _BUSY
        missing = self._missing_workers(servers, is_over)
        if missing is None:
            return "It does not answer: it is busy, or hangs."
        ranks = {rank for _, workers in missing for rank in workers}
        doings = self._doings(ranks, is_over)
        names = sorted({name for waiting in missing.values() for name in waiting})
        late = [each for name in names if (each := self._lateness(name)) is not None]
        return reasons_text(missing, doings, self._layout.place_of, late)

    def _lateness(self, name: str) -> Lateness | None:
        table = self.tables.get(name)
        if table is None or not table.n_missed:
            return None
        return Lateness(name, table.n_missed, table.n_rounds - 1)  # but for that which it waits for

    def _missing_workers(self, servers: Servers, is_over: IsOver) -> Missing | None:
        """Return for which workers servers wait; None: they do not answer."""
        answers = ask_json(self._asker, ServerOption.MISSING, None, sorted(servers()))
        drive_until(self._engine, lambda: answers.done() or is_over(), answers.label, ANSWER_S)
        if not answers.done():
            return None
        missing: Missing = {}
        for what, table, workers in itertools.chain.from_iterable(answers.wait()):
            missing.setdefault((what, tuple(workers)), set()).add(table)
        return missing

    def _doings(self, ranks: Iterable[int], is_over: IsOver) -> dict[int, str]:
        """Return the label of the call that each rank is in, or "".

        A rank that does not look after ringcomm, as in a long computation, is left out.
        """
        watch, key = self._engine.watch, _QUESTION + next(_questions)
        asked = {r for r in ranks if r != self._engine.job_rank and r not in watch.peers.dead}
        for rank in asked:
            watch.tell(rank, ControlKind.ASK, key=key)

        def has_come() -> bool:
            return asked <= watch.peers.whereabouts(key).keys() or is_over()

        drive_until(self._engine, has_come, "ask", ANSWER_S)
        doings = watch.peers.whereabouts(key)
        watch.peers.forget(key)
        return doings


def reasons_text(
    missing: Missing, doings: Mapping[int, str], index_of: Callable[[int], int],
    late: Sequence[Lateness] = (),
) -> str:  # fmt: skip
    """Return sentences that name the missing workers, and say what each does. Pure.

    Args:
        missing: see Missing.
        doings: the call that each rank is in, or ""; without those that did not answer.
        index_of: returns the index of a worker by its rank in the job.
        late: in rounds of these tables, the worker that waits.
    """
    if not missing:
        return "It has answered that no worker is missing: it is busy, or the network is slow."
    waits = []
    for (what, ranks), tables in missing.items():
        workers = ", ".join(str(index_of(rank)) for rank in ranks)
        plural = "s" if len(ranks) > 1 else ""
        of = _shortened(sorted(filter(None, tables)), _TABLES)
        of = f" of {of}" if of else ""
        waits.append(f"{what}{of} waits for worker{plural} {workers}" if ranks else f"{what}{of}")
    text = f"{_capital(_shortened(waits, _WAITS, '; '))}."
    named = sorted({rank for _, ranks in missing for rank in ranks})
    if not named:
        return text
    shown = [
        f"worker {index_of(rank)} (rank {rank} of the job) {_doing(doings.get(rank))}"
        for rank in named
    ]
    whats = {what for what, _ in missing}
    advice = _ADVICE_OF.get(min(whats), _ADVICE) if len(whats) == 1 else _ADVICE
    if late:
        most = max(late, key=lambda each: each.n_missed)
        advice = (
            f"This worker was late: {most.n_missed} of {most.n_over} rounds of {most.table} went "
            f"by without it. {_ADVICE_IF_LATE}"
        )
    return f"{text} {_capital(_shortened(shown, _SHOWN, '; '))}. {advice}"


def _shortened(texts: list[str], limit: int, separator: str = ", ") -> str:
    more = [f"and {len(texts) - limit} more"] * (len(texts) > limit)
    return separator.join([*texts[:limit], *more])


def _capital(text: str) -> str:
    return text if text.startswith("ps.") else text[:1].upper() + text[1:]


def _doing(label: str | None) -> str:
    if label is None:
        return "does not answer: it computes, or hangs"
    return f"is in {label}" if label else "is in no call of ringcomm"
