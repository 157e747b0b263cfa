"""The end of a job: clients leave, and servers serve until all have left."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Final

from ringcomm.engine.progress.deadlines import refuse_hopeless
from ringcomm.errors import RingcommError
from ringcomm.ps.client.json_requests import ask_servers, ignore
from ringcomm.ps.client.wait_for_replies import Wait
from ringcomm.ps.protocol.frame_meta import packed_json
from ringcomm.ps.protocol.frames import Kind, Step
from ringcomm.ps.snapshot_numbers_and_request_names import PAUSE, moment_number

if TYPE_CHECKING:
    from ringcomm.engine.core.engine import Engine
    from ringcomm.ps.client.client import Client
    from ringcomm.ps.protocol.frame_dispatcher import FrameDispatcher

_log: Final = logging.getLogger("ringcomm")
_LABEL: Final = "leave"


def leave(client: Client) -> None:
    """Report to the servers that this rank asks nothing more, once nothing of it is under way.

    It does so in any case: else servers, and all ranks that wait for them, would wait for ever.

    Raises:
        CommTimeoutError: a server that it names has not answered within ps.init(deadline_s=).
        PeerFailedError: a rank died.
    """
    try:
        _settle(client)
    finally:
        ask_servers(client, _LABEL, Kind.LEAVE, client.servers, ignore).wait()


def _settle(client: Client) -> None:
    """Return once no server returns a request of this rank.

    Rows must not move while some servers know that this rank has left, and others do not. So there
    is a pause of moves, which ends at the leader when the rank leaves. It begins at once, also
    before moves that wait: those may wait for a pause that lasts. It begins after all pushes have
    left: they may wait for those of a worker that waits for a move.
    """
    outstanding, n_resent = client.outstanding, -1
    client.wait_until_sent(_LABEL)
    pause = packed_json({"do": PAUSE, "id": moment_number(client.rank), "patience_s": 0})
    ask_servers(client, _LABEL, Kind.SNAPSHOT, [client.leader], ignore, meta=pause).wait()
    while n_resent != outstanding.n_resent:  # returned requests must be there before LEAVE
        n_resent = outstanding.n_resent
        ask_servers(client, _LABEL, Kind.MOVE, client.servers, ignore, option=Step.SETTLE).wait()
        client.wait_until_settled(_LABEL)


def serve(
    engine: Engine, dispatcher: FrameDispatcher, label: str, *, warn_after_s: float = math.inf
) -> None:
    """Drive a server's rank until all clients have left.

    There is no deadline: they may train for hours.

    Args:
        engine: of the rank.
        dispatcher: of the rank.
        label: "leave" if the rank itself has left; for errors.
        warn_after_s: log once for which clients it waits, after so many seconds.

    Raises:
        PeerFailedError: a rank died.
    """
    server = dispatcher.server
    assert server is not None
    wait = Wait(label, tuple(range(engine.job_size)))
    hopeless: list[RingcommError] = []
    began_at = time.monotonic()
    warn_at = began_at + warn_after_s

    def is_enough() -> bool:
        nonlocal warn_at
        try:
            refuse_hopeless(wait, engine.watch)
        except RingcommError as error:  # raised in this thread, not in the driving one
            hopeless.append(error)
        if time.monotonic() >= warn_at:
            warn_at = math.inf
            _log.warning(
                "shutdown: rank %d, a server too, has served on for %.1f s for ranks that have not "
                "left: %s. They may be busy, or hang; this wait has no deadline.",
                engine.job_rank,
                time.monotonic() - began_at,
                ", ".join(map(str, server.core.clients())),
            )
        return bool(hopeless) or not dispatcher.is_busy

    engine.run_until(is_enough)
    if hopeless:
        raise hopeless[0]
