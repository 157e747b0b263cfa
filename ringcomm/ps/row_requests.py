"""What clients ask of hash tables, a server's side: push, pull, erase, what is known of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ringcomm.ps.frames import Kind, Status
from ringcomm.ps.hashed import REJECTED, Keys, Shard
from ringcomm.ps.messages import (
    COUNT,
    ENCODED_BODY,
    EVICT,
    MEASURE,
    METADATA,
    WANT_EXACT,
    PullMeta,
    PushMeta,
)
from ringcomm.ps.row_packing import encoded_rows

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.link import Delivery, Link


class Reply(Protocol):
    """Sends the answer to a request."""

    def __call__(
        self, to: Delivery, *, status: Status = ..., meta: bytes = ..., body: Bytes = ...,
        clock: int = ..., option: int = ...,
    ) -> None:  # fmt: skip
        """Send it."""


class RowAnswer:
    """Tells who pushed what became of it.

    Args:
        reply: sends an answer.
        request: the push.
    """

    __slots__ = ("_reply", "request")

    def __init__(self, reply: Reply, request: Delivery) -> None:
        self._reply = reply
        self.request = request

    def __call__(self, is_applied: bool, version: int, rejected: int, why: bytes = b"", /) -> None:
        """See hashed.Answer."""
        status = Status.OK if is_applied else Status.LATE
        self._reply(self.request, status=status, clock=version, meta=REJECTED.pack(rejected) + why)


class _Measured:
    """Tells who asked how large a mean is; see row_holds.MeasureAnswer."""

    __slots__ = ("_reply", "request")

    def __init__(self, reply: Reply, request: Delivery) -> None:
        self._reply = reply
        self.request = request

    def __call__(self, meta: bytes | None, /) -> None:
        """See row_holds.MeasureAnswer."""
        status = Status.OK if meta is not None else Status.LATE
        self._reply(self.request, status=status, meta=meta or b"")


class RowRequests:
    """Requests to hash tables.

    Args:
        link: the wire.
        reply: sends an answer.
        wait: wait(request, shard, answer) calls answer() once enough updates are in the shard.
    """

    def __init__(
        self,
        link: Link,
        reply: Reply,
        wait: Callable[[Delivery, Shard, Callable[[], None]], None],
    ) -> None:
        self._link = link
        self._reply = reply
        self._wait = wait

    def push(self, request: Delivery, shard: Shard) -> None:
        """Carry out a push, once, or keep it for its round."""
        header = request.header
        if was_applied(request, shard):
            self._reply(request, clock=shard.version, meta=REJECTED.pack(0))
            return
        answer = RowAnswer(self._reply, request)

        before = shard.applied.get(header.origin)
        shard.applied[header.origin] = (header.incarnation, header.sequence)  # first: it may end a
        try:  # round, after which a checkpoint takes note of whose pushes are in it
            shard.push(request.header, PushMeta.of(request.meta), request.body, answer)
        except Exception:
            if before is None:
                del shard.applied[header.origin]
            else:
                shard.applied[header.origin] = before
            raise

    def pull(self, request: Delivery, shard: Shard) -> None:
        """Answer with rows once enough updates are in them."""
        meta = PullMeta.of(request.meta)
        keys, places = _keys_of(request.body, meta, shard.spec.name)

        def answer() -> None:
            if meta.n_out:
                out = self._link.view(request.source, meta.place, meta.n_out * shard.row_nbytes())
                version = shard.pull(keys, out, meta.missing, places, held=meta.held)
                self._reply(request, clock=version)
            else:
                out = np.empty(meta.n * shard.row_nbytes(), np.uint8)
                version = shard.pull(keys, out, meta.missing, held=meta.held)
                rows = out.view(shard.dtype)
                encoded = None
                if not request.header.option & WANT_EXACT:
                    encoded = encoded_rows(rows, shard.spec, shard.index, version)
                if encoded is not None:
                    self._reply(request, body=encoded, clock=version, option=ENCODED_BODY)
                else:
                    self._reply(request, body=out, clock=version)

        if meta.held:
            answer()
        else:
            self._wait(request, shard, answer)

    def erase(self, request: Delivery, shard: Shard) -> None:
        """Take rows out."""
        self._reply(request, clock=shard.erase(request.body.view(np.uint64)))

    def tell(self, request: Delivery, shard: Shard) -> None:
        """Tell how many rows there are, or what is known of some; or evict what is due."""
        option = request.header.option
        if option == COUNT:
            self._reply(request, clock=len(shard.rows))
        elif option == METADATA:
            told = shard.metadata(request.body.view(np.uint64)).view(np.uint8)
            self._reply(request, body=told)
        elif option == EVICT:
            self._reply(request, clock=shard.evict())
        elif option == MEASURE:
            shard.measure(request.header.clock, _Measured(self._reply, request))
        else:
            raise ValueError(f"rows[{shard.spec.name}]: no request {option}")


def was_applied(request: Delivery, shard: Shard) -> bool:
    """Return True if a request is a push that came before, and was carried out then."""
    header = request.header
    incarnation, last = shard.applied.get(header.origin, (-1, 0))
    is_old = header.incarnation == incarnation and header.sequence <= last
    return is_old and header.kind == Kind.PUSH


def _keys_of(body: Bytes, meta: PullMeta, name: str) -> tuple[Keys, Any]:
    keys, places = body[: 8 * meta.n], body[8 * meta.n :]
    if keys.nbytes != 8 * meta.n or places.nbytes not in (0, 4 * meta.n):
        raise ValueError(f"pull[{name}]: {body.nbytes} bytes came for {meta.n} keys")
    return keys.view(np.uint64), places.view(np.uint32) if places.nbytes else None
