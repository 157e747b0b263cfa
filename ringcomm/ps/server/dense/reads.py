"""Answers reads of dense tables, and replaces their state."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from ringcomm.ps.partition_state import PartitionState
from ringcomm.ps.protocol.block_state import joined, split
from ringcomm.ps.protocol.frame_meta import (
    ENCODED_BODY,
    KNOWN_BLOCK,
    PLACE,
    READ_BLOCK,
    WANT_COPY,
    WANT_EXACT,
    packed_json,
    packed_stamp,
)
from ringcomm.ps.protocol.frames import INLINE_MAX, CallOption

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.protocol.link import Delivery
    from ringcomm.ps.protocol.wire import Wire
    from ringcomm.ps.server.core.actions import Key
    from ringcomm.ps.server.dense.partition import DensePartition
    from ringcomm.ps.server.replies import Replies
    from ringcomm.ps.server.snapshots import Snapshots


class DenseReads:
    """Answers reads of the partitions of one server; see RowReads.

    Args:
        link: the wire.
        replies: sends answers.
        snapshots: of this server.
    """

    def __init__(self, link: Wire, replies: Replies, snapshots: Snapshots) -> None:
        self._link, self._reply, self._snapshots = link, replies, snapshots

    def serve_held(self, request: Delivery, key: Key, part: DensePartition) -> bool:
        """Answer a pull of a snapshot; return False if it is none."""
        number = request.header.place
        if not number:
            return False
        if number not in self._snapshots:
            raise KeyError(f"no snapshot {number} is held")
        if not self._snapshots.has(number, key):
            raise KeyError(
                f"pull[{part.spec.name}]: the snapshot does not hold it. Open a table before "
                "ps.snapshot()"
            )
        body, version = self._snapshots.values(number, key)
        self._reply(request, body=body, clock=version)
        return True

    def serve(self, request: Delivery, part: DensePartition) -> None:
        """Send a block's values, or where they are."""
        part.counts.pulls += 1
        option = request.header.option
        encoded = None if option & WANT_EXACT else part.encoded()
        if encoded is not None:
            part.counts.nbytes += encoded.nbytes
            self._reply(request, body=encoded, clock=part.version, option=ENCODED_BODY)
            return
        nbytes = part.count * part.dtype.itemsize
        part.counts.nbytes += nbytes
        is_small = nbytes <= INLINE_MAX
        may_look = self._link.shares_memory(request.source) and not option & WANT_COPY
        if may_look and not is_small:
            self._reply(
                request, meta=packed_stamp(part.stamp), body=part.memory, clock=part.version,
                option=READ_BLOCK,
            )  # fmt: skip
            return
        values = part.values.view(np.uint8)
        body = values
        if not is_small:  # updates go on while it is sent
            body = self._link.memory_for_bodies.take(nbytes)
            body[:] = values
        if may_look:
            place = PLACE.pack(self._link.place_of(part.memory), part.memory.nbytes)
            self._reply(request, meta=place, body=body, clock=part.version, option=KNOWN_BLOCK)
        else:
            self._reply(request, body=body, clock=part.version)

    def state(self, request: Delivery, part: DensePartition) -> bool:
        """Reply with values and the updater's state; or replace them, and return True."""
        if request.header.option == CallOption.SET_STATE:
            _load(part, request.meta, request.body)
            self._reply(request, clock=part.version)
            return True
        segments = {} if part.segments is None else part.segments.arrays()
        body = joined([part.values, *part.slots], part.dtype, segments)
        meta = packed_json({"steps": part.steps})
        self._reply(request, meta=meta, body=body, clock=part.version)
        return False


def _load(part: DensePartition, meta: bytes, body: Bytes) -> None:
    """Give a partition the state that a request brings. Raises ValueError: it does not fit."""
    sizes = [part.count, *(len(slot) for slot in part.slots)]
    (values, *slots), segments = split(body, sizes, part.dtype, part.spec.name)
    arrays = {"values": values, **{f"slot{k}": slot for k, slot in enumerate(slots)}}
    part.load(PartitionState({"steps": json.loads(meta)["steps"]}, {**arrays, **segments}))
