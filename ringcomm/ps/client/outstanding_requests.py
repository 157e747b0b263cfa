"""Sends a rank's requests, matches replies with them, and sends again what a server returns.

Requests of one rank to one server are answered in any order, but carried out in the order in which
they were sent.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from ringcomm.ps.client.push_outcome import AnyRequest, table_of
from ringcomm.ps.client.request import NO_BODY, Request
from ringcomm.ps.client.request_order import RequestOrder
from ringcomm.ps.placement.partition_places_and_moves import Partition, PlacementView
from ringcomm.ps.protocol.frame_meta import owners_of
from ringcomm.ps.protocol.frames import (
    FrameHeader,
    FrameKind,
    Pausing,
    RequestHeader,
    Status,
    StepOption,
    header_of_request,
)
from ringcomm.ps.protocol.link import Delivery
from ringcomm.ps.protocol.remote_errors import error_of

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.engine.core.engine import Engine
    from ringcomm.ps.client.future import Future
    from ringcomm.ps.protocol.link import Link
    from ringcomm.ps.protocol.lost_server import Loss
    from ringcomm.ps.roles import Layout


# --- owners of partitions -------------------------------------------------------------------------
class PartitionOwners:
    """The view of this rank, and the order of its requests to each partition.

    Attributes:
        view: the owners of partitions.
        orders: of this rank's requests, by partition.
        notices: moves that servers have announced, by partition and epoch, to be confirmed.
        confirmed: the last move that was, by partition; of a hash table by 0.
    """

    def __init__(self) -> None:
        self.view = PlacementView()
        self.orders: dict[Partition, RequestOrder] = {}
        self.notices: list[tuple[Partition, int]] = []
        self.confirmed: dict[Partition, int] = {}

    def add_table(self, number: int, owners: list[int], epochs: Mapping[int, int]) -> None:
        """Learn the owners of a table's partitions.

        Args:
            number: of the table.
            owners: by partition.
            epochs: of partitions that have moved.
        """
        changes = {}
        for part, owner in enumerate(owners):
            partition, epoch = (number, part), epochs.get(part, 0)
            order = self.orders.get(partition)
            if order is None:
                self.orders[partition] = RequestOrder(epoch)
            elif epoch <= order.epoch:
                continue
            else:  # the server before returns what was sent to it
                order.moved(epoch)
            changes[partition] = (owner,)
        self.view = self.view.with_(changes)

    def forget_table(self, number: int) -> None:
        """Know a table no more, to which no request is under way."""
        for partition in [each for each in self.orders if each[0] == number]:
            del self.orders[partition]
        for partition in [each for each in self.confirmed if each[0] == number]:
            del self.confirmed[partition]
        chains = {part: chain for part, chain in self.view.chains.items() if part[0] != number}
        self.view = PlacementView(self.view.number + 1, chains)

    def note_move(self, partition: Partition, meta: bytes, epoch: int) -> list[int]:
        """A server has announced a move, to be confirmed; return the requests to send now."""
        self.notices.append((partition, epoch))
        if partition not in self.orders:
            return []
        return self.orders[partition].moved(self._learn(partition, meta))

    def returned(self, partition: Partition, sequence: int, meta: bytes) -> list[int]:
        """A server has returned a request; return the requests to send now."""
        return self.orders[partition].returned(sequence, self._learn(partition, meta))

    def _learn(self, partition: Partition, meta: bytes) -> int:
        epoch, owners = owners_of(meta)
        if epoch > self.orders[partition].epoch:
            self.view = self.view.with_({partition: (int(owners[0]),)})
        return epoch

    def take_confirmed(self) -> list[tuple[Partition, int]]:
        """Return the moves, by partition and epoch, of which the server before awaits no more."""
        waiting: list[tuple[Partition, int]] = []
        confirmed: list[tuple[Partition, int]] = []
        for partition, epoch in self.notices:
            order = self.orders.get(partition)
            is_settled = order is None or order.is_settled
            (confirmed if is_settled else waiting).append((partition, epoch))
        self.notices = waiting
        return confirmed

    def lose(self) -> None:
        """Know of no request: all have failed, for a server died."""
        self.notices.clear()
        self.confirmed.clear()
        for partition, order in self.orders.items():
            self.orders[partition] = RequestOrder(order.epoch)

    @property
    def is_settled(self) -> bool:
        return all(order.is_settled for order in self.orders.values())


# --- requests that wait for credit ----------------------------------------------------------------
class SendQueue:
    """Requests that wait for credit, by server and table, in the order of their calls.

    Not safe by itself: the lock of Outstanding is held around each call.

    Attributes:
        n_waiting: requests.
    """

    def __init__(self, has_credit: Callable[[AnyRequest], bool]) -> None:
        self._has_credit = has_credit
        self.n_waiting = 0
        self._queues: dict[tuple[int, int], deque[Request]] = {}
        self._tables: Counter[int] = Counter()
        self._partitions: dict[Partition, tuple[int, int]] = {}  # the server, and how many wait
        self._calls: Counter[Future[Any]] = Counter()

    def add(self, request: Request) -> None:
        """Append a request.

        If its partition has moved it stays behind the earlier ones of that partition.
        """
        self._queue_of(request).append(request)

    def add_behind(self, request: Request) -> None:
        """Insert a request, which gives credit back, right behind the last one of its partition.

        There is one: see has().
        """
        queue = self._queue_of(request)
        last = max(k for k, each in enumerate(queue) if each.partition == request.partition)
        queue.insert(last + 1, request)

    def _queue_of(self, request: Request) -> deque[Request]:
        """Count a request; return where it waits."""
        server, n, table = request.server, 0, table_of(request)
        if request.partition is not None:
            server, n = self._partitions.get(request.partition, (server, 0))
            self._partitions[request.partition] = server, n + 1
        self._tables[table] += 1
        self._calls[request.future] += 1
        self.n_waiting += 1
        return self._queues.setdefault((server, table), deque())

    def due(self) -> Iterator[Request]:
        """Remove the requests that may be sent now; each must be sent before the next is taken.

        None overtakes another of its server and table: what is pushed first arrives first.
        """
        for key, queue in tuple(self._queues.items()):
            while queue and self._has_credit(queue[0]):
                request = queue.popleft()
                self._discount(request)
                yield request
            if not queue:
                del self._queues[key]

    def take_all(self) -> list[Request]:
        """Return all requests, which are not going to be sent, and forget them."""
        requests = [request for queue in self._queues.values() for request in queue]
        for request in requests:
            self._discount(request)
        self._queues.clear()
        return requests

    def _discount(self, request: Request) -> None:
        self.n_waiting -= 1
        self._tables[table_of(request)] -= 1
        self._calls[request.future] -= 1
        if not self._calls[request.future]:
            del self._calls[request.future]
        if request.partition is not None:
            server, n = self._partitions.pop(request.partition)
            if n > 1:
                self._partitions[request.partition] = server, n - 1

    def has(self, partition: Partition | None) -> bool:
        """Return True if a request to a partition waits: later ones must not overtake it."""
        return partition in self._partitions

    def has_table(self, table: int) -> bool:
        return self._tables[table] > 0

    def n_of(self, future: Future[Any]) -> int:
        return self._calls.get(future, 0)

    def of(self, future: Future[Any]) -> Iterator[Request]:
        for queue in self._queues.values():
            yield from (each for each in queue if each.future is future)


# --- credit ---------------------------------------------------------------------------------------
CREDIT_NBYTES: Final = 64 << 20  # of bodies under way from one rank to one server
CREDIT_REQUESTS: Final = 4096  # likewise
_PUSH: Final = FrameKind.PUSH  # looked up once: each request needs it
_CONTROL: Final = frozenset(
    (
        FrameKind.ENTER,
        FrameKind.LEAVE,
        FrameKind.MISSING,
        FrameKind.MOVE,
        FrameKind.SNAPSHOT,
        FrameKind.STATS,
    )
)


class Turns:
    """The turns of pushes that are under way; finds the least without a look at all."""

    def __init__(self) -> None:
        self._present: set[int] = set()
        self._heap: list[int] = []  # those, and some that have gone since; the first has not

    def add(self, turn: int) -> None:
        """Add one, perhaps again after discard()."""
        self._present.add(turn)
        heapq.heappush(self._heap, turn)

    def discard(self, turn: int) -> None:
        self._present.discard(turn)
        while self._heap and self._heap[0] not in self._present:
            heapq.heappop(self._heap)

    def least(self) -> float:
        return self._heap[0] if self._heap else math.inf


class InFlight:
    """Requests under way to one server: bytes of bodies, requests, and pushes by table."""

    __slots__ = ("n", "n_bytes", "n_pushes")

    def __init__(self) -> None:
        self.n = self.n_bytes = 0
        self.n_pushes: dict[int, int] = {}


class Credit:
    """Bounds what is under way: bytes of bodies, and requests, of all tables together.

    Requests that control the job are small and rare, and need no credit: a rank that leaves must
    not wait, nor Client.send_control(), which brings credit back.

    Beyond that each table may have one push under way to each server. Pushes of a round wait at the
    server for those of other workers, who may push their tables in another order: if waiting pushes
    could keep out those of another table, two workers could wait for each other. So could two
    workers one of which has sent a later block before that moved to the server of the earlier one:
    so a push that was called before all others of its table that are under way may always leave.
    """

    def __init__(self) -> None:
        self._in_flight: defaultdict[int, InFlight] = defaultdict(InFlight)  # by server
        self._turns: defaultdict[int, Turns] = defaultdict(Turns)  # of pushes, by table

    @property
    def n_bytes(self) -> dict[int, int]:
        return {server: each.n_bytes for server, each in self._in_flight.items()}

    def busy(self) -> set[int]:
        return {server for server, each in self._in_flight.items() if each.n}

    def count(self, request: AnyRequest, sign: int) -> None:
        """Count a request that leaves (1), or that is not under way any more (-1)."""
        there = self._in_flight[request.server]
        there.n_bytes += sign * request.body.nbytes
        there.n += sign
        if request.kind is _PUSH:
            table = table_of(request)
            there.n_pushes[table] = there.n_pushes.get(table, 0) + sign
            if request.turn:
                (self._turns[table].add if sign > 0 else self._turns[table].discard)(request.turn)

    def allows(self, request: AnyRequest) -> bool:
        there = self._in_flight[request.server]
        if not there.n:  # as with each push that is waited for before the next one
            return True
        held, n = there.n_bytes, request.body.nbytes
        is_small = not (n and held) or held + n <= CREDIT_NBYTES
        if (is_small and there.n < CREDIT_REQUESTS) or request.kind in _CONTROL:
            return True
        if request.kind is not _PUSH:
            return False
        table = table_of(request)
        is_first = 0 < request.turn < self._turns[table].least()
        return is_first or not there.n_pushes.get(table, 0)


_NEWS: Final = frozenset((FrameKind.LEAVE, FrameKind.TICK, FrameKind.STATS, FrameKind.MISSING))
_GO_ON: Final = frozenset((*_NEWS, FrameKind.SAVE))  # at servers that live, if another dies
_ALLOWED: Final = frozenset((*_NEWS, FrameKind.SNAPSHOT, FrameKind.RECOVER))  # before ps.recover()


def _awaits_step(request: AnyRequest) -> bool:
    return request.kind == FrameKind.TICK and request.option == 1


def _may_be_forgotten(request: AnyRequest) -> bool:
    """Return True if servers that begin anew would leave a request without a reply."""
    begins = request.kind == FrameKind.SNAPSHOT and request.option == Pausing.BEGINS
    return begins or _awaits_step(request)


def _require_answerable(request: AnyRequest, loss: Loss, lost: Collection[int]) -> None:
    is_allowed = request.kind in _ALLOWED and not _may_be_forgotten(request)
    if not is_allowed or request.server in lost:
        raise loss.error(request.future.label)


class RowMoves(Protocol):
    """Follows the moves of one hash table's rows."""

    @property
    def is_settled(self) -> bool:
        """True if no server returns a request that is under way."""

    def on_notice(self, delivery: Delivery) -> None: ...


def _send_once_filled(
    request: AnyRequest, header: RequestHeader, layout: Layout, link: Link
) -> None:
    home = request.server
    full = header_of_request(header, home + 1 if home in layout.hosts else 0)
    dest, is_filled = layout.rank_of(home), lambda: request.source is None
    link.send(dest, full, request.meta, request.body, is_filled=is_filled)


class Outstanding:
    """Sends requests, to the owner of their partition, and takes the replies.

    Attributes:
        lock: of all below; a single look at row_moves, requests, loss or owners.view needs none.
        owners: the servers of partitions.
        credit: bounds what is under way.
        send_queue: requests that wait for credit.
        requests: by sequence number.
        row_moves: of hash tables, by number.
        n_resent: how often a request, or a call to a hash table, went to another server than first.
        loss: a server that died, with a part of the tables; None: each table is whole.
    """

    def __init__(self, engine: Engine, link: Link, layout: Layout) -> None:
        self._engine, self._link, self._layout = engine, link, layout
        self._me = engine.job_rank
        self._sequence = itertools.count(1)
        self._turns = itertools.count(1)
        self.lock = threading.Lock()
        self.owners = PartitionOwners()
        self.credit = Credit()
        self.send_queue = SendQueue(self.credit.allows)
        self.requests: dict[int, AnyRequest] = {}
        self.row_moves: dict[int, RowMoves] = {}
        self.n_resent = 0
        self.loss: Loss | None = None

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
                table_of(each) == table for each in self.requests.values()
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
                if not is_dead and request.kind in _GO_ON and not _awaits_step(request):
                    continue
                del self.requests[sequence]
                self.credit.count(request, -1)
                if request.kind in _NEWS and not _awaits_step(request):
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
        with self.lock:
            order = self.owners.orders[partition]
            return -1 if self.send_queue.has(partition) or not order.is_empty else order.epoch

    def next_sequence(self) -> int:
        return next(self._sequence)

    def assign(self, request: Request, future: Future[Any]) -> None:
        request.future = future
        loss = self.loss
        if loss is not None:
            _require_answerable(request, loss, self._layout.lost)
        self._find_server(request)

    def _find_server(self, request: AnyRequest) -> None:
        if request.partition is not None:
            request.server = self.owners.view.owner(request.partition)

    def may_begin(self, request: AnyRequest) -> bool:
        """Return True if a new call may begin with a request; one push per table may wait."""
        with self.lock:
            return self._may_begin(request)

    def submit_if_it_may(self, request: AnyRequest) -> bool:
        with self.lock:
            may_begin = self._may_begin(request)
            if may_begin:
                self._submit(request)
            return may_begin

    def _may_begin(self, request: AnyRequest) -> bool:
        if request.partition in self.owners.orders:  # it may have moved during a wait for credit
            self._find_server(request)
        if not self.send_queue.n_waiting:
            return self.credit.allows(request)
        is_second = request.kind == FrameKind.PUSH and self.send_queue.has_table(table_of(request))
        return not is_second and self._may_leave(request)

    def _may_leave(self, request: AnyRequest) -> bool:
        is_behind = self.send_queue.n_waiting and self.send_queue.has(request.partition)
        return not is_behind and self.credit.allows(request)

    def add(self, requests: Sequence[Request]) -> None:
        """Send the requests of a call, or let them wait for credit."""
        with self.lock:
            if self.loss is not None and requests:
                _require_answerable(requests[0], self.loss, self._layout.lost)
            for request in requests:  # nothing can go wrong any more: rounds are counted
                if request.clock_of is not None:
                    request.clock = request.clock_of()
                request.turn = next(self._turns)
                if self._may_leave(request):
                    self._submit(request)
                else:
                    self.send_queue.add(request)

    def adopt(self, sequence: int, request: Request, future: Future[Any]) -> None:
        """Await the reply to a request that a server has got within another one."""
        with self.lock:
            self.assign(request, future)
            self.requests[sequence] = request
            self.credit.count(request, 1)

    def add_control(self, requests: Sequence[Request], future: Future[Any]) -> None:
        """Send requests that need no credit behind all earlier ones to their partitions."""
        with self.lock:
            for request in requests:
                self.assign(request, future)
                if self.send_queue.n_waiting and self.send_queue.has(request.partition):
                    self.send_queue.add_behind(request)
                else:
                    self._submit(request)

    def submit(self, requests: Sequence[AnyRequest]) -> None:
        """Send requests that have credit, one right behind the other."""
        with self.lock:
            for request in requests:
                self._submit(request)

    def _submit(self, request: AnyRequest) -> None:
        """Send a new request, or keep it while its partition moves; with the lock."""
        if self.loss is not None:
            _require_answerable(request, self.loss, self._layout.lost)
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
        table, part = request.partition or (request.table, 0)
        header = (
            request.kind, epoch, self._me, sequence, table, part, request.clock,
            request.option, request.place,
        )  # fmt: skip
        home, layout = request.server, self._layout
        if request.source is None and home not in layout.hosts:
            self._link.ask(layout.servers[home], header, request.meta, request.body)
        else:
            _send_once_filled(request, header, layout, self._link)

    def take_over(self, home: int) -> None:
        """Send again what a home has not answered, which runs elsewhere now; called in the loop."""
        rank = self._layout.rank_of(home)
        with self.lock:
            for sequence, request in sorted(self.requests.items()):
                order = self.owners.orders.get(request.partition or (-1, -1))
                epoch = request.epoch if order is None else order.sent_in(sequence)
                if request.server == home and epoch is not None:  # else its partition moves
                    request.body = reachable(request.body, rank, self._engine, self._link)
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
        rank = self._layout.rank_of(request.server)
        table, part = request.partition or (request.table, 0)
        header = FrameHeader(
            FrameKind.REPLY,
            origin=rank,
            sequence=sequence,
            table=table,
            partition=part,
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
            FrameKind.MOVE, origin=self._me, table=partition[0], partition=partition[1],
            clock=epoch, option=StepOption.NOTED,
        )  # fmt: skip
        self.owners.confirmed[partition] = epoch
        layout = self._layout
        for home in layout.server_numbers if servers is None else servers:
            header = header._replace(status=home + 1 if home in layout.hosts else 0)
            self._link.send(layout.rank_of(home), header)

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
            rank = self._layout.rank_of(request.server)
            request.body = reachable(request.body, rank, self._engine, self._link)
            self._send(request, sequence, self.owners.orders[partition].epoch)


def reachable(body: Bytes, rank: int, engine: Engine, link: Link) -> Bytes:
    """Return a body that was meant for another server where the server at a rank can read it."""
    if not body.nbytes or link.holds(body) or not link.shares_memory(rank):
        return body
    memory = engine.shared_memory(body.nbytes)
    assert memory is not None
    memory[:] = body
    return memory
