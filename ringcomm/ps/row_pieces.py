"""Requests to the servers of a hash table: what of a call each is asked, where it can read it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from ringcomm import codec
from ringcomm.ps.client import Ask
from ringcomm.ps.frames import Kind
from ringcomm.ps.keys import Keys, Portion, portions
from ringcomm.ps.link import INLINE_MAX
from ringcomm.ps.messages import ENCODED, ENCODED_BODY, WANT_EXACT, PullMeta, PushMeta
from ringcomm.ps.row_calls import Owners, Piece
from ringcomm.ps.row_packing import WireRows, decoded_rows

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.job import Session
    from ringcomm.ps.link import Delivery
    from ringcomm.ps.spec import Spec

Array = NDArray[Any]
Order = NDArray[np.int64]
_KEY: Final = 8  # bytes


class Staging:
    """Makes the bodies of requests.

    Args:
        current: of this rank.
    """

    def __init__(self, current: Session) -> None:
        self._session = current

    def keyed(self, portion: Portion, nbytes: int = 0) -> tuple[Portion, Bytes, Bytes]:
        """Return a portion with keys that stay, its body, and the part of that behind the keys."""
        n = _KEY * len(portion.keys)
        body = self._room(n + nbytes, portion.server)
        keys = body[:n].view(np.uint64)
        keys[:] = portion.keys
        return portion._replace(keys=keys), body, body[n:]

    def _room(self, nbytes: int, server: int) -> Bytes:
        if nbytes > INLINE_MAX and self._session.client.shares_memory(server):
            return self._session.memory(nbytes)
        return np.empty(nbytes, np.uint8)


def keys_and_rows(back: list[Piece], spec: Spec) -> tuple[Keys, WireRows]:
    """Return what pushes have in their bodies, one behind the other; what is encoded, decoded."""
    keys = np.concatenate([piece.portion.keys for piece in back])
    name = PushMeta.of(back[0].ask.meta).dtype
    if name == ENCODED:
        found = [decoded_rows(piece.ask.body, len(piece.portion.keys), spec)[1] for piece in back]
        name = spec.dtype
    else:
        kind = np.dtype(np.uint16 if name == "bfloat16" else name)
        found = [piece.ask.body[_KEY * len(piece.portion.keys) :].view(kind) for piece in back]
    rows = np.concatenate([each.reshape(-1) for each in found])
    return keys, WireRows(rows.reshape(-1, spec.count), name)


def regrouped(keys: Keys, back: list[Piece], owners: Owners) -> list[Portion]:
    """Return keys by server, or those that came back; `order` is which of the call's they are."""
    if not back:
        return portions(keys, owners)
    keys = np.concatenate([piece.portion.keys for piece in back])
    orders = [piece.portion.order for piece in back]
    if len(back) == 1 and orders[0] is None:
        return portions(keys, owners)
    places = np.concatenate([order for order in orders if order is not None])
    return [
        each._replace(order=places if each.order is None else places[each.order])
        for each in portions(keys, owners)
    ]


class Pulling:
    """A pull: where its rows go, and the requests that fill them.

    Args:
        current: of this rank.
        spec: of the table.
        n: keys.
        out: memory that the rows may go to; None: memory of its own.
        is_exact: rows come as the servers have them.

    Attributes:
        memory: where the rows are once all has been answered.
    """

    def __init__(
        self, current: Session, spec: Spec, n: int, out: Bytes | None, *, is_exact: bool
    ) -> None:
        self._session, self._client = current, current.client
        self._staging = Staging(current)
        self._n, self._width = n, spec.count * np.dtype(spec.dtype).itemsize
        self._option = WANT_EXACT if is_exact else 0
        self._is_encoded = bool(spec.compression.get("pull")) and not is_exact
        self._is_shared = False
        self._out = out
        self.memory: Bytes = np.empty(0, np.uint8)

    def begin(self, portions: Iterable[Portion]) -> None:
        """Choose the memory: servers on this node write large parts where they belong."""
        nbytes = self._n * self._width
        self._is_shared = any(self._is_large(each) for each in portions)
        if self._is_shared:
            self.memory = self._session.memory(nbytes)
        else:
            self.memory = np.empty(nbytes, np.uint8) if self._out is None else self._out

    def _is_large(self, portion: Portion) -> bool:
        is_large = len(portion.keys) * self._width > INLINE_MAX and not self._is_encoded
        return is_large and self._client.shares_memory(portion.server)

    def piece(self, portion: Portion, table: int, missing: int, clock: int) -> Piece:
        """Return the request for some of the rows."""
        is_placed = self._is_shared and self._is_large(portion)
        places = portion.order if is_placed else None
        own, body, behind = self._staging.keyed(portion, 0 if places is None else 4 * len(places))
        if places is not None:
            behind.view(np.uint32)[:] = places
        n_out, place = (self._n, self._client.place_of(self.memory)) if is_placed else (0, 0)
        meta = PullMeta(len(own.keys), missing, n_out, place, self._session.snapshot)
        is_target = own.order is None and not (is_placed or self._is_encoded)
        ask = Ask(
            Kind.PULL,
            server=own.server,
            table=table,
            clock=clock,
            option=self._option,
            meta=meta.packed(),
            body=body,
            out=self.memory if is_target else None,
        )
        return Piece(own, ask)

    def take(self, piece: Piece, reply: Delivery) -> None:
        """Put rows that came as the body of a reply where they belong."""
        body = reply.body
        if not body.nbytes or body is self.memory:
            return
        if reply.header.option & ENCODED_BODY:
            body = codec.decoded(body).view(np.uint8)
        table, rows = self.memory.reshape(-1, self._width), body.reshape(-1, self._width)
        order = piece.portion.order
        table[slice(None) if order is None else order] = rows
