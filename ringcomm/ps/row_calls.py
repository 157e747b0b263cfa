"""A rank's calls to one hash table: split over its servers, in order, also while rows move.

The number of the view in which rows moved last, the table's epoch, rides in every request. One that
was made in an older view is not carried out: it comes back whole and says who owns what now. Once
all that was made in the older view has been answered or has come back, the calls of which something
came back are split anew, in the order in which they were made; later ones wait for them. See
ringcomm.ps.row_moving for the servers' side.
"""

from __future__ import annotations

import itertools
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringcomm.ps.frames import Status
from ringcomm.ps.future import Future
from ringcomm.ps.lanes import Lane

if TYPE_CHECKING:
    from ringcomm.ps.client import Ask, Client
    from ringcomm.ps.keys import Portion
    from ringcomm.ps.link import Delivery

Owners = NDArray[np.uint32]
_EPOCH: Final = struct.Struct("<Q")


def packed_owners(epoch: int, owners: list[int]) -> bytes:
    """Return who owns each partition, as the meta of a reply or a notice."""
    return _EPOCH.pack(epoch) + np.array(owners, "<u2").tobytes()


def owners_of(meta: bytes) -> tuple[int, Owners]:
    """Read what packed_owners() wrote: epoch, owners."""
    owners = np.frombuffer(meta, "<u2", offset=_EPOCH.size).astype(np.uint32)
    return _EPOCH.unpack_from(meta)[0], owners


class Piece(NamedTuple):
    """What one server is asked of a call.

    Attributes:
        portion: its keys, in memory that stays as it is.
        ask: the request.
    """

    portion: Portion
    ask: Ask


def calls_of(client: Client, told: dict[str, Any]) -> RowCalls:
    """Return this rank's calls to a table, which the leader has described."""
    number, epoch = told["number"], int(told["epochs"].get("0", 0))
    calls = client.row_calls.get(number)
    if calls is None:
        calls = client.row_calls[number] = RowCalls(client, number, told["owners"], epoch)
    else:
        calls.learn(epoch, told["owners"])
    return calls


Split = Callable[[Owners, list[Piece]], list[Piece]]


@dataclass(eq=False)
class _Call:
    """A call that is under way, or waits.

    Attributes:
        split: makes requests of it, or of those pieces that were not carried out.
        future: of all of it.
        n_out: requests that have not been answered.
        back: what was not carried out.
        epoch: the latest view that a piece came back with.
    """

    split: Split
    future: Future[Any]
    n_out: int = 0
    back: list[Piece] = field(default_factory=list)
    epoch: int = 0


class RowCalls:
    """See the module.

    Args:
        client: of this rank.
        number: of the table.
        owners: of its partitions.
        epoch: of the view that they are from.
    """

    def __init__(self, client: Client, number: int, owners: list[int], epoch: int) -> None:
        self._client = client
        self._table = number
        self._owners: Owners = np.array(owners, np.uint32)
        self._lane = Lane(epoch)
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count(1)
        self._to_note: list[int] = []  # epochs that servers wait to hear of
        self._lock = threading.Lock()

    @property
    def is_settled(self) -> bool:
        """True unless rows have moved and requests are on their way back."""
        with self._lock:
            return self._lane.is_settled

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
            split: split(owners, back) returns pieces: of the call, or of what came back of it.
            finish: makes the result.
            unsent: called if there is no credit, so that nothing of it is going to be sent.
            needs_credit: False: it is sent whatever is under way.

        Raises:
            CommTimeoutError: servers are so far behind that no more may be sent.
        """
        client, lane = self._client, self._lane
        epoch, owners = lane.epoch, self._owners
        pieces = split(owners, [])
        future = Future(client, label, len(pieces), finish, client.timestamp())
        if not pieces:
            return future
        try:
            if needs_credit:
                client.reserve([piece.ask for piece in pieces], future)
        except BaseException:
            if unsent is not None:
                unsent()
            raise
        call = _Call(split, future)
        with self._lock:
            number = next(self._numbers)
            self._calls[number] = call
            may_go = lane.ask(number)
            if may_go and lane.epoch == epoch:
                self._send(number, call, pieces)
            else:  # it is split anew, now or once its turn comes
                call.back = pieces
                if may_go:
                    self._send_again([number])
        client.nudge()
        return future

    def learn(self, epoch: int, owners: list[int]) -> None:
        """Take note of who owns what, as servers tell who opens a table."""
        with self._lock:
            self._send_again(self._learn(epoch, np.array(owners, np.uint32)))

    def on_notice(self, delivery: Delivery) -> None:
        """Rows have moved; called by whoever drives."""
        epoch, owners = owners_of(delivery.meta)
        with self._lock:
            self._send_again(self._learn(epoch, owners))
            self._to_note.append(epoch)
            self._note()

    def _on_end(self, number: int, call: _Call, piece: Piece, reply: Delivery) -> None:
        with self._lock:
            call.n_out -= 1
            if reply.header.status == Status.WRONG_VIEW:
                epoch, owners = owners_of(reply.meta)
                call.back.append(piece)
                call.future.awaited.discard(piece.ask.server)
                call.epoch = max(call.epoch, epoch)
                self._send_again(self._learn(epoch, owners))
            if call.n_out:
                return
            if call.back:
                due = self._lane.came_back(number, call.epoch)
            else:
                del self._calls[number]
                due = self._lane.answered(number)
            self._send_again(due)
            self._note()

    def _learn(self, epoch: int, owners: Owners) -> list[int]:
        """Return the calls that are to be sent again now."""
        if epoch <= self._lane.epoch:
            return []
        self._owners = owners
        return self._lane.moved(epoch, ())

    def _send_again(self, numbers: list[int]) -> None:
        for number in numbers:
            call = self._calls[number]
            back, call.back = call.back, []
            self._client.n_moved += 1
            pieces = call.split(self._owners, back)
            call.future.expect(len(pieces) - len(back))
            self._send(number, call, pieces)

    def _send(self, number: int, call: _Call, pieces: list[Piece]) -> None:
        call.n_out, call.epoch = len(pieces), 0
        for piece in pieces:
            ask = piece.ask
            ask.epoch, ask.future = self._lane.epoch, call.future
            ask.on_end = lambda reply, piece=piece: self._on_end(number, call, piece, reply)
        self._client.submit([piece.ask for piece in pieces])

    def _note(self) -> None:
        """Tell the servers that all was sent again, behind that."""
        if self._lane.is_settled:
            for epoch in self._to_note:
                self._client.say_noted(self._table, epoch)
            self._to_note.clear()
