"""Answers reads of hash tables, and maintains their rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ringcomm.ps.protocol.frame_meta import (
    ENCODED_BODY,
    WANT_EXACT,
    Answered,
    KeyedPull,
    PullMeta,
    packed_numbers,
)
from ringcomm.ps.protocol.frames import CallOption, FrameKind
from ringcomm.ps.protocol.link import Delivery
from ringcomm.ps.protocol.row_compression import encoded_rows
from ringcomm.ps.server.replies import NOTHING
from ringcomm.ps.server.rows.hash_shard import Shard
from ringcomm.ps.server.rows.row_gradients import Keys

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.protocol.wire import Wire
    from ringcomm.ps.server.core.actions import Key
    from ringcomm.ps.server.replies import Replies


class RowReads:
    """Answers reads of the shards of one server; see DenseReads.

    Args:
        link: the wire.
        replies: sends answers.
    """

    def __init__(self, link: Wire, replies: Replies) -> None:
        self._link, self._reply = link, replies

    def serve_held(self, request: Delivery, key: Key, shard: Shard) -> bool:
        """Answer a pull of a snapshot; return False if it is none."""
        del key
        is_held = bool(PullMeta.of(request.meta).held)
        if is_held:
            self.serve(request, shard)
        return is_held

    def serve(self, request: Delivery, shard: Shard) -> None:
        """Send rows, or write them where the client wants them."""
        meta = PullMeta.of(request.meta)
        keys, places = _keys_of(request.body, meta, shard.spec.name)
        is_exact = bool(request.header.option & WANT_EXACT)
        version, body, option = self._read(
            request.source, keys, places, meta, shard, is_exact=is_exact
        )
        self._reply(request, body=body, clock=version, option=option)

    def _read(
        self, source: int, keys: Keys, places: Any, meta: PullMeta, shard: Shard, *,
        is_exact: bool = False,
    ) -> tuple[int, Bytes, int]:  # fmt: skip
        """Return the version of rows, and those that are not written where a client wants them."""
        if meta.n_out:
            out = self._link.view(source, meta.place, meta.n_out * shard.row_nbytes())
            return shard.pull(keys, out, meta.missing, places, held=meta.held), NOTHING, 0
        out = np.empty(meta.n * shard.row_nbytes(), np.uint8)
        version = shard.pull(keys, out, meta.missing, held=meta.held)
        if not is_exact:
            encoded = encoded_rows(out.view(shard.dtype), shard.spec, shard.index, version)
            if encoded is not None:
                return version, encoded, ENCODED_BODY
        return version, out, 0

    def serve_many(
        self, request: Delivery, shard_of: Callable[[KeyedPull], Shard | None]
    ) -> list[Delivery]:
        """Answer several pulls in one reply; return those that need a reply of their own.

        Args:
            request: see ringcomm.ps.client.rows.pull_many.
            shard_of: returns the rows of a pull that need not wait; else None.
        """
        pulls, keys, places = _pulls_of(request)
        answers, bodies, rest, end = [], [], [], 0
        for pull in pulls:
            start, end = end, end + pull.n
            mine = keys[start:end], places[start:end] if len(places) else None
            meta = PullMeta(pull.n, 0, pull.n_out, pull.place, request.header.clock)
            shard = shard_of(pull)
            answer = None
            if shard is not None:
                with contextlib.suppress(KeyError, ValueError):  # raised again below
                    answer = self._read(request.source, *mine, meta, shard)
            if answer is None:
                answers.append(Answered(-1))
                rest.append(_single(request, pull, meta, *mine))
                continue
            version, body, option = answer
            answers.append(Answered(version, body.nbytes, option))
            bodies.append(body)
        body = np.concatenate(bodies) if bodies else NOTHING
        self._reply(request, body=body, meta=packed_numbers(answers).tobytes())
        return rest

    def maintain(self, request: Delivery, shard: Shard) -> None:
        option = request.header.option
        if option == CallOption.ERASE:
            self._reply(request, clock=shard.erase(request.body.view(np.uint64)))
        elif option == CallOption.COUNT:
            self._reply(request, clock=len(shard.rows))
        elif option == CallOption.METADATA:
            metadata = shard.metadata(request.body.view(np.uint64))
            self._reply(request, body=metadata.view(np.uint8))
        elif option == CallOption.EVICT:
            self._reply(request, clock=shard.evict())
        else:
            raise KeyError(f"hashtable[{shard.spec.name}]: knows no call {option}")


def _keys_of(body: Bytes, meta: PullMeta, name: str) -> tuple[Keys, Any]:
    keys, places = body[: 8 * meta.n], body[8 * meta.n :]
    if keys.nbytes != 8 * meta.n or places.nbytes not in (0, 4 * meta.n):
        raise ValueError(f"pull[{name}]: {body.nbytes} bytes came for {meta.n} keys")
    return keys.view(np.uint64), places.view(np.uint32) if places.nbytes else None


def _pulls_of(request: Delivery) -> tuple[list[KeyedPull], Keys, NDArray[np.uint32]]:
    """Return the pulls in a request, and their keys and places one behind the other."""
    n, body, width = request.header.option, request.body, len(KeyedPull._fields)
    records, rest = body[: 8 * width * n].view("<i8").reshape(n, width), body[8 * width * n :]
    pulls = [KeyedPull._make(each) for each in records.tolist()]
    n_keys = sum(each.n for each in pulls)
    keys, places = rest[: 8 * n_keys], rest[8 * n_keys :]
    if keys.nbytes != 8 * n_keys or places.nbytes not in (0, 4 * n_keys):
        raise ValueError(f"pull_many: {rest.nbytes} bytes came for {n_keys} keys")
    return pulls, keys.view(np.uint64), places.view(np.uint32)


def _single(
    request: Delivery, pull: KeyedPull, meta: PullMeta, keys: Keys, places: Any
) -> Delivery:
    header = request.header._replace(
        kind=FrameKind.PULL, view=pull.epoch, sequence=pull.sequence, table=pull.table,
        clock=pull.clock, option=0,
    )  # fmt: skip
    body = np.concatenate([each.view(np.uint8) for each in (keys, places) if each is not None])
    return Delivery(request.source, header, meta.packed(), body)
