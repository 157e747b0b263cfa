"""Sends a rank's requests, matches replies with them, and sends again what a server returns.

Requests of one rank to one server are answered in any order, but carried out in the order in which
they were sent.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from ringcomm.ps.client.flow_control import Credit
from ringcomm.ps.client.partition_owners import PartitionOwners
from ringcomm.ps.client.push_outcome import AnyRequest, table_of
from ringcomm.ps.client.request import NO_BODY, Request
from ringcomm.ps.client.send_queue import SendQueue
from ringcomm.ps.protocol.frames import (
    Header,
    Kind,
    Pausing,
    RequestHeader,
    Status,
    Step,
    header_of_request,
)
from ringcomm.ps.protocol.link import Delivery
from ringcomm.ps.protocol.remote_errors import error_of

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.engine.core.engine import Engine
    from ringcomm.ps.client.future import Future
    from ringcomm.ps.placement.partition_places_and_moves import Partition
    from ringcomm.ps.protocol.link import Link
    from ringcomm.ps.protocol.lost_server import Loss
    from ringcomm.ps.roles import Layout


_NEWS: Final = frozenset((Kind.LEAVE, Kind.TICK, Kind.STATS, Kind.MISSING))
_GO_ON: Final = frozenset((*_NEWS, Kind.SAVE))  # at servers that live, if another dies
_ALLOWED: Final = frozenset((*_NEWS, Kind.SNAPSHOT, Kind.RECOVER))  # before ps.recover()


def _awaits_step(request: AnyRequest) -> bool:
    return request.kind == Kind.TICK and request.option == 1


def _may_be_forgotten(request: AnyRequest) -> bool:
    """Return True if servers that begin anew would leave a request without a reply."""
    begins = request.kind == Kind.SNAPSHOT and request.option == Pausing.BEGINS
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
        is_second = request.kind == Kind.PUSH and self.send_queue.has_table(table_of(request))
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
    def place_for(self, header: Header) -> Bytes | None:
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
        header = Header(
            Kind.REPLY, origin=rank, sequence=sequence, table=table, partition=part, clock=clock
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
        header = Header(
            Kind.MOVE, origin=self._me, table=partition[0], partition=partition[1], clock=epoch,
            option=Step.NOTED,
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
