"""The client of a rank: sends the requests of a call to servers, and waits for the replies.

A call of several requests sends all of them or none. What large requests may hold of the servers'
memory is bounded by credit: without credit, a call waits. Requests that wait for credit may be
overtaken by those for other tables.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ringcomm.engine.peers.drive_until import drive_until
from ringcomm.errors import RingcommError
from ringcomm.ps.client.future import Future
from ringcomm.ps.client.outstanding_requests import Outstanding
from ringcomm.ps.client.request import fill
from ringcomm.ps.client.wait_for_replies import Waits

if TYPE_CHECKING:
    from ringcomm.engine.core.engine import Engine
    from ringcomm.ps.client.push_outcome import AnyRequest, PlainPush
    from ringcomm.ps.client.request import Request
    from ringcomm.ps.placement.partition_places_and_moves import Partition
    from ringcomm.ps.protocol.link import Delivery, Link
    from ringcomm.ps.roles import Layout

R = TypeVar("R")
STALL_S: Final = 1.0  # without credit for that long, a push goes on in the background
ACK_NBYTES: Final = 256 << 10  # a push of more takes longer than this rank should stay awake
ACK_NS: Final = 100_000
LISTEN_S: Final = 0.05  # between looks of a rank that only reads


class Client:
    """Makes this rank's calls.

    Attributes:
        deadline_s: of each wait, in seconds.
        rank: of this rank in the job.
        layout: who is who.
        link: the wire.
        outstanding: requests that are not answered.
        waits: for servers.
        undecided: futures that show whether this worker is in a round of ps.FirstOf(k).
    """

    def __init__(self, engine: Engine, link: Link, layout: Layout, deadline_s: float) -> None:
        self._engine = engine
        self.layout = layout
        self.deadline_s = deadline_s
        self.rank = engine.job_rank
        self.link = link
        self.outstanding = Outstanding(engine, link, layout)
        self.waits = Waits(engine, layout, self)
        self.undecided: set[Future[Any]] = set()
        self._listened_at = 0.0
        self._acked = 0  # the last ack that was taken without driving

    @property
    def servers(self) -> tuple[int, ...]:
        return self.layout.server_numbers

    @property
    def leader(self) -> int:
        """The server that opens tables, and decides what moves."""
        return self.layout.leader

    def shares_memory(self, server: int) -> bool:
        return self.link.shares_memory(self.layout.rank_of(server))

    def owner(self, partition: Partition) -> int:
        return self.outstanding.owners.view.owner(partition)

    def idle_epoch(self, partition: Partition) -> int:
        """Return the epoch of a partition to which no request is under way; -1 if one is.

        Also -1 once a rank has died that the job needs: a request to the server then raises that.
        """
        peers = self._engine.watch.peers
        if peers.dead and peers.is_fatal:
            return -1
        return self.outstanding.idle_epoch(partition)

    def owing(self, future: Future[Any]) -> set[int]:
        return self.outstanding.owing(future)

    def timestamp(self) -> int:
        return self.outstanding.next_sequence()

    def listen(self) -> None:
        """Drive the loop now and then; for a rank that waits for nothing."""
        now = time.monotonic()
        if now - self._listened_at > LISTEN_S:
            self._listened_at = now
            self._engine.nudge()

    # --- calls ----------------------------------------------------------------------------------
    def call(self, label: str, requests: Sequence[Request], finish: Callable[[], R]) -> Future[R]:
        """Send requests; return a future of what finish() returns once all are answered.

        Raises:
            CommTimeoutError, RingcommError: see send().
        """
        future = Future(self, label, len(requests), finish)
        self.send(requests, future)
        return future

    def call_one(self, label: str, request: Request, read: Callable[[Delivery], R]) -> Future[R]:
        results: list[R] = []
        request.on_reply = lambda reply: results.append(read(reply))
        return self.call(label, [request], lambda: results[0])

    def gather(
        self, label: str, requests: Sequence[Request], read: Callable[[Delivery], R]
    ) -> Future[list[R]]:
        """Send requests; return a future of read(reply) of each, in their order.

        Raises:
            CommTimeoutError, RingcommError: see send().
        """
        results: dict[int, R] = {}

        def take(place: int, reply: Delivery) -> None:
            results[place] = read(reply)

        for place, request in enumerate(requests):
            request.on_reply = partial(take, place)
        return self.call(label, requests, lambda: [results[place] for place in sorted(results)])

    def send(
        self,
        requests: Sequence[Request],
        future: Future[Any],
        *,
        is_admitted: bool = False,
        before_wait: Callable[[], object] | None = None,
    ) -> None:
        """Send requests, whose replies complete `future`: all of them, or none.

        Without credit this waits: for the first request, and while some of the others leave. If
        none leaves within STALL_S, or the deadline, the rest leaves when credit comes back, perhaps
        after pushes to other tables; the future's wait() raises a timeout. A callback cannot wait:
        there the rest is left to the background at once.

        Args:
            requests: in the order in which they are to leave.
            future: of all of them.
            is_admitted: admit() has returned.
            before_wait: called before a wait for credit: it may bring some back.

        Raises:
            CommTimeoutError: there was no credit for the first; nothing was sent.
            RingcommError: likewise, in a callback.
        """
        self._engine.state.require_usable()
        for request in requests:
            self.outstanding.assign(request, future)
        if not requests:
            return
        if not is_admitted:
            self._await_credit(requests[0], future.label, before_wait)
        self.outstanding.add(requests)
        if any(request.source is not None for request in requests):
            fill(requests, lambda: self.flush(always=True))
        if self.outstanding.has_unsent:
            if before_wait is not None:
                before_wait()
            if not self._engine.progress.is_own_turn:
                self._await_departure(future)
        self.flush()

    def admit(
        self, first: Request, label: str, before_wait: Callable[[], object] | None = None
    ) -> None:
        """Return once there is credit for the first request of a call, which send() sends then.

        For a caller that cannot take back what it does to make requests.

        Raises:
            CommTimeoutError: there is none.
        """
        self._engine.state.require_usable()
        self._await_credit(first, label, before_wait)

    def push(self, push: PlainPush) -> None:
        self._engine.state.require_usable()
        while not self.outstanding.submit_if_it_may(push):
            self._await_credit(push, push.label)
        self.flush()

    def reserve(
        self, requests: Sequence[Request], future: Future[Any], *, needs_credit: bool
    ) -> None:
        """Return once Outstanding.submit() may send requests: if need be, wait for credit."""
        self._engine.state.require_usable()
        for request in requests:
            self.outstanding.assign(request, future)
            if needs_credit:
                self._await_credit(request, future.label)

    def send_control(self, requests: Sequence[Request], future: Future[Any]) -> None:
        """Send requests without a body behind all earlier ones to their partitions.

        They need no credit, for requests that wait for them may hold it all. Any thread; waits for
        nothing.
        """
        self.outstanding.add_control(requests, future)
        self.flush()

    def flush(self, *, always: bool = False) -> None:
        """Make requests that were submitted leave soon; always: let the loop advance anyhow."""
        if always or self.link.waits_to_leave:
            self._engine.nudge()

    # --- waiting --------------------------------------------------------------------------------
    def _await_credit(
        self, request: AnyRequest, label: str, before_wait: Callable[[], object] | None = None
    ) -> None:
        """Return once a call may begin with this request."""
        if self.outstanding.may_begin(request):
            return
        if before_wait is not None:
            before_wait()
        if self._engine.progress.is_own_turn:
            raise RingcommError(
                f"{label}: server {request.server} takes no more until it has answered what is "
                "under way, and a callback of then() cannot wait for that; nothing was sent. Call "
                "it where the program waits for its futures"
            )
        self.wait_until(
            lambda: self.outstanding.may_begin(request), label, lambda: (request.server,)
        )

    def _await_departure(self, future: Future[Any]) -> None:
        """Return once all requests of a call have left, or none has for so long; see send()."""
        limit_s = min(STALL_S, self.deadline_s)
        n = self.outstanding.n_unsent(future)
        while n and self.drive_until(
            lambda before=n: self.outstanding.n_unsent(future) < before,  # type: ignore[misc]
            future.label,
            limit_s,
        ):
            n = self.outstanding.n_unsent(future)

    def wait_for(self, future: Future[Any], timeout_s: float | None) -> None:
        """Drive until a future is done.

        Raises:
            CommTimeoutError: it is not, by then.
            PeerFailedError: a rank died.
            NotInitializedError: this process is a child of the rank, which gets the replies.
        """
        if not self._engine.state.is_usable:
            self._engine.state.require_own_process()
        limit_s = self.deadline_s if timeout_s is None else timeout_s
        if future.acked_by and limit_s > ACK_NS / 1e9 and self._is_acked(future):
            return
        if limit_s == timeout_s == math.inf:  # to wait long is what the caller means
            drive_until(self._engine, future.done, future.label, limit_s)
            return
        self.wait_until(future.done, future.label, future.unanswered, limit_s)

    def _is_acked(self, future: Future[Any]) -> bool:
        """Look for the ack of a small push, and nothing else, for a moment: most come so soon."""
        sequence = future.acked_by
        request = self.outstanding.requests.get(sequence)
        if request is None or request.body.nbytes > ACK_NBYTES:
            return future.done()
        dest = self.layout.rank_of(request.server)
        clock = self.link.await_ack(dest, sequence, ACK_NS, self._acked)  # an interrupt loses none
        if clock >= 0:
            try:
                self.outstanding.on_ack(sequence, clock)
            except BaseException as error:  # an interrupt half-way, which nothing can mend
                self._engine.completion.break_engine(error)
                raise
            self._acked = sequence
            self.listen()
        return future.done()

    def wait_until_sent(self, label: str) -> None:
        outstanding = self.outstanding
        if outstanding.has_unsent:
            self.wait_until(lambda: not outstanding.has_unsent, label, outstanding.busy)

    def wait_until_settled(self, label: str) -> None:
        """Drive until no request waits for credit or for a round, and no server returns one."""
        outstanding = self.outstanding
        is_settled = lambda: outstanding.is_settled and not self.undecided  # noqa: E731
        self.wait_until(is_settled, label, outstanding.busy)

    def drive_until(self, is_over: Callable[[], bool], label: str, timeout_s: float | None) -> bool:
        """Return True once it is over, False if that takes longer than timeout_s; None: deadline_s.

        Raises:
            PeerFailedError: a rank died.
        """
        limit_s = self.deadline_s if timeout_s is None else timeout_s
        return drive_until(self._engine, is_over, label, limit_s)

    def wait_until(
        self,
        is_over: Callable[[], bool],
        label: str,
        servers: Callable[[], Iterable[int]],
        limit_s: float | None = None,
    ) -> None:
        """Drive until it is over; see wait_for().

        Args:
            is_over: looks.
            label: of the call.
            servers: returns those that have not answered.
            limit_s: see below.

        Raises:
            CommTimeoutError: it is not within limit_s (None: deadline_s); names the servers.
        """
        limit_s = self.deadline_s if limit_s is None else limit_s
        self.waits.until(is_over, label, servers, limit_s)
