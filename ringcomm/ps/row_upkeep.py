"""What a hash table's rows can be asked besides their values: how many, since when; and to go."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ringcomm.ps.client import Ask
from ringcomm.ps.frames import Kind
from ringcomm.ps.hashed import METADATA_ITEM
from ringcomm.ps.keys import Portion, keys_of
from ringcomm.ps.messages import COUNT, EVICT, METADATA
from ringcomm.ps.row_calls import Owners, Piece, RowCalls, Split
from ringcomm.ps.row_pieces import Staging, regrouped

if TYPE_CHECKING:
    from ringcomm.ps.future import Future
    from ringcomm.ps.job import Session
    from ringcomm.ps.link import Delivery


class Metadata(NamedTuple):
    """What servers know of rows; arrays with the shape of the keys.

    Attributes:
        pushes: in which the key stood since it has a row; 0: it has none.
        steps: of them, those by the updater of the table.
        time: of the last push, in seconds since 1970 by the server's clock; NaN without a row.
        stamp: number of the change of its server that touched it last; 0 without a row. A row that
            has moved to another server, or was restored, was touched by that.
    """

    pushes: NDArray[np.uint32]
    steps: NDArray[np.uint32]
    time: NDArray[np.float64]
    stamp: NDArray[np.uint64]


class Upkeep:
    """Asks the servers of one hash table; see HashTable's methods of these names.

    Args:
        current: of this rank.
        calls: of the table.
        name: of it.
        number: of it, in messages.
    """

    def __init__(self, current: Session, calls: RowCalls, name: str, number: int) -> None:
        self._calls = calls
        self._staging = Staging(current)
        self._name = name
        self._number = number
        self._servers = range(current.client.n_servers)

    def erase(self, keys: ArrayLike) -> Future[int]:
        """Take rows out; return how many there were."""
        flat, _ = keys_of(f"erase[{self._name}]", keys)
        counts: list[int] = []

        def split(owners: Owners, back: list[Piece]) -> list[Piece]:
            return [self._about(each, Kind.ERASE) for each in regrouped(flat, back, owners)]

        return self._begin(
            "erase", split, lambda _, reply: counts.append(reply.header.clock), lambda: sum(counts)
        )

    def evict(self) -> Future[int]:
        """Take out what the policy says; return how many."""
        return self._total("evict", EVICT)

    def n_rows(self) -> Future[int]:
        """Return how many keys have a row."""
        return self._total("n_rows", COUNT)

    def metadata(self, keys: ArrayLike) -> Future[Metadata]:
        """Return what is known of the rows of keys."""
        flat, shape = keys_of(f"metadata[{self._name}]", keys)
        told = np.empty(len(flat), METADATA_ITEM)

        def split(owners: Owners, back: list[Piece]) -> list[Piece]:
            asked = regrouped(flat, back, owners)
            return [self._about(each, Kind.ROWS, METADATA) for each in asked]

        def note(piece: Piece, reply: Delivery) -> None:
            order = piece.portion.order
            told[slice(None) if order is None else order] = reply.body.view(METADATA_ITEM)

        def finish() -> Metadata:
            return Metadata(*(told[name].reshape(shape) for name in Metadata._fields))

        return self._begin("metadata", split, note, finish)

    def _total(self, what: str, option: int) -> Future[int]:
        """Return the sum of what all servers count; of all anew if rows have moved meanwhile."""
        counts: list[int] = []
        nothing = np.empty(0, np.uint64)

        def split(_owners: Owners, _back: list[Piece]) -> list[Piece]:
            if option == COUNT:
                counts.clear()  # a row may have gone to who had not counted it, or had
            return [
                self._about(Portion(server, nothing, None), Kind.ROWS, option)
                for server in self._servers
            ]

        return self._begin(
            what, split, lambda _, reply: counts.append(reply.header.clock), lambda: sum(counts)
        )

    def _about(self, portion: Portion, kind: Kind, option: int = 0) -> Piece:
        own, body, _ = self._staging.keyed(portion)
        ask = Ask(kind, server=own.server, table=self._number, option=option, body=body)
        return Piece(own, ask)

    def _begin(
        self, what: str, split: Split, note: Callable[[Piece, Delivery], None],
        finish: Callable[[], Any],
    ) -> Future[Any]:  # fmt: skip
        def noted(owners: Owners, back: list[Piece]) -> list[Piece]:
            pieces = split(owners, back)
            for piece in pieces:
                piece.ask.on_reply = lambda reply, piece=piece: note(piece, reply)
            return pieces

        return self._calls.begin(f"{what}[{self._name}]", noted, finish)
