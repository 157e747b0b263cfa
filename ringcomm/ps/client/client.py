"""The client of a rank: sends requests to servers, takes the replies, and waits for them.

A call of several requests sends all of them or none. What large requests may hold of the servers'
memory is bounded by credit: without credit, a call waits. Requests that wait for credit may be
overtaken by those for other tables. Requests of one rank to one server are answered in any order,
but carried out in the order in which they were sent.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from ringcomm.engine.peers.drive_until import drive_until
from ringcomm.errors import RingcommError
from ringcomm.ps.client.future import Future
from ringcomm.ps.client.request import NO_BODY, AnyRequest, Request, fill
from ringcomm.ps.client.request_order import Credit, PartitionOwners, SendQueue
from ringcomm.ps.client.waits import Waits
from ringcomm.ps.protocol.frames import (
    FilesOption,
    FrameHeader,
    FrameKind,
    NewsOption,
    RequestHeader,
    ServerOption,
    Status,
    header_of_request,
)
from ringcomm.ps.protocol.link import Delivery
from ringcomm.ps.protocol.remote_errors import error_of

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.engine.core.engine import Engine
    from ringcomm.ps.client.request import PlainPush
    from ringcomm.ps.placement.partitions import Partition
    from ringcomm.ps.protocol.link import Link
    from ringcomm.ps.protocol.lost_server import Loss
    from ringcomm.ps.roles import Layout

R = TypeVar("R")
STALL_S: Final = 1.0  # without credit for that long, a push goes on in the background
ACK_NBYTES: Final = 256 << 10  # a push of more takes longer than this rank should stay awake
ACK_NS: Final = 100_000
LISTEN_S: Final = 0.05  # between looks of a rank that only reads

_OF_NO_TABLE: Final = frozenset((FrameKind.SERVER, FrameKind.TICK))


def _tells(request: AnyRequest) -> bool:
    """Return True for a request that a server answers at once, whether it has tables or not."""
    waits = ServerOption.SETTLE if request.kind == FrameKind.SERVER else 1
    return request.kind in _OF_NO_TABLE and request.option != waits


def _goes_on(request: AnyRequest) -> bool:
    """Return True for a request that a server which lives answers, although another died."""
    is_save = request.kind == FrameKind.FILES and request.option == FilesOption.SAVE
    return is_save or _tells(request)


def _require_answerable(request: AnyRequest, loss: Loss, lost: Collection[int]) -> None:
    """Raise the loss if servers that begin anew would leave a request without a reply."""
    needs_tables = request.kind != FrameKind.ASK or request.option == 1
    is_allowed = _tells(request) or not needs_tables
    if not is_allowed or request.server in lost:
        raise loss.error(request.future.label)


class RowMoves(Protocol):
    """Follows the moves of one hash table's rows."""

    @property
    def is_settled(self) -> bool:
        """True if no server returns a request that is under way."""

    def on_notice(self, delivery: Delivery) -> None: ...


class Client:
    """Makes this rank's calls.

    Any thread may make them; the loop, whoever drives it, hands over what arrives.

    Attributes:
        deadline_s: of each wait, in seconds.
        rank: of this rank in the job.
        layout: who is who.
        link: the wire.
        waits: for servers.
        undecided: futures that show whether this worker is in a round of ps.FirstOf(k).
        lock: of all below; a single look at row_moves, requests, loss or owners.view needs none.
        owners: the servers of partitions.
        credit: bounds what is under way.
        send_queue: requests that wait for credit.
        requests: that are not answered, by sequence number.
        row_moves: of hash tables, by number.
        n_resent: how often a request, or a call to a hash table, went to another server than first.
        loss: a server that died, with a part of the tables; None: each table is whole.
    """

    def __init__(self, engine: Engine, link: Link, layout: Layout, deadline_s: float) -> None:
        self._engine = engine
        self.layout = layout
        self.deadline_s = deadline_s
        self.rank = engine.job_rank
        self.link = link
        self.waits = Waits(engine, layout, self)
        self.undecided: set[Future[Any]] = set()
        self._listened_at = 0.0
        self._acked = 0  # the last ack that was taken without driving
        self._sequence = itertools.count(1)
        self._turns = itertools.count(1)
        self.lock = threading.Lock()
        self.owners = PartitionOwners()
        self.credit = Credit()
        self.send_queue: SendQueue[Request] = SendQueue(self.credit.allows)
        self.requests: dict[int, AnyRequest] = {}
        self.row_moves: dict[int, RowMoves] = {}
        self.n_resent = 0
        self.loss: Loss | None = None

    @property
    def servers(self) -> tuple[int, ...]:
        return self.layout.server_numbers

    @property
    def leader(self) -> int:
        """The server that opens tables, and decides what moves."""
        return self.layout.leader

    @property
    def n_losses(self) -> int:
        return self.layout.n_losses

    def shares_memory(self, server: int) -> bool:
        return self.link.shares_memory(self.layout.rank_of(server))

    def owner(self, partition: Partition) -> int:
        return self.owners.view.owner(partition)

    def timestamp(self) -> int:
        return next(self._sequence)

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
            self.assign(request, future)
        if not requests:
            return
        if not is_admitted:
            self._await_credit(requests[0], future.label, before_wait)
        with self.lock:
            if self.loss is not None:
                _require_answerable(requests[0], self.loss, self.layout.lost)
            for request in requests:  # nothing can go wrong any more: rounds are counted
                if request.clock_of is not None:
                    request.clock = request.clock_of()
                request.turn = next(self._turns)
                if self._may_leave(request):
                    self._submit(request)
                else:
                    self.send_queue.add(request)
        if any(request.source is not None for request in requests):
            fill(requests, lambda: self.flush(always=True))
        if self.has_unsent:
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
        while True:
            with self.lock:
                if self._may_begin(push):
                    self._submit(push)
                    break
            self._await_credit(push, push.label)
        self.flush()

    def reserve(
        self, requests: Sequence[Request], future: Future[Any], *, needs_credit: bool
    ) -> None:
        """Return once submit() may send requests: if need be, wait for credit."""
        self._engine.state.require_usable()
        for request in requests:
            self.assign(request, future)
            if needs_credit:
                self._await_credit(request, future.label)

    def send_control(self, requests: Sequence[Request], future: Future[Any]) -> None:
        """Send requests without a body behind all earlier ones to their partitions.

        They need no credit, for requests that wait for them may hold it all. Any thread; waits for
        nothing.
        """
        with self.lock:
            for request in requests:
                self.assign(request, future)
                if self.send_queue.n_waiting and self.send_queue.has(request.partition):
                    self.send_queue.add_behind(request)
                else:
                    self._submit(request)
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
        if self.may_begin(request):
            return
        if before_wait is not None:
            before_wait()
        if self._engine.progress.is_own_turn:
            raise RingcommError(
                f"{label}: server {request.server} takes no more until it has answered what is "
                "under way, and a callback of then() cannot wait for that; nothing was sent. Call "
                "it where the program waits for its futures"
            )
        self.wait_until(lambda: self.may_begin(request), label, lambda: (request.server,))

    def _await_departure(self, future: Future[Any]) -> None:
        """Return once all requests of a call have left, or none has for so long; see send()."""
        limit_s = min(STALL_S, self.deadline_s)
        n = self.n_unsent(future)
        while n and self.drive_until(
            lambda before=n: self.n_unsent(future) < before,  # type: ignore[misc]
            future.label,
            limit_s,
        ):
            n = self.n_unsent(future)

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
        request = self.requests.get(sequence)
        if request is None or request.body.nbytes > ACK_NBYTES:
            return future.done()
        dest = self.layout.rank_of(request.server)
        clock = self.link.await_ack(dest, sequence, ACK_NS, self._acked)  # an interrupt loses none
        if clock >= 0:
            try:
                self.on_ack(sequence, clock)
            except BaseException as error:  # an interrupt half-way, which nothing can mend
                self._engine.completion.break_engine(error)
                raise
            self._acked = sequence
            self.listen()
        return future.done()

    def wait_until_sent(self, label: str) -> None:
        if self.has_unsent:
            self.wait_until(lambda: not self.has_unsent, label, self.busy)

    def wait_until_settled(self, label: str) -> None:
        """Drive until no request waits for credit or for a round, and no server returns one."""
        is_settled = lambda: self.is_settled and not self.undecided  # noqa: E731
        self.wait_until(is_settled, label, self.busy)

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

    # --- what is under way ------------------------------------------------------------------------
    @property
    def is_settled(self) -> bool:
        with self.lock:
            is_settled = not self.send_queue.n_waiting and self.owners.is_settled
        return is_settled and all(each.is_settled for each in [*self.row_moves.values()])

    def add_table(self, number: int, owners: list[int], epochs: Mapping[int, int]) -> None:
        with self.lock:
            self.owners.add_table(number, owners, epochs)

    def has_requests_of(self, table: int) -> bool:
        with self.lock:
            return self.send_queue.has_table(table) or any(
                each.table == table for each in self.requests.values()
            )

    def forget_table(self, number: int) -> None:
        with self.lock:
            self.owners.forget_table(number)
            self.row_moves.pop(number, None)

    def lose(self, loss: Loss) -> None:
        """Fail what is under way for tables, or for a server that died; called in the loop.

        What tells a dead server something is done.
        """
        failed: dict[Future[Any], None] = {}
        said: list[AnyRequest] = []
        with self.lock:
            self.loss = loss
            for sequence, request in [*self.requests.items()]:
                is_dead = request.server == loss.server
                if not is_dead and _goes_on(request):
                    continue
                del self.requests[sequence]
                self.credit.count(request, -1)
                if _tells(request):
                    said.append(request)
                else:
                    failed[request.future] = None
            failed.update((request.future, None) for request in self.send_queue.take_all())
            self.owners.lose()
            self.row_moves.clear()
        for request in said:
            request.future.replied()
        for future in failed:
            future.fail(loss.error(future.label))

    def owing(self, future: Future[Any]) -> set[int]:
        """Return the servers that have not answered requests of a future, or take them later."""
        with self.lock:
            for each in self.send_queue.of(future):
                self._find_server(each)
            waiting = {each.server for each in self.send_queue.of(future)}
            return waiting | {x.server for x in self.requests.values() if x.future is future}

    def busy(self) -> set[int]:
        with self.lock:
            return self.credit.busy()

    @property
    def has_unsent(self) -> bool:
        with self.lock:
            return bool(self.send_queue.n_waiting)

    def n_unsent(self, future: Future[Any]) -> int:
        with self.lock:
            return self.send_queue.n_of(future)

    def idle_epoch(self, partition: Partition) -> int:
        """Return the epoch of a partition to which no request is under way; -1 if one is.

        Also -1 once a rank has died that the job needs: a request to the server then raises that.
        """
        peers = self._engine.watch.peers
        if peers.dead and peers.is_fatal:
            return -1
        with self.lock:
            order = self.owners.orders[partition]
            return -1 if self.send_queue.has(partition) or not order.is_empty else order.epoch

    def assign(self, request: Request, future: Future[Any]) -> None:
        request.future = future
        loss = self.loss
        if loss is not None:
            _require_answerable(request, loss, self.layout.lost)
        self._find_server(request)

    def _find_server(self, request: AnyRequest) -> None:
        if request.partition is not None:
            request.server = self.owners.view.owner(request.partition)

    def may_begin(self, request: AnyRequest) -> bool:
        """Return True if a new call may begin with a request; one push per table may wait."""
        with self.lock:
            return self._may_begin(request)

    def _may_begin(self, request: AnyRequest) -> bool:
        if request.partition in self.owners.orders:  # it may have moved during a wait for credit
            self._find_server(request)
        if not self.send_queue.n_waiting:
            return self.credit.allows(request)
        is_second = request.kind == FrameKind.PUSH and self.send_queue.has_table(request.table)
        return not is_second and self._may_leave(request)

    def _may_leave(self, request: AnyRequest) -> bool:
        is_behind = self.send_queue.n_waiting and self.send_queue.has(request.partition)
        return not is_behind and self.credit.allows(request)

    def adopt(self, sequence: int, request: Request, future: Future[Any]) -> None:
        """Await the reply to a request that a server has got within another one."""
        with self.lock:
            self.assign(request, future)
            self.requests[sequence] = request
            self.credit.count(request, 1)

    def submit(self, requests: Sequence[AnyRequest]) -> None:
        """Send requests that have credit, one right behind the other."""
        with self.lock:
            for request in requests:
                self._submit(request)

    def _submit(self, request: AnyRequest) -> None:
        """Send a new request, or keep it while its partition moves; with the lock."""
        if self.loss is not None:
            _require_answerable(request, self.loss, self.layout.lost)
        sequence, order = next(self._sequence), None
        if request.partition is not None:
            self._find_server(request)
            order = self.owners.orders[request.partition]
        self.requests[sequence] = request
        self.credit.count(request, 1)
        if request.on_ack is not None:
            request.future.acked_by = sequence
        if order is None or order.add(sequence):
            self._send(request, sequence, request.epoch if order is None else order.epoch)

    def _send(self, request: AnyRequest, sequence: int, epoch: int) -> None:
        part = 0 if request.partition is None else request.partition[1]
        header = (
            request.kind, epoch, self.rank, sequence, request.table, part, request.clock,
            request.option, request.place,
        )  # fmt: skip
        home, layout = request.server, self.layout
        if request.source is None and home not in layout.hosts:
            self.link.ask(layout.servers[home], header, request.meta, request.body)
        else:
            _send_once_filled(request, header, layout, self.link)

    def take_over(self, home: int) -> None:
        """Send again what a home has not answered, which runs elsewhere now; called in the loop."""
        rank = self.layout.rank_of(home)
        with self.lock:
            for sequence, request in sorted(self.requests.items()):
                order = self.owners.orders.get(request.partition or (-1, -1))
                epoch = request.epoch if order is None else order.sent_in(sequence)
                if request.server == home and epoch is not None:  # else its partition moves
                    request.body = reachable(request.body, rank, self._engine, self.link)
                    self._send(request, sequence, epoch)
                    self.n_resent += 1
            for move in [*self.owners.confirmed.items()]:  # behind what came back from these
                self._confirm_move(*move, (home,))

    # --- replies --------------------------------------------------------------------------------
    def place_for(self, header: FrameHeader) -> Bytes | None:
        """Return memory for the body of a reply that comes as a message; None: any memory."""
        request = self.requests.get(header.sequence)
        out = None if request is None else request.out
        return out if out is not None and out.nbytes == header.n_body else None

    def on_ack(self, sequence: int, clock: int) -> None:
        """Take a good reply that has only a clock; called in the loop."""
        with self.lock:
            request = self.requests.get(sequence)
            if request is None:
                return  # it was given up
            is_plain = request.on_ack is not None and request.on_end is None
            if is_plain:
                self._remove(request, sequence)
        if is_plain:
            assert request.on_ack is not None
            request.on_ack(clock)
            request.future.replied()
            return
        rank = self.layout.rank_of(request.server)
        header = FrameHeader(
            FrameKind.REPLY,
            origin=rank,
            sequence=sequence,
            table=request.table,
            partition=0 if request.partition is None else request.partition[1],
            clock=clock,
        )
        self.on_reply(Delivery(rank, header, b"", NO_BODY))

    def on_reply(self, reply: Delivery) -> None:
        """Take a reply; called in the loop."""
        header = reply.header
        with self.lock:
            request = self.requests.get(header.sequence)
            if request is None:
                return  # it was given up
            is_returned = header.status == Status.WRONG_VIEW
            if is_returned and request.on_end is None:
                assert request.partition is not None
                if header.view != self.owners.orders[request.partition].sent_in(header.sequence):
                    return  # two copies of a server have returned it, and it was sent again
                due = self.owners.returned(request.partition, header.sequence, reply.meta)
                self._send_again(request.partition, due)
                self._confirm_moves()
                return
            self._remove(request, header.sequence)
        if request.on_end is not None:
            request.on_end(reply)
            request.on_end = None  # it refers to the request: both would wait for the collector
        if is_returned:
            return
        if header.status not in (Status.OK, Status.LATE):
            future, server = request.future, self._engine.transport.label(reply.source)
            future.fail(error_of(reply.meta, future.label, server))
            return
        again = request.take(reply)
        if again is None:
            request.future.replied()
            return
        again.future, again.server = request.future, request.server
        self.submit([again])

    def _remove(self, request: AnyRequest, sequence: int) -> None:
        """Remove a request that was answered, and send those that waited for that."""
        del self.requests[sequence]
        self.credit.count(request, -1)
        if request.partition is not None:
            due = self.owners.orders[request.partition].answered(sequence)
            if due:
                self._send_again(request.partition, due)
            if self.owners.notices:
                self._confirm_moves()
        if self.send_queue.n_waiting:
            for each in self.send_queue.due():
                self._submit(each)

    # --- partitions that move -------------------------------------------------------------------
    def on_notice(self, notice: Delivery) -> None:
        """Partitions have moved; called in the loop."""
        partition = notice.header.table, notice.header.partition
        rows = self.row_moves.get(partition[0])
        if rows is not None:
            rows.on_notice(notice)
            return
        with self.lock:
            due = self.owners.note_move(partition, notice.meta, notice.header.clock)
            self._send_again(partition, due)
            self._confirm_moves()

    def confirm_move(self, partition: Partition, epoch: int) -> None:
        """Report to servers that no request is under way that was made in an older view."""
        with self.lock:
            self._confirm_move(partition, epoch)

    def _confirm_move(
        self, partition: Partition, epoch: int, servers: Collection[int] | None = None
    ) -> None:
        header = FrameHeader(
            FrameKind.NEWS, origin=self.rank, table=partition[0], partition=partition[1],
            clock=epoch, option=NewsOption.NOTED,
        )  # fmt: skip
        self.owners.confirmed[partition] = epoch
        layout = self.layout
        for home in layout.server_numbers if servers is None else servers:
            self.say(home, header)

    def say(self, home: int, header: FrameHeader, meta: bytes = b"") -> None:
        """Send a frame that gets no reply to a home, wherever it runs; called in the loop."""
        self.link.send(self.layout.rank_of(home), header._replace(home=home + 1), meta)

    def _confirm_moves(self) -> None:
        for partition, epoch in self.owners.take_confirmed():
            self._confirm_move(partition, epoch)

    def _send_again(self, partition: Partition, sequences: Sequence[int]) -> None:
        """Send requests that were kept, or returned, to the present owner."""
        for sequence in sequences:
            request = self.requests[sequence]
            self.n_resent += 1
            self.credit.count(request, -1)
            self._find_server(request)
            self.credit.count(request, 1)
            rank = self.layout.rank_of(request.server)
            request.body = reachable(request.body, rank, self._engine, self.link)
            self._send(request, sequence, self.owners.orders[partition].epoch)


def _send_once_filled(
    request: AnyRequest, header: RequestHeader, layout: Layout, link: Link
) -> None:
    home = request.server
    full = header_of_request(header, home + 1 if home in layout.hosts else 0)
    dest, is_filled = layout.rank_of(home), lambda: request.source is None
    link.send(dest, full, request.meta, request.body, is_filled=is_filled)


def reachable(body: Bytes, rank: int, engine: Engine, link: Link) -> Bytes:
    """Return a body that was meant for another server where the server at a rank can read it."""
    if not body.nbytes or link.holds(body) or not link.shares_memory(rank):
        return body
    memory = engine.shared_memory(body.nbytes)
    assert memory is not None
    memory[:] = body
    return memory
