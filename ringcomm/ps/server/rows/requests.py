"""Decodes requests to hash tables for the core, and replies as it decides."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ringcomm.ps.protocol.frame_meta import (
    ASSIGN,
    COUNT,
    ENCODED_BODY,
    EVICT,
    HOLD,
    METADATA,
    PLACED,
    REJECTED,
    RELEASE,
    SKIP,
    WANT_EXACT,
    Answered,
    KeyedPull,
    PullMeta,
    PushMeta,
    packed_numbers,
)
from ringcomm.ps.protocol.frames import FrameKind, Status
from ringcomm.ps.protocol.link import Delivery
from ringcomm.ps.protocol.row_compression import encoded_rows
from ringcomm.ps.server.core import actions as do
from ringcomm.ps.server.core import events as on
from ringcomm.ps.server.replies import NOTHING
from ringcomm.ps.server.rows.hash_shard import Shard
from ringcomm.ps.server.rows.row_gradients import Keys

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.protocol.wire import Wire
    from ringcomm.ps.server.core.actions import Key
    from ringcomm.ps.server.replies import Replies

_NONE_REJECTED = REJECTED.pack(0)


class RowRequests:
    """Decodes pushes, and answers.

    Args:
        link: the wire.
        replies: sends answers.
    """

    def __init__(self, link: Wire, replies: Replies) -> None:
        self._link, self._reply = link, replies

    # --- pushes ---------------------------------------------------------------------------------
    def decoded(self, key: Key, request: Delivery, shard: Shard) -> on.Event:
        """Return the event for a push. Raises ValueError: it does not fit."""
        meta = PushMeta.of(request.meta)
        flags = meta.flags
        if flags & RELEASE:
            return on.Released(key, request, shard.factor(meta), drops=bool(flags & SKIP))
        gradient = shard.decoded(
            request.header, meta, request.body, self._placed(request, meta, shard)
        )
        if flags & ASSIGN:
            return on.Assigned(key, request, gradient)
        # A worker asks whether it is in a round of FirstOf before it pushes rows.
        return on.Contributed(key, request, gradient, is_held=bool(flags & HOLD), lets_in=True)

    def _placed(self, request: Delivery, meta: PushMeta, shard: Shard) -> Bytes | None:
        """Return the rows of a push in the client's memory; None if its body has them."""
        if not meta.flags & PLACED:
            return None
        places = request.body[8 * meta.n :].view(np.uint32)
        n_rows = int(places.max()) + 1 if places.size else meta.n
        itemsize = 2 if meta.dtype in ("float16", "bfloat16") else shard.dtype.itemsize
        return self._link.view(request.source, meta.start, n_rows * shard.dim * itemsize)

    def acknowledge(self, action: do.Acknowledge, shard: Shard) -> None:
        self._reply(action.request, clock=shard.version, meta=_NONE_REJECTED)

    def apply(self, action: do.Apply, shard: Shard) -> None:
        rejected = shard.apply(action.payload)
        self._reply(action.request, clock=shard.version, meta=REJECTED.pack(rejected))

    def write(self, action: do.Write, shard: Shard) -> None:
        rejected = shard.write(action.payload)
        self._reply(action.request, clock=shard.version, meta=REJECTED.pack(rejected))

    def hold(self, action: do.Hold, shard: Shard) -> None:
        meta = _NONE_REJECTED + shard.hold([each.payload for each in action.contributions])
        for each in action.contributions:
            self._reply(each.request, clock=shard.version, meta=meta)

    def end(self, action: do.End, shard: Shard) -> None:
        gradients = [each.payload for each in action.contributions]
        why, rejected = shard.end(action.number, gradients, action.release, drops=action.drops)
        status = Status.LATE if why else Status.OK
        meta = REJECTED.pack(rejected) + why
        for each in action.contributions:
            self._reply(each.request, status=status, clock=shard.version, meta=meta)

    def late(self, action: do.Late, shard: Shard) -> None:
        shard.traffic.late += 1
        request = action.contribution.request
        self._reply(request, status=Status.LATE, clock=shard.version, meta=_NONE_REJECTED)

    def released(self, action: do.ReleaseDone, shard: Shard) -> None:
        self._reply(action.request, clock=shard.version, meta=_NONE_REJECTED)

    # --- reads ----------------------------------------------------------------------------------
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
        header = request.header
        if header.kind == FrameKind.ERASE:
            self._reply(request, clock=shard.erase(request.body.view(np.uint64)))
        elif header.kind != FrameKind.ROWS:
            raise KeyError(f"hashtable[{shard.spec.name}]: knows no request {header.kind}")
        elif header.option == COUNT:
            self._reply(request, clock=len(shard.rows))
        elif header.option == METADATA:
            metadata = shard.metadata(request.body.view(np.uint64))
            self._reply(request, body=metadata.view(np.uint8))
        elif header.option == EVICT:
            self._reply(request, clock=shard.evict())
        else:
            raise ValueError(f"rows[{shard.spec.name}]: no request {header.option}")


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
