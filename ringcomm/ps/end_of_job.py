"""The end of a job: training ends, clients leave, and servers serve until all have left."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Final

from ringcomm.engine.peers.drive_until import WaitInJob
from ringcomm.engine.progress.deadlines import refuse_hopeless
from ringcomm.errors import RingcommError, ServerLostError
from ringcomm.ps.client.json_requests import ask_servers, ignore
from ringcomm.ps.protocol.frame_meta import packed_json
from ringcomm.ps.protocol.frames import FrameHeader, FrameKind, Pausing, StepOption, Stop
from ringcomm.ps.snapshot_numbers_and_phases import PAUSE, RELEASE, moment_number

if TYPE_CHECKING:
    from ringcomm.engine.core.engine import Engine
    from ringcomm.ps.client.client import Client
    from ringcomm.ps.protocol.frame_dispatcher import FrameDispatcher

_log: Final = logging.getLogger("ringcomm")
_LABEL: Final = "leave"


class EndOfTraining:
    """Decides at which call of should_stop() training is over, on this rank. Any thread.

    Where workers must push in each round, one that ended a step earlier would leave the others
    waiting. So the chief asks all workers how many calls have returned False, and the next call
    after the largest number is the last one on each of them. A call in between waits.

    | event | chief | worker |
    |---|---|---|
    | ps.stop() | ASK to all workers; or NOW, if no step needs all | |
    | ASK | | COUNT to the chief; calls wait from now on |
    | COUNT of all who live | AT to all workers; calls go on | |
    | AT, NOW | | calls go on |
    | the chief died | | what is known to its heir, by succeed(): COUNT, AT or NOW |
    | COUNT, AT or NOW to the heir | ASK, AT or NOW to all, as if ps.stop() had asked it | |

    Args:
        me: this rank.
        send: sends a frame of FrameKind.STOP: to whom, its option and its clock.
    """

    def __init__(self, me: int, send: Callable[[int, Stop, int], object]) -> None:
        self._me, self._send = me, send
        self._lock = threading.Lock()
        self._count = 0  # calls that have returned False
        self._last: int | None = None  # the number of the call that returns True
        self._is_asked = False
        self._counts: dict[int, int] = {}  # of workers, for the chief
        self._workers: tuple[int, ...] = ()
        self._heirs: tuple[Collection[int], Collection[int]] | None = None  # this rank is the chief

    def restart(self) -> None:
        """Count calls from 0, and forget ps.stop(): after ps.recover(), on all ranks."""
        with self._lock:
            self._count, self._last, self._is_asked = 0, None, False
            self._counts, self._workers = {}, ()

    @property
    def n_calls(self) -> int:
        """Calls of should_stop() that have returned False."""
        return self._count

    def begin_at(self, n_calls: int) -> None:
        """Go on from where another worker is; on a newcomer."""
        with self._lock:
            self._count = n_calls

    def include(self, rank: int, *, is_worker: bool) -> None:
        """Let a rank know of the end that has begun, if it has; on the chief, once it joins."""
        with self._lock:
            if not self._is_asked:
                return
            last = self._last
            if last is None and is_worker:
                self._workers = (*self._workers, rank)
        if last is None and is_worker:
            self._send(rank, Stop.ASK, 0)
        else:
            at = last if is_worker else None  # an evaluator ends at once
            self._send(rank, Stop.AT if at else Stop.NOW, at or 0)

    def is_over(self) -> bool | None:
        """Count a call of should_stop(), and return what it returns; None: not known yet."""
        with self._lock:
            if self._is_asked and self._last is None:
                return None
            if self._last is not None and self._count + 1 >= self._last:
                return True
            self._count += 1
            return False

    @property
    def is_decided(self) -> bool:
        return not self._is_asked or self._last is not None

    def begin(
        self, workers: Collection[int], evaluators: Collection[int], *, by_count: bool
    ) -> None:
        """End training; on the chief, once.

        Args:
            workers: ranks of the job.
            evaluators: likewise; for them it is over at once.
            by_count: all workers end after the same number of calls.
        """
        with self._lock:
            if self._is_asked:
                return
        self._begin(workers, evaluators, by_count=by_count)

    def _begin(
        self, workers: Collection[int], evaluators: Collection[int], *, by_count: bool
    ) -> None:
        with self._lock:
            self._is_asked = True
            self._workers = tuple(workers)
            self._counts[self._me] = self._count
            if not by_count:
                self._last = 0
        for rank in {*workers, *evaluators} - {self._me}:
            is_asked = by_count and rank in self._workers
            self._send(rank, Stop.ASK if is_asked else Stop.NOW, 0)
        self.decide(())

    def succeed(self, chief: int, workers: Collection[int], evaluators: Collection[int]) -> None:
        """Take note that the chief died, in the midst of ps.stop() perhaps.

        Args:
            chief: the worker that follows it.
            workers: that live.
            evaluators: likewise.
        """
        if chief == self._me:
            self._heirs = workers, evaluators
            if self._is_asked or self._counts:
                self._go_on_as_chief()
        elif self._is_asked:
            self._say_what_is_known(chief)

    def _go_on_as_chief(self) -> None:
        assert self._heirs is not None
        workers, evaluators = self._heirs
        if self._last is None:
            self._begin(workers, evaluators, by_count=True)
            return
        for rank in {*workers, *evaluators} - {self._me}:
            is_told = self._last and rank in workers
            self._send(rank, Stop.AT if is_told else Stop.NOW, self._last if is_told else 0)

    def _say_what_is_known(self, chief: int) -> None:
        with self._lock:
            last, count = self._last, self._count
        if last is None:
            self._send(chief, Stop.COUNT, count)
        else:
            self._send(chief, Stop.AT if last else Stop.NOW, last)

    def on_frame(self, source: int, option: int, clock: int) -> None:
        if option == Stop.COUNT:
            self._counts[source] = clock
            if self._heirs is not None and not self._workers:
                self._go_on_as_chief()
            self.decide(())
            return
        with self._lock:
            self._is_asked, was_known = True, self._last is not None
            if option == Stop.NOW:
                self._last = 0
            elif option == Stop.AT:
                self._last = clock
        if option == Stop.ASK:
            self._say_what_is_known(source)
        elif self._heirs is not None and not was_known:
            self._go_on_as_chief()

    def undecided(self, gone: Collection[int]) -> list[int]:
        return [rank for rank in self._workers if rank not in self._counts and rank not in gone]

    def decide(self, gone: Collection[int]) -> None:
        """Decide once all workers have answered that are not gone; on the chief."""
        with self._lock:
            if self._last is not None or not self._workers or self.undecided(gone):
                return
            self._last = last = max(self._counts.values()) + 1
        for rank in {*self._workers} - {self._me, *gone}:
            self._send(rank, Stop.AT, last)


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
        _ask_leader(client, {"do": RELEASE, "id": moment_number(client.rank), "moves": True})


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
    for number in {*range(len(layout.servers))} - layout.lost - {*servers}:
        header = FrameHeader(FrameKind.LEAVE, origin=client.rank, option=int(rests))
        client.link.send(layout.rank_of(number), header)
    ask_servers(client, label, FrameKind.LEAVE, servers, ignore, option=int(rests)).wait()


def _settle(client: Client) -> None:
    """Return once no server returns a request of this rank.

    Rows must not move while some servers know that this rank has left, or rests, and others do not.
    So there is a pause of moves, which ends at the leader when the rank leaves or releases it. It
    begins at once, also before moves that wait: those may wait for a pause that lasts. It begins
    after all pushes have left: they may wait for those of a worker that waits for a move.
    """
    n_resent = -1
    client.wait_until_sent(_LABEL)
    _ask_leader(client, {"do": PAUSE, "id": moment_number(client.rank), "patience_s": 0})
    while n_resent != client.n_resent:  # returned requests must be there before LEAVE
        n_resent = client.n_resent
        ask_servers(
            client, _LABEL, FrameKind.MOVE, client.servers, ignore, option=StepOption.SETTLE
        ).wait()
        client.wait_until_settled(_LABEL)


def _ask_leader(client: Client, question: dict[str, Any]) -> None:
    meta = packed_json(question)
    ask_servers(
        client, _LABEL, FrameKind.SNAPSHOT, [client.leader], ignore, option=Pausing.ENDS, meta=meta
    ).wait()


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
