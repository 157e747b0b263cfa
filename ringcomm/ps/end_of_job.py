"""The end of a job: training ends, clients leave, and servers serve until all have left."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import TYPE_CHECKING, Final

from ringcomm.engine.peers.drive_until import WaitInJob
from ringcomm.engine.progress.deadlines import refuse_hopeless
from ringcomm.errors import RingcommError, ServerLostError
from ringcomm.ps.client.json_requests import ask_leader, ask_servers, ignore
from ringcomm.ps.client.pauses import release
from ringcomm.ps.moment_numbers import moment_number
from ringcomm.ps.protocol.frames import FrameHeader, FrameKind, ServerOption

if TYPE_CHECKING:
    from ringcomm.engine.core.engine import Engine
    from ringcomm.ps.client.client import Client
    from ringcomm.ps.protocol.frame_dispatcher import FrameDispatcher

_log: Final = logging.getLogger("ringcomm")
_LABEL: Final = "leave"


class EndOfTraining:
    """Counts the calls of should_stop() on this rank, and knows which is the last. Any thread.

    See ringcomm.ps.control.commands.Stop.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0  # calls that have returned False
        self._last: int | None = None  # the number of the call that returns True
        self._is_asked = False

    def restart(self) -> None:
        """Count calls from 0, and forget ps.stop(): after ps.recover(), on all ranks."""
        with self._lock:
            self._count, self._last, self._is_asked = 0, None, False

    @property
    def n_calls(self) -> int:
        """Calls of should_stop() that have returned False."""
        return self._count

    @property
    def is_decided(self) -> bool:
        """False once ps.stop() was called, until it is known which call is the last."""
        return not self._is_asked or self._last is not None

    @property
    def ends(self) -> bool:
        return self._last is not None

    def is_begun(self) -> bool:
        """Let calls wait until it is decided which is the last; return True if they do already."""
        with self._lock:
            before, self._is_asked = self._is_asked, True
            return before

    def begin_at(self, n_calls: int) -> None:
        """Go on from where another worker is; on a newcomer."""
        with self._lock:
            self._count = n_calls

    def is_over(self) -> bool | None:
        """Count a call of should_stop(), and return what it returns; None: not known yet."""
        with self._lock:
            if self._is_asked and self._last is None:
                return None
            if self._last is not None and self._count + 1 >= self._last:
                return True
            self._count += 1
            return False

    def ask(self) -> int:
        """Let calls wait from now on; return how many have returned False."""
        with self._lock:
            self._is_asked = True
            return self._count

    def end_at(self, last: int) -> None:
        """Let the call of this number be the last; 0: the next one."""
        with self._lock:
            self._is_asked, self._last = True, last

    def give_up(self) -> None:
        """Let calls go on, unless it is known which is the last: nobody decides any more."""
        with self._lock:
            self._is_asked = self._last is not None


def rest(client: Client) -> None:
    """Report to the servers that this worker completes no more steps, but may go on to ask.

    What it has pushed need not be answered: that may take until another worker rests.

    Raises:
        CommTimeoutError: a server that it names has not answered within ps.init(deadline_s=).
        PeerFailedError: a rank died.
    """
    try:
        _settle(client)
        _say_gone(client, "rest", rests=True)
    finally:
        release(client, moment_number(client.rank))


def leave(client: Client) -> None:
    """Report to the servers that this rank asks nothing more, once nothing of it is under way.

    It does so in any case: else servers, and all ranks that wait for them, would wait for ever.

    Raises:
        CommTimeoutError: a server that it names has not answered within ps.init(deadline_s=).
        PeerFailedError: a rank died.
    """
    try:
        if client.loss is None:
            _settle(client)
    except ServerLostError:
        pass  # nothing of this rank is under way any more
    finally:
        _say_gone(client, _LABEL, rests=False)


def _say_gone(client: Client, label: str, *, rests: bool) -> None:
    """Report it to all servers; spares without a place do not answer, and may die meanwhile."""
    servers, layout = client.servers, client.layout
    option = ServerOption.REST if rests else ServerOption.LEAVE
    for number in {*range(len(layout.servers))} - layout.lost - {*servers}:
        header = FrameHeader(FrameKind.SERVER, origin=client.rank, option=option)
        client.link.send(layout.rank_of(number), header)
    ask_servers(client, label, FrameKind.SERVER, servers, ignore, option=option).wait()


def _settle(client: Client) -> None:
    """Return once no server returns a request of this rank.

    Rows must not move while some servers know that this rank has left, or rests, and others do not.
    So there is a pause of moves, which ends at the leader when the rank leaves or releases it. It
    begins at once, also before moves that wait: those may wait for a pause that lasts. It begins
    after all pushes have left: they may wait for those of a worker that waits for a move.
    """
    n_resent = -1
    client.wait_until_sent(_LABEL)
    ask_leader(
        client, _LABEL, "pause", number=moment_number(client.rank), patience_s=0
    ).wait()  # fmt: skip
    while n_resent != client.n_resent:  # returned requests must be there before LEAVE
        n_resent = client.n_resent
        ask_servers(
            client, _LABEL, FrameKind.SERVER, client.servers, ignore, option=ServerOption.SETTLE
        ).wait()
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
        PeerFailedError: a rank died without which the job cannot go on.
    """
    server = dispatcher.server
    assert server is not None
    wait = WaitInJob(label, engine)
    hopeless: list[RingcommError] = []
    began_at = time.monotonic()
    warn_at = began_at + warn_after_s

    def is_enough() -> bool:
        nonlocal warn_at
        try:
            refuse_hopeless(wait.now, engine.watch)
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
