"""What an updater keeps beside the values of a dense table: read, and replaced."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringcomm.ps.client import Ask
from ringcomm.ps.frames import Kind
from ringcomm.ps.future import Future
from ringcomm.ps.segments import merged
from ringcomm.ps.state import State

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.dense import DensePartition
    from ringcomm.ps.link import Delivery
    from ringcomm.ps.table import Table

Array = NDArray[Any]


@dataclass(frozen=True)
class TableState:
    """A dense table and what its updater keeps beside it.

    Attributes:
        steps: updates that the updater has made; of the partition with the most.
        values: shape (elements,), of the table's dtype.
        slots: by name: shape (elements,), or (1,) where a slot has one number per block; those are
            alike in all blocks.
        segments: what segments.arrays() tells, of the whole table; empty if it has none.
    """

    steps: int
    values: Array
    slots: dict[str, Array]
    segments: dict[str, Array] = field(default_factory=dict)


def pull_state(table: Table) -> TableState:
    """Return the state of a table; of each partition as it is at one moment.

    Raises:
        CommTimeoutError: no server answers.
    """
    pieces: list[_Told] = []
    for part in range(table.n_partitions):
        pieces.append(_ask(table, Ask(Kind.STATE, (table.number, part)), part))
    steps = max(each.steps for each in pieces)
    arrays = [each.arrays for each in pieces]
    full = table.updater.n_full_slots
    slots = {
        name: np.concatenate([each[1 + k] for each in arrays]) if k < full else arrays[0][1 + k]
        for k, name in enumerate(table.updater.slot_names)
    }
    segments = merged([each.segments for each in pieces])
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
        body = _joined([state.values[start:stop], *slots], table.dtype, state.segments)
        staged = table.staged(body, part)
        _ask(table, Ask(Kind.STATE, (table.number, part), meta=meta, body=staged), part)


def packed(part: DensePartition) -> tuple[bytes, Bytes]:
    """Return a partition's state as meta and body of a reply."""
    segments = {} if part.segments is None else part.segments.arrays()
    body = _joined([part.values, *part.slots], part.dtype, segments)
    return json.dumps({"steps": part.steps}).encode(), body


def load(part: DensePartition, meta: bytes, body: Bytes) -> None:
    """Let a partition have the state that a request brings.

    Raises:
        ValueError: it does not fit; nothing is changed.
    """
    sizes = [part.count, *(len(slot) for slot in part.slots)]
    (values, *slots), segments = _split(body, sizes, part.dtype, part.spec.name)
    arrays = {"values": values, **{f"slot{k}": slot for k, slot in enumerate(slots)}}
    part.load(State({"steps": json.loads(meta)["steps"]}, {**arrays, **segments}))


class _Told(NamedTuple):
    """What a block has told of its state; see TableState."""

    steps: int
    arrays: list[Array]
    segments: dict[str, Array]


def _ask(table: Table, ask: Ask, part: int) -> _Told:
    """Carry out one request; return the reply to one that reads."""
    found: list[_Told] = []
    start, stop = table.bounds_of(part)
    sizes = [stop - start]
    for k in range(table.updater.n_slots):
        sizes.append(stop - start if k < table.updater.n_full_slots else 1)

    def note(reply: Delivery) -> None:
        if reply.body.nbytes:
            arrays, segments = _split(reply.body, sizes, table.dtype, table.name)
            steps = json.loads(reply.meta)["steps"]
            found.append(_Told(steps, [each.copy() for each in arrays], segments))

    ask.on_reply = note
    client = table.client
    label = f"state[{table.name}]"
    future: Future[None] = Future(client, label, 1, lambda: None, client.timestamp())
    client.ask([ask], future)
    future.wait()
    return found[0] if found else _Told(0, [np.empty(n, table.dtype) for n in sizes], {})


def _joined(arrays: list[Array], dtype: np.dtype[Any], segments: dict[str, Array]) -> Bytes:
    """Return numbers as bytes; behind them the segments, if there are any."""
    joined: Bytes = np.concatenate([np.asarray(each, dtype) for each in arrays]).view(np.uint8)
    return np.concatenate([joined, *State({}, segments).packed()]) if segments else joined


def _split(
    body: Bytes, sizes: list[int], dtype: np.dtype[Any], name: str
) -> tuple[list[Array], dict[str, Array]]:
    nbytes = sum(sizes) * dtype.itemsize
    if body.nbytes < nbytes:
        raise ValueError(f"state[{name}]: {body.nbytes // dtype.itemsize} numbers came for {sizes}")
    flat, rest = body[:nbytes].view(dtype), body[nbytes:]
    segments = State.unpacked(rest.copy()).arrays if rest.nbytes else {}
    bounds = np.cumsum([0, *sizes])
    return [flat[a:b] for a, b in itertools.pairwise(bounds)], segments
