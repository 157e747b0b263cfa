"""A pull of rows of one hash table: the memory of the rows, and the requests that fill it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ringcomm import codec
from ringcomm.ps.client.request import NO_BODY, Request
from ringcomm.ps.client.rows.keys import Keys, Portion
from ringcomm.ps.client.rows.pushes import RowPushes
from ringcomm.ps.client.rows.requests import may_place, regrouped, staged
from ringcomm.ps.client.rows.row_calls import KeyedRequest, RowCalls
from ringcomm.ps.protocol.frame_meta import ENCODED_BODY, WANT_EXACT, Owners, PullMeta
from ringcomm.ps.protocol.frames import INLINE_MAX, FrameKind

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.client.future import Future
    from ringcomm.ps.protocol.link import Delivery
    from ringcomm.ps.session import Session
    from ringcomm.ps.table_spec import Spec

Array = NDArray[Any]


class RowPull:
    """A pull: the memory of its rows, and the requests that fill it.

    Args:
        session: of this rank.
        spec: of the table.
        calls: of this process to the table.
        pushes: likewise.
        keys: flat.
        shape: of the rows that are returned.
        out: array that they go to; None: a new one.
        missing: index in MISSING.
        is_exact: rows come as the servers have them.
        ahead: see RowPushes.clock_of_pull().

    Attributes:
        label: "pull[emb]".
        calls, pushes: see above.
        keys: see above.
        memory: of the rows, once all has been answered.
        nbytes: of all rows.
        has_shared_out: servers on this node may write to `out`.
        is_encoded: the rows come compressed.
        clock: how much the rows must have.
    """

    memory: Bytes = NO_BODY

    def __init__(
        self,
        session: Session,
        spec: Spec,
        calls: RowCalls,
        pushes: RowPushes,
        *,
        keys: Keys,
        shape: tuple[int, ...],
        out: Array | None,
        missing: int,
        is_exact: bool,
        ahead: int,
    ) -> None:
        self._session, self._client = session, session.client
        self.calls, self.pushes, self.keys = calls, pushes, keys
        self.label = f"pull[{spec.name}]"
        self._dtype, self._shape, self._out = np.dtype(spec.dtype), shape, out
        self._flat: Bytes | None = None if out is None else out.reshape(-1).view(np.uint8)
        self.has_shared_out = self._flat is not None and self._client.link.holds(self._flat)
        self._width = spec.count * self._dtype.itemsize
        self.nbytes = len(keys) * self._width
        self._missing, self._option = missing, WANT_EXACT if is_exact else 0
        self.is_encoded = bool(spec.compression.get("pull")) and not is_exact
        self._is_shared = False
        self.clock = pushes.clock_of_pull(ahead)

    def begin(self) -> Future[Array]:
        return self.calls.begin(self.label, self.split, self.finish)

    def split(self, owners: Owners, returned: list[KeyedRequest]) -> list[KeyedRequest]:
        """Return the requests, or those in place of some that were returned; see RowCalls."""
        portions = regrouped(self.keys, returned, owners)
        if not returned:
            self._choose_memory(portions)
        return [self.request(each) for each in portions]

    def finish(self) -> Array:
        rows = self.memory.view(self._dtype).reshape(self._shape)
        if self._out is None:
            return rows
        if self.memory is not self._flat:
            self._out[...] = rows
        return self._out

    def use_memory(self, shared: Bytes | None) -> None:
        """Choose the memory: where servers on this node write rows; None: none of them does."""
        self._is_shared = shared is not None
        if shared is not None and not self.has_shared_out:
            self.memory = shared
        else:
            self.memory = np.empty(self.nbytes, np.uint8) if self._flat is None else self._flat

    def _choose_memory(self, portions: Iterable[Portion]) -> None:
        """Choose the memory: servers on this node write large parts where they belong."""
        if not any(self._is_large(each) for each in portions):
            self.use_memory(None)
        else:
            self.use_memory(
                self._flat if self.has_shared_out else self._session.memory(self.nbytes)
            )

    def _is_large(self, portion: Portion) -> bool:
        is_large = len(portion.keys) * self._width > INLINE_MAX and not self.is_encoded
        return is_large and may_place(self._session, portion.server)

    def request(self, portion: Portion) -> KeyedRequest:
        is_placed = self._is_shared and self._is_large(portion)
        places = portion.order if is_placed else None
        own, body, rest = staged(self._session, portion, 0 if places is None else 4 * len(places))
        if places is not None:
            rest.view(np.uint32)[:] = places
        n = len(self.keys)
        n_out, place = (n, self._client.link.place_of(self.memory)) if is_placed else (0, 0)
        meta = PullMeta(len(own.keys), self._missing, n_out, place, self._session.snapshot)
        is_target = own.order is None and not (is_placed or self.is_encoded)
        request = Request(
            FrameKind.PULL, server=own.server, table=self.calls.table, clock=self.clock,
            option=self._option, meta=meta.packed(), body=body,
            out=self.memory if is_target else None, on_reply=partial(self._take, own),
        )  # fmt: skip
        return KeyedRequest(own, request)

    def _take(self, portion: Portion, reply: Delivery) -> None:
        header = reply.header
        self.take(portion.server, header.clock, reply.body, portion.order, header.option)

    def take(
        self, server: int, version: int, body: Bytes, order: NDArray[Any] | None, option: int
    ) -> None:
        """Note the version of rows that a server has sent; put those in `body` in their places."""
        self.pushes.note_pulled(server, version)
        if not body.nbytes or body is self.memory:
            return
        if option & ENCODED_BODY:
            body = codec.decoded(body).view(np.uint8)
        table, rows = self.memory.reshape(-1, self._width), body.reshape(-1, self._width)
        table[slice(None) if order is None else order] = rows
