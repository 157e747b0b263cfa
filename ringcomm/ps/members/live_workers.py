"""ps.live_workers(): a group of the workers that live, after a death."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from ringcomm.engine.core.group import Group
from ringcomm.errors import CommTimeoutError, PeerFailedError, RingcommError
from ringcomm.ps.protocol.frame_meta import packed_json
from ringcomm.ps.protocol.frames import FrameHeader, FrameKind, NewsOption
from ringcomm.ps.session import Session, session

_log: Final = logging.getLogger("ringcomm")
_LABEL: Final = "ps.live_workers"


def live_workers() -> Group:
    """Return a new group of the workers that live, and have not left. Collective among them.

    After the death of a worker, collectives of each group that it belongs to raise a
    PeerFailedError: call this on all other workers, and pass the result as group=. The operation in
    which it died may have ended well on some of them, so first agree in the new group on the step
    to go on from, e.g. by max(rc.allgather_object(step, group=group)).

    Raises:
        RingcommError: this rank is no worker.
        PeerFailedError: a rank died without which the job does not go on.
        CommTimeoutError: another worker has not called it within RINGCOMM_TIMEOUT_S.
    """
    current = session()
    if current.engine.job_rank not in current.layout.workers:
        raise RingcommError(f"{_LABEL}: this rank is no worker")
    while True:
        members = _members(current) if current.layout.waiting else _live(current)
        try:
            return Group.of_job(members)
        except PeerFailedError:
            if not current.engine.watch.peers.are_parted(members, or_left=True):
                raise


def _live(current: Session) -> list[int]:
    gone = current.engine.watch.peers.gone
    return [rank for rank in current.layout.workers if rank not in gone]


def _members(current: Session) -> list[int]:
    """Return who is to be in the group: the chief says so, where newcomers may come in.

    One comes in while the chief is between two steps, and others may be here by then. Once the
    chief is here, none does.
    """
    engine, layout, me = current.engine, current.layout, current.engine.job_rank

    def chief() -> int:
        return layout.acting_chief(engine.watch.peers.gone)

    while True:
        _wait(current, lambda: chief() == me or chief() in current.members_said, chief)
        if (who := chief()) == me:
            members = _live(current)
            for rank in members:
                if rank != me:
                    header = FrameHeader(FrameKind.NEWS, origin=me, option=NewsOption.MEMBERS)
                    current.client.link.send(rank, header, packed_json(members))
            return members
        if who in current.members_said:  # else another one is the chief since then
            return current.members_said.pop(who)


def _wait(current: Session, is_known: Callable[[], bool], chief: Callable[[], int]) -> None:
    """Return once it is known. Warns, and raises CommTimeoutError, as a wait for an operation."""
    engine, drive_until = current.engine, current.client.drive_until
    limit_s = engine.settings.timeout_or_inf
    warn_after_s = min(engine.settings.stall_warning_or_inf, limit_s)

    def waited(seconds: float) -> str:
        name = engine.transport.label(chief())
        return f"{_LABEL}: {name}, the chief, has not called it within {seconds:g} s"

    if drive_until(is_known, _LABEL, warn_after_s):
        return
    if warn_after_s < limit_s:
        _log.warning(
            "%s. All workers that live must", waited(warn_after_s), extra={"event": "stall"}
        )
        if drive_until(is_known, _LABEL, limit_s - warn_after_s):
            return
    raise CommTimeoutError(
        f"{waited(limit_s)}; all workers that live must. Call it again, or raise the limit with "
        "RINGCOMM_TIMEOUT_S",
        missing=[chief()],
    )
