"""Scatter: every rank gets its rows of root's array."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from ringcomm.arrays import (
    DTYPES,
    Array,
    adapter_for,
    adapter_of_kind,
    any_adapter_for,
    arrived,
    is_device_kind,
)
from ringcomm.arrays.base import Bytes
from ringcomm.arrays.dtypes import DType
from ringcomm.collectives.algorithms import linear
from ringcomm.collectives.message_patterns import chunks
from ringcomm.collectives.recording import perform
from ringcomm.engine.core.agreement import broadcast_bytes, node_or
from ringcomm.engine.core.call import Call
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.plan import Plan
from ringcomm.engine.operations.base import (
    A,
    Operation,
    contiguous,
    device_executor,
    note_current_gpu,
    rank_of,
    require_rows,
)
from ringcomm.transport.channel import Channel
from ringcomm.transport.node.steps import NodeExchange, Pulls, ShownByAll

_NO_BYTES: Final[Bytes] = np.empty(0, np.uint8)


def plan_scatter(  # noqa: PLR0917 - the group and the name come first, as for all plans
    group: Group,
    name: str | None,
    x: A | None,
    root: int,
    due: tuple[str | None, tuple[int | None, ...] | None] = (None, None),
    into: A | None = None,
) -> Plan[A]:
    """Plan the distribution of root's rows; the other ranks pass no array.

    Args:
        due: dtype and shape of what each rank gets, if the ranks are to agree on them.
        into: contiguous array of that dtype and size in host memory, which gets them; it does not
            overlap with x. If root's x is on a GPU, the result is a new array nevertheless.
    """
    x, root = arrived(x), rank_of("root", root, group)
    dtype, shape = due
    call = Call("scatter", name, None, dtype, shape, root)
    if group.rank != root:
        note_current_gpu(group.engine)  # root's array may be on a GPU
        return Scatter(group, call, None, None, root, "", into).on_host()
    adapter = any_adapter_for(x)
    adapter.dtype(x)  # refuses what cannot be sent, before it is copied
    require_rows(adapter.shape(x), "scatter")
    made = Scatter(group, call, adapter, x, root, adapter.kind, into)
    return made.on_host() if adapter.place is None else device_executor().plan(made)


@dataclass(slots=True, eq=False)
class Scatter(Operation):
    root: int
    kind: str  # on root: the kind of arrays that all ranks get
    into: Any = None  # array of the caller that gets the result

    def on_host(self) -> Plan[Any]:
        """Return the plan; root tells kind, dtype and shape of its array, in a node with it."""
        group, root, adapter = self.group, self.root, self.adapter
        whole, outline = None, b""
        if group.rank == root:
            whole = adapter.flat(contiguous(self.x, adapter))
            outline = json.dumps([self.kind, whole.dtype.name, adapter.shape(self.x)]).encode()
        told = outline
        out: Any = None

        def make(due: _Due) -> Any:
            return due.make() if self.into is None else self.into

        def finish(_: Channel | None = None) -> Any:
            if self.into is not None:
                adapter_for(out).written(out)
            return out

        def pulls_from(shown: ShownByAll) -> Pulls:
            nonlocal told, out
            told = shown[root][0]
            due = _Due.of(told, group)
            step.goes_on = is_device_kind(due.kind)
            if step.goes_on:
                return ()
            out = make(due)
            into = adapter_for(out).flat(out)
            return [(root, due.parts[group.index].start * into.dtype.itemsize, into.bytes)]

        async def fetch(t: Channel) -> Any:
            nonlocal out
            due = _Due.of(told, group)

            async def fill(made: Array) -> None:
                flat = adapter_for(made).flat(made)
                await perform(node_or(linear, t).scatter_, t, whole, flat, due.parts, root)

            if not is_device_kind(due.kind):
                out = make(due)
                await fill(out)
                return finish()
            on_gpu, staging = device_executor().make(group, due.kind, due.dtype, due.shape)
            return await staging.bring(t, out=on_gpu, fill=fill, finish=lambda: on_gpu)

        async def run(t: Channel) -> Any:
            nonlocal told
            if not step.has_chosen:
                told = await broadcast_bytes(outline, root, t)
            return await fetch(t)

        if whole is None:
            step = NodeExchange(_NO_BYTES, b"", pulls_from)
        elif is_device_kind(self.kind):
            step = NodeExchange(_NO_BYTES, outline, None, goes_on=True)
        else:
            step = NodeExchange(whole.bytes, outline, pulls_from)
        nbytes = 0 if whole is None else whole.bytes.nbytes
        return Plan(self.call, nbytes, run, step, finish, rest=fetch, acts_through_channel=True)


class _Due(NamedTuple):
    """What a rank gets of root's array.

    Attributes:
        parts: by rank, elements of root's array.
    """

    kind: str
    dtype: DType
    shape: tuple[int, ...]
    parts: list[slice]

    @classmethod
    def of(cls, outline: bytes, group: Group) -> _Due:
        kind, dtype, shape = json.loads(outline)
        rows, width = chunks(shape[0], group.size), math.prod(shape[1:])
        mine = rows[group.index]
        parts = [slice(part.start * width, part.stop * width) for part in rows]
        return cls(kind, DTYPES[dtype], (mine.stop - mine.start, *shape[1:]), parts)

    def make(self) -> Any:
        return adapter_of_kind(self.kind).make(self.dtype, self.shape)
