"""Ends a job with servers, after a checkpoint, once fewer workers are left than there must be."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ringcomm.ps.session import Session

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
