"""Reads and replaces the state that an updater keeps beside the values of a dense table."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ringcomm.ps.client.request import NO_BODY, Request
from ringcomm.ps.protocol.block_state import joined, split
from ringcomm.ps.protocol.frames import CallOption, FrameKind
from ringcomm.ps.segments import merged

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.client.dense.table import Table
    from ringcomm.ps.protocol.link import Delivery

Array = NDArray[Any]


@dataclass(frozen=True)
class TableState:
    """The values of a dense table, and the state of its updater.

    Attributes:
        steps: updates that the updater has made; of the partition with the most.
        values: shape (elements,), of the table's dtype.
        slots: by name: shape (elements,), or (1,) where a slot has one number per block; those are
            alike in all blocks.
        segments: segments.arrays() of the whole table; empty if it has none.
    """

    steps: int
    values: Array
    slots: dict[str, Array]
    segments: dict[str, Array] = field(default_factory=dict)


def pull_state(table: Table) -> TableState:
    """Return the state of a table; of each block as it is at one moment.

    Raises:
        CommTimeoutError: no server answers.
    """
    replies = [_exchange(table, part) for part in range(table.n_partitions)]
    blocks = [_decoded(table, part, reply) for part, reply in enumerate(replies)]
    full = table.updater.n_full_slots
    arrays = [arrays for arrays, _ in blocks]
    slots = {
        name: np.concatenate([each[1 + k] for each in arrays]) if k < full else arrays[0][1 + k]
        for k, name in enumerate(table.updater.slot_names)
    }
    steps = max(json.loads(reply.meta)["steps"] for reply in replies)
    segments = merged([segments for _, segments in blocks])
    return TableState(steps, np.concatenate([each[0] for each in arrays]), slots, segments)


def push_state(table: Table, state: TableState) -> None:
    """Replace the state of a table; returns once it is done.

    Nothing may be pushed meanwhile, by any worker.

    Raises:
        CommTimeoutError: no server answers.
    """
    full = table.updater.n_full_slots
    meta = json.dumps({"steps": state.steps}).encode()
    for part in range(table.n_partitions):
        start, stop = table.bounds_of(part)
        slots = [
            state.slots[name][start:stop] if k < full else state.slots[name]
            for k, name in enumerate(table.updater.slot_names)
        ]
        body = joined([state.values[start:stop], *slots], table.dtype, state.segments)
        _exchange(table, part, meta, table.blocks.staged(part, body))


def _exchange(table: Table, part: int, meta: bytes = b"", body: Bytes = NO_BODY) -> Delivery:
    option = CallOption.SET_STATE if body.nbytes else CallOption.GET_STATE
    request = Request(
        FrameKind.CALL, (table.number, part), option=option, meta=meta, body=body
    )  # fmt: skip
    return table.client.call_one(f"state[{table.name}]", request, lambda reply: reply).wait()


def _decoded(table: Table, part: int, reply: Delivery) -> tuple[list[Array], dict[str, Array]]:
    """Return the values and slots of a block, and its segments."""
    start, stop = table.bounds_of(part)
    n_slots, full = table.updater.n_slots, table.updater.n_full_slots
    sizes = [stop - start] * (1 + full) + [1] * (n_slots - full)
    return split(reply.body, sizes, table.dtype, table.name)
