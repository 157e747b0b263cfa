"""The end of a rank's part in a job with parameter servers: it leaves, and a server serves on."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Any, Final

from ringcomm.engine.progress.deadlines import refuse_hopeless
from ringcomm.errors import RingcommError
from ringcomm.ps.client import Ask, Wait
from ringcomm.ps.frames import Kind, Step
from ringcomm.ps.future import Future
from ringcomm.ps.messages import packed_json
from ringcomm.ps.pauses import pause_number
from ringcomm.ps.serving import LEADER
from ringcomm.ps.snapshots import PAUSE

if TYPE_CHECKING:
    from ringcomm.ps.job import Session

_log: Final = logging.getLogger("ringcomm")


def leave(current: Session) -> None:
    """Tell the servers that this rank asks nothing more, once nothing of it is under way.

    They are told in any case: they, and all that wait for them, would wait for ever.

    Raises:
        CommTimeoutError: a server that it names has not answered within ps.init(deadline_s=).
        PeerFailedError: a rank died.
    """
    try:
        _settle(current)
    finally:
        _ask(current, Kind.LEAVE, range(current.client.n_servers))
    if current.desk.server is not None:
        serve(current, "leave")


def _settle(current: Session) -> None:
    """Return once no request of this rank is on its way back to it.

    Rows must not move while some servers know that this rank has left, and others do not: so there
    is a pause, which the leader ends as it hears of that. It lets no move go first that has not
    begun: those may wait for a pause that lasts. It begins once all pushes have left: they may wait
    for those of a worker that waits for a move.
    """
    client, n_moved = current.client, -1
    client.wait_until_sent("leave")
    number = pause_number(current.engine.job_rank)
    _ask(current, Kind.SNAPSHOT, [LEADER], meta={"do": PAUSE, "id": number, "patience_s": 0})
    while n_moved != client.n_moved:  # requests that come back must be there before LEAVE
        n_moved = client.n_moved
        _ask(current, Kind.MOVE, range(client.n_servers), option=Step.SETTLE)
        client.wait_until_settled("leave")


def _ask(
    current: Session,
    kind: Kind,
    servers: range | list[int],
    *,
    option: int = 0,
    meta: dict[str, Any] | None = None,
) -> None:
    client = current.client
    text = b"" if meta is None else packed_json(meta)
    future: Future[None] = Future(client, "leave", len(servers), lambda: None, client.timestamp())
    client.ask([Ask(kind, server=s, option=option, meta=text) for s in servers], future)
    future.wait()


def serve(current: Session, label: str) -> None:
    """Drive a server's rank until all who could ask have left.

    That has no deadline: they may train for hours. A rank that has left itself says for whom it
    waits.

    Args:
        current: of the server.
        label: what the rank is doing: "leave" if it has left itself.

    Raises:
        PeerFailedError: a rank died.
    """
    engine, desk = current.engine, current.desk
    server = desk.server
    assert server is not None
    wait = Wait(label, tuple(range(engine.job_size)))
    hopeless: list[RingcommError] = []
    began_at = time.monotonic()
    warn_at = began_at + engine.settings.stall_warning_or_inf if current.has_left else math.inf

    def is_enough() -> bool:
        nonlocal warn_at
        try:
            refuse_hopeless(wait, engine.watch)
        except RingcommError as error:
            hopeless.append(error)
        if time.monotonic() >= warn_at:
            warn_at = math.inf
            _warn(current, time.monotonic() - began_at)
        return bool(hopeless) or (server.is_over and not desk.link.is_busy)

    engine.run_until(is_enough)
    if hopeless:
        raise hopeless[0]


def _warn(current: Session, waited_s: float) -> None:
    server = current.desk.server
    assert server is not None
    _log.warning(
        "shutdown: rank %d, a server too, has served on for %.1f s for ranks that have not left: "
        "%s. They may be busy, or hang; this wait has no deadline.",
        current.engine.job_rank,
        waited_s,
        ", ".join(map(str, server.clients())),
    )
