"""What is due between two steps of a worker: it stands still while a newcomer takes a place.

    newcomer -> worker    ASK: stand still once your step is over
    worker -> newcomer    HERE: how many steps, rounds and calls of should_stop() it has made
    newcomer -> servers   TAKE: it counts from there on; the worker stands still meanwhile
    newcomer -> all       IN: it has a place, and which
    workers -> newcomer   SEEN: they know

So the newcomer is at the same point as the worker, in all tables: their next step is the same.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Final

from ringcomm.ps.placement.replacement_workers import Beginning, Newcomer
from ringcomm.ps.protocol.frame_meta import packed_json
from ringcomm.ps.protocol.frames import Coming, FrameHeader, FrameKind

if TYPE_CHECKING:
    from ringcomm.ps.protocol.link import Delivery
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
    if current.newcomers:
        _let_in(current)
    end_if_too_few(current)


def _let_in(current: Session) -> None:
    """Stand still until the ranks that have asked for it have their places, or are gone."""
    client = current.client
    for rank in sorted(current.newcomers):
        if rank in current.engine.watch.peers.gone or client.loss is not None:
            current.newcomers.discard(rank)
            continue
        client.wait_until_sent("step")
        tables = [table for table in [*current.tables.values()] if table.mode.has_rounds]
        # Of a table that this rank, a newcomer, has not opened it has what others told it.
        rounds = {**current.begins, **{table.number: table.n_rounds for table in tables}}
        beginning = Beginning(current.clock, rounds)
        said = {"begins": beginning.to_json(), "calls": current.training.n_calls}
        send(current, rank, Coming.HERE, packed_json(said))

        def is_over(rank: int = rank) -> bool:
            is_in = rank not in current.newcomers or rank in current.engine.watch.peers.gone
            return is_in or client.loss is not None

        if not client.drive_until(is_over, "step", None):
            _log.warning(
                "ps: %s has not taken its place within %g s, and this worker goes on",
                current.engine.transport.label(rank), client.deadline_s,
            )  # fmt: skip
        current.newcomers.discard(rank)


def send(current: Session, to: int, option: Coming, meta: bytes = b"") -> None:
    header = FrameHeader(FrameKind.NEWCOMER, origin=current.engine.job_rank, option=option)
    current.client.link.send(to, header, meta)


def hear(current: Session, frame: Delivery) -> None:
    """Take a frame of a newcomer, or about those that live; called in the loop."""
    layout, rank, option = current.layout, frame.source, frame.header.option
    is_worker = layout.role_of(current.engine.job_rank) == "worker"
    if option == Coming.ASK:
        current.newcomers.add(rank)
    elif option == Coming.MEMBERS:
        current.members_said[rank] = json.loads(frame.meta)
    elif option == Coming.IN:
        newcomer = Newcomer(*json.loads(frame.meta))
        if layout.join(newcomer):
            is_chief = layout.chief == current.engine.job_rank
            _log.log(
                logging.WARNING if is_chief else logging.DEBUG,
                "ps: %s is %s %d now, in the place of rank %d",
                current.engine.transport.label(rank), newcomer.role, layout.place_of(rank),
                newcomer.place,
                extra={"event": "spare"},
            )  # fmt: skip
        if is_worker:
            send(current, rank, Coming.SEEN)
        current.newcomers.discard(rank)
