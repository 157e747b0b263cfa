"""Pushes to one dense table: split into requests to its blocks, encoded, and kept in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringcomm.ps.client.dense.compression import Packer, ReplyHandler, rate_of
from ringcomm.ps.client.first_of import PendingPush
from ringcomm.ps.client.future import Future, Pushed
from ringcomm.ps.client.request import PlainPush, PushReplies, Request
from ringcomm.ps.protocol.frame_meta import ASSIGN, ENCODED, HOLD, INITIAL, RELEASE, PushMeta
from ringcomm.ps.protocol.frames import INLINE_MAX, FrameKind
from ringcomm.ps.segments import elements_in, packed_mask

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.client.dense.blocks import Blocks
    from ringcomm.ps.optim import Updater

_METAS_MAX: Final = 1024
Array = NDArray[Any]


class Contribution(NamedTuple):
    """One call of Table.push() or release().

    Attributes:
        values: flat.
        start: the first element of the table that they are for.
        weight: in the mean of a round; of a release, the factor of the mean.
        flags: see PushMeta.
        scale: by which the gradient was multiplied.
        absent: numbers of the segments without a gradient.
    """

    values: Array
    start: int = 0
    weight: float = 1.0
    flags: int = 0
    scale: float = 1.0
    absent: Sequence[int] = ()


class DensePushes:
    """Sends the pushes of this process to one table.

    Args:
        blocks: of the table.
        packer: encodes gradients; None: nothing does.
    """

    def __init__(self, blocks: Blocks, packer: Packer | None) -> None:
        self._blocks, self._client, self._spec = blocks, blocks.client, blocks.spec
        self._packer = packer
        self._label = f"push[{self._spec.name}]"
        self._known_metas: tuple[Updater | None, dict[Any, bytes]] = (None, {})
        self._spare: Bytes | None = None
        self._lock = threading.Lock()  # of _spare

    @property
    def n_rounds(self) -> int:
        return max(map(self._blocks.clock_of_pull, range(self._spec.partitions)), default=0)

    @property
    def n_missed(self) -> int:
        return 0 if self._blocks.first_of is None else self._blocks.first_of.n_missed

    def push(self, push: Contribution, updater: Updater) -> Future[Pushed]:
        blocks, (values, start, weight, flags, scale, absent) = self._blocks, push
        is_update = not flags & (INITIAL | ASSIGN | RELEASE)
        pieces = blocks.pieces(start, start + len(values), of_all=self._spec.mode.has_rounds)
        rounds = blocks.first_of if is_update else None
        replies = PushReplies(is_held=bool(flags & HOLD))
        n_replies = len(pieces) + (rounds is not None)
        future = Future(self._client, self._label, n_replies, replies.outcome)
        pending = PendingPush(future, blocks.number, [part for part, _, _ in pieces])
        hurry = None if rounds is None else partial(rounds.hurry, pending)
        pack = None
        if is_update and self._packer is not None and len(values):
            memory = self._memory_for_encoded(self._packer, pieces, hurry)
            absent_in = partial(self._absent_in, absent)
            pack = self._packer.packing(rate_of(updater, scale), memory, absent_in)
        requests, mask = [], packed_mask(len(self._spec.segments), absent)
        for part, first, last in pieces:
            values_of_part = values[first - start : last - start]
            on_reply: ReplyHandler = replies.taking(part)
            on_ack: Callable[[int], object] | None = replies.taking(part)
            source = None
            if pack is not None and len(values_of_part):
                (body, on_reply), on_ack = pack(part, values_of_part, on_reply), None
                dtype = ENCODED
            else:
                body, source = blocks.body_for(part, values_of_part.view(np.uint8))
                dtype = _name_of(values.dtype)
            key = (weight, flags, mask, dtype, first - blocks.bounds[part], last - first)
            clock_of = (
                partial(blocks.clock_of_push, part, flags, is_update=is_update)
                if rounds is None
                else partial(rounds.round_for, pending)
            )
            requests.append(
                Request(
                    FrameKind.PUSH, (blocks.number, part), clock_of=clock_of, body=body,
                    source=source, meta=self._meta(updater, key), on_reply=on_reply, on_ack=on_ack,
                )
            )  # fmt: skip
        self._client.send(requests, future, is_admitted=pack is not None, before_wait=hurry)
        if rounds is not None:
            rounds.sent(pending)
        return future

    def push_plain(self, values: Array, updater: Updater) -> Future[Pushed]:
        """Push a gradient to all of a table of one block without rounds: most are such."""
        blocks = self._blocks
        key = (1.0, 0, b"", _name_of(values.dtype), 0, len(values))
        if values.nbytes <= INLINE_MAX:
            body = np.frombuffer(values.tobytes(), np.uint8)
        else:
            body = self._take_spare(values.nbytes)
            body.view(values.dtype)[:] = values
        push = PlainPush(
            self._client, self._label, (blocks.number, 0), clock=blocks.versions[0],
            meta=self._meta(updater, key), body=body, reuse=self._keep_spare,
        )  # fmt: skip
        self._client.push(push)
        return push

    def _meta(self, updater: Updater, key: tuple[float, int, bytes, str, int, int]) -> bytes:
        """Return the meta of a push to a block; most are like one before.

        Args:
            updater: of the table.
            key: weight, flags, mask, dtype, and its first element and how many there are.
        """
        known = self._known_metas
        if known[0] is not updater or len(known[1]) > _METAS_MAX:
            known = self._known_metas = (updater, {})
        meta = known[1].get(key)
        if meta is None:
            weight, flags, mask, dtype, start, n = key
            meta = PushMeta(weight, start, n, dtype, flags, updater.hyper, mask).packed()
            known[1][key] = meta
        return meta

    # --- compression ----------------------------------------------------------------------------
    def _memory_for_encoded(
        self,
        packer: Packer,
        pieces: Sequence[tuple[int, int, int]],
        before_wait: Callable[[], object] | None,
    ) -> dict[int, Bytes]:
        """Return memory for what is encoded of each block, once there is credit for the first.

        All that can fail is done here, before residuals change.
        """
        memory = {
            part: self._blocks.memory_for(
                part, packer.codec.encoded_nbytes(last - first, self._blocks.dtype)
            )
            for part, first, last in pieces
            if first < last
        }
        part = min(memory)
        first_request = Request(FrameKind.PUSH, (self._blocks.number, part), body=memory[part])
        self._client.admit(first_request, self._label, before_wait)
        return memory

    def _absent_in(self, absent: Sequence[int], part: int) -> list[slice]:
        bounds = self._blocks.bounds_of(part)
        return elements_in(self._spec.segments, self._spec.count, absent, *bounds)

    # --- memory that is used again: new pages cost time -----------------------------------------
    def _keep_spare(self, memory: Bytes) -> None:
        if memory.nbytes > INLINE_MAX:
            self._spare = memory

    def _take_spare(self, nbytes: int) -> Bytes:
        with self._lock:
            memory, self._spare = self._spare, None
        is_fit = memory is not None and memory.nbytes == nbytes
        return memory if is_fit and memory is not None else self._blocks.memory_for(0, nbytes)


@lru_cache
def _name_of(dtype: np.dtype[Any]) -> str:
    """Return its name, which numpy takes 3 us to find."""
    return dtype.name
