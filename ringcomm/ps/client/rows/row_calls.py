"""Splits a rank's calls to one hash table over its servers; keeps their order while rows move.

The number of the view in which rows moved last, the table's epoch, is in every request. A server
returns a request that was made in an older view, with the owners of now. Once all requests of the
older view were answered or returned, the calls of which some were returned are split again, in the
order in which they were made; later ones wait for them. For the servers' side see
ringcomm.ps.server.core.migration.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ringcomm.ps.client.future import Future
from ringcomm.ps.client.request_order import RequestOrder
from ringcomm.ps.protocol.frame_meta import Owners, owners_of
from ringcomm.ps.protocol.frames import Status

if TYPE_CHECKING:
    from ringcomm.ps.client.client import Client
    from ringcomm.ps.client.request import Request
    from ringcomm.ps.client.rows.keys import Portion
    from ringcomm.ps.protocol.link import Delivery


class KeyedRequest(NamedTuple):
    """The request of a call to one server.

    Attributes:
        portion: its keys, in memory that stays as it is.
        request: to the server.
    """

    portion: Portion
    request: Request


Split = Callable[[Owners, list[KeyedRequest]], list[KeyedRequest]]


@dataclass(eq=False)
class _RowCall:
    """A call that is under way, or waits.

    Attributes:
        split: makes requests of it, or of those requests that were returned.
        future: of all of it.
        n_out: requests that have not been answered.
        returned: requests that were not carried out.
        epoch: the latest view in which one was returned.
    """

    split: Split
    future: Future[Any]
    n_out: int = 0
    returned: list[KeyedRequest] = field(default_factory=list)
    epoch: int = 0


class JoinedRows(NamedTuple):
    """A call whose first requests are sent by who made it, in one with those to other tables.

    Attributes:
        number: of the call.
        call: see RowCalls.
        epoch: the view in which it is to be sent.
        owners: in that view.
    """

    number: int
    call: _RowCall
    epoch: int
    owners: Owners


class RowCalls:
    """This rank's calls to one table.

    Attributes:
        table: number of the table.
    """

    def __init__(self, client: Client, created: dict[str, Any]) -> None:
        self._client = client
        self.table: int = created["number"]
        self._owners: Owners = np.array(created["owners"], np.uint32)
        self._order = RequestOrder(int(created["epochs"].get("0", 0)))
        self._calls: dict[int, _RowCall] = {}
        self._numbers = itertools.count(1)
        self._notices: list[int] = []  # epochs that servers wait to be confirmed
        self._lock = threading.Lock()
        self._client.row_moves[self.table] = self

    def are_on(self, server: int) -> bool:
        return server in self._owners

    @property
    def is_settled(self) -> bool:
        with self._lock:
            return self._order.is_settled

    def begin(
        self,
        label: str,
        split: Split,
        finish: Callable[[], Any],
        unsent: Callable[[], object] | None = None,
        *,
        needs_credit: bool = True,
    ) -> Future[Any]:
        """Carry out a call, behind those before it; return its future.

        Args:
            label: "push[emb]".
            split: split(owners, returned) makes requests of the call, or of those returned of it.
            finish: makes the result.
            unsent: called if there is no credit, so that nothing of it is going to be sent.
            needs_credit: False: send it whatever is under way.

        Raises:
            CommTimeoutError: servers are so far behind that no more may be sent.
        """
        epoch, owners = self._order.epoch, self._owners
        requests = split(owners, [])
        future = Future(self._client, label, len(requests), finish)
        if not requests:
            return future
        try:
            plain = [each.request for each in requests]
            self._client.reserve(plain, future, needs_credit=needs_credit)
        except BaseException:
            if unsent is not None:
                unsent()
            raise
        call = _RowCall(split, future)
        with self._lock:
            number = next(self._numbers)
            self._calls[number] = call
            may_go = self._order.add(number)
            if may_go and self._order.epoch == epoch:
                self._send(number, call, requests)
            else:  # split it again, now or once its turn comes
                call.returned = requests
                if may_go:
                    self._send_again([number])
        self._client.flush(always=True)  # halves a sync step if there are more ranks than cores
        return future

    def join(self, split: Split, future: Future[Any]) -> JoinedRows | None:
        """Put a call behind those before it, of which leave() or ended() is to be called next.

        Returns None if rows move: it must be made with begin().
        """
        with self._lock:
            if not self._order.is_settled:
                return None
            number, call = next(self._numbers), _RowCall(split, future)
            self._calls[number] = call
            self._order.add(number)
            return JoinedRows(number, call, self._order.epoch, self._owners)

    def leave(self, future: Future[Any]) -> None:
        """Forget the call with this future, if it has joined and nothing of it was sent."""
        with self._lock:
            for number, call in [*self._calls.items()]:
                if call.future is future:
                    self._end(number, call)

    def ended(self, joined: JoinedRows) -> None:
        with self._lock:
            joined.call.n_out -= 1
            if not joined.call.n_out:
                self._end(joined.number, joined.call)

    def expect(self, joined: JoinedRows, request: KeyedRequest, sequence: int) -> None:
        request.request.on_end = partial(self._on_end, joined.number, joined.call, request)
        self._client.adopt(sequence, request.request, joined.call.future)

    def on_notice(self, delivery: Delivery) -> None:
        """Rows have moved; called in the loop."""
        epoch, owners = owners_of(delivery.meta)
        with self._lock:
            self._send_again(self._learn(epoch, owners))
            self._notices.append(epoch)
            self._confirm_moves()

    def _on_end(self, number: int, call: _RowCall, ended: KeyedRequest, reply: Delivery) -> None:
        with self._lock:
            call.n_out -= 1
            if reply.header.status == Status.WRONG_VIEW:
                epoch, owners = owners_of(reply.meta)
                call.returned.append(ended)
                call.epoch = max(call.epoch, epoch)
                self._send_again(self._learn(epoch, owners))
            if not call.n_out:
                self._end(number, call)

    def _end(self, number: int, call: _RowCall) -> None:
        """Forget a call all of whose requests were answered, or send it again."""
        if call.returned:
            due = self._order.returned(number, call.epoch)
        else:
            del self._calls[number]
            due = self._order.answered(number)
        self._send_again(due)
        self._confirm_moves()

    def _learn(self, epoch: int, owners: Owners) -> list[int]:
        if epoch <= self._order.epoch:
            return []
        self._owners = owners
        return self._order.moved(epoch)

    def _send_again(self, numbers: list[int]) -> None:
        for number in numbers:
            call = self._calls[number]
            returned, call.returned = call.returned, []
            self._client.n_resent += 1
            requests = call.split(self._owners, returned)
            call.future.expect(len(requests) - len(returned))
            self._send(number, call, requests)

    def _send(self, number: int, call: _RowCall, requests: list[KeyedRequest]) -> None:
        call.n_out, call.epoch = len(requests), 0
        for each in requests:
            each.request.epoch = self._order.epoch
            each.request.on_end = partial(self._on_end, number, call, each)
            self._client.assign(each.request, call.future)
        self._client.submit([each.request for each in requests])

    def _confirm_moves(self) -> None:
        """Confirm moves to the servers, behind the requests that were sent again."""
        if self._order.is_settled:
            for epoch in self._notices:
                self._client.confirm_move((self.table, 0), epoch)
            self._notices.clear()
