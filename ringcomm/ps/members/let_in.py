"""What is due between two steps of a worker: it stands still while a newcomer takes a place.

That comes after the step boundary: so the newcomer has missed the commands that are due there, and
gets them, and those that are agreed on for later steps.

See ringcomm.ps.control.commands.StandBy. Once the server that leads has told the chief to, it says
after its step how many steps, rounds and calls of should_stop() it has made (Here), and stands
still until it is told who has a place. So the newcomer is at the same point as the chief, in all
tables: their next step is the same.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from ringcomm.engine.control.live_parameters_and_callbacks import PROGRAM
from ringcomm.errors import ServerLostError
from ringcomm.ps.client.json_requests import ask_leader
from ringcomm.ps.placement.replacement_workers import Beginning, Newcomer

if TYPE_CHECKING:
    from ringcomm.ps.client.future import Future
    from ringcomm.ps.session import Session

# --- enough workers -------------------------------------------------------------------------------
_log: Final = logging.getLogger("ringcomm")


def end_if_too_few(current: Session) -> None:
    """End the job at the next step boundary if fewer than RINGCOMM_ELASTIC_MIN workers are left.

    Those that stand by for a place count, too. No others can come, so there is nothing to wait for.
    """
    layout, engine = current.layout, current.engine
    if not layout.dead or current.is_ending:
        return
    least, n_waiting = engine.settings.elastic_min, len(layout.standing_by)
    n = sum(rank not in layout.dead for rank in layout.workers)
    if n + n_waiting >= least:
        return
    current.is_ending = True
    text = f"ps: {n} of {len(layout.workers)} workers are left"
    text += f", {n_waiting} stand by" if n_waiting else ""
    text += (
        f", and RINGCOMM_ELASTIC_MIN is {least}: the job saves a checkpoint after this step, and "
        "ends. Start it again to go on"
    )
    if engine.job_rank == layout.acting_chief(engine.watch.peers.gone):
        _log.error("%s", text)
    if engine.page is not None:
        engine.page.note_event(text)
    engine.control.end_job()


def end_step(current: Session) -> None:
    current.take_back_refusal()
    if current.between_steps is not None:
        current.between_steps()
    end_if_too_few(current)


def let_in(current: Session) -> None:
    """Stand still until the ranks that are to begin here have their places, or are gone."""
    if not current.newcomers:
        return
    client = current.client
    with contextlib.suppress(ServerLostError):  # the next call raises it
        for rank in sorted(current.newcomers):
            client.wait_until_sent("step")
            while current.newcomers[rank] and not _stand_still(current, rank):
                pass  # it could not begin there, and this rank says anew where it is
            current.newcomers.pop(rank, None)
            if rank in current.layout.workers:
                current.engine.control.tell_of_commands(rank)


def _stand_still(current: Session, newcomer: int) -> bool:
    """Say where a newcomer begins; return True once it is over."""
    client, n_told = current.client, current.newcomers[newcomer]
    here = _here(current, newcomer)

    def is_over() -> bool:
        is_gone = newcomer in current.engine.watch.peers.gone
        return is_gone or here.done() or client.loss is not None

    if client.drive_until(
        lambda: is_over() or current.newcomers[newcomer] != n_told, "step", None
    ):  # fmt: skip
        return is_over()
    _log.warning(
        "ps: %s has not taken its place within %g s, and this worker goes on",
        current.engine.transport.label(newcomer), client.deadline_s,
    )  # fmt: skip
    return True


def _here(current: Session, newcomer: int) -> Future[Any]:
    tables = [table for table in [*current.tables.values()] if table.mode.has_rounds]
    # Of a table that this rank, a newcomer, has not opened it has what others told it.
    rounds = {**current.begins, **{table.number: table.n_rounds for table in tables}}
    boundaries = current.engine.control.n_steps
    begins = Beginning(current.clock, rounds, boundaries, PROGRAM.n_steps, PROGRAM.taken)
    return ask_leader(
        current.client, "step", "here", needs_tables=True, newcomer=newcomer,
        begins=begins.to_json(), calls=current.training.n_calls,
    )  # fmt: skip


def note_newcomer(current: Session, rank: int) -> None:
    current.newcomers[rank] += 1


def meet(current: Session, taken: Iterable[Iterable[Any]]) -> None:
    """Know who has a place; called in the loop."""
    layout = current.layout
    is_chief = layout.chief == current.engine.job_rank
    for newcomer in (Newcomer(*each) for each in taken):
        if layout.join(newcomer):
            _log.log(
                logging.WARNING if is_chief else logging.DEBUG,
                "ps: %s is %s %d now, in the place of rank %d",
                current.engine.transport.label(newcomer.rank), newcomer.role,
                layout.place_of(newcomer.rank), newcomer.place,
                extra={"event": "spare"},
            )  # fmt: skip
        current.newcomers.pop(newcomer.rank, None)
