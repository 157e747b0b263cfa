"""Scatter: every rank gets its rows of root's array."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from ringcomm.arrays import (
    DTYPES,
    Array,
    adapter_for,
    adapter_of_kind,
    any_adapter_for,
    arrived,
    is_device_kind,
)
from ringcomm.collectives.algorithms import linear
from ringcomm.collectives.message_patterns import chunks
from ringcomm.collectives.recording import perform
from ringcomm.engine.core.agreement import broadcast_bytes, node_or
from ringcomm.engine.core.call import Call
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.plan import Plan
from ringcomm.engine.executors.gpu_loader import device_executor, note_current_gpu
from ringcomm.engine.operations.base import A, Operation, contiguous, rank_of, require_rows
from ringcomm.transport.channel import Channel


def plan_scatter(
    group: Group,
    name: str | None,
    x: A | None,
    root: int,
    due: tuple[str | None, tuple[int | None, ...] | None] = (None, None),
) -> Plan[A]:
    """Plan the distribution of root's rows; the other ranks pass no array.

    due: dtype and shape of what each rank gets, if the ranks are to agree on them.
    """
    x, root = arrived(x), rank_of("root", root, group)
    dtype, shape = due
    call = Call("scatter", name, None, dtype, shape, root)
    if group.rank != root:
        note_current_gpu(group.engine)  # root's array may be on a GPU
        return Scatter(group, call, None, None, root, "").on_host()
    adapter = any_adapter_for(x)
    adapter.dtype(x)  # refuses what cannot be sent, before it is copied
    require_rows(adapter.shape(x), "scatter")
    made = Scatter(group, call, adapter, x, root, adapter.kind)
    return made.on_host() if adapter.place is None else device_executor().plan(made)


@dataclass(slots=True, eq=False)
class Scatter(Operation):
    root: int
    kind: str  # on root: the kind of arrays that all ranks get

    def on_host(self) -> Plan[Any]:
        """Return the plan; root first announces kind, dtype and shape of its array."""
        group, root, adapter = self.group, self.root, self.adapter
        whole, outline = None, b""
        if group.rank == root:
            whole = adapter.flat(contiguous(self.x, adapter))
            outline = json.dumps([self.kind, whole.dtype.name, adapter.shape(self.x)]).encode()

        async def run(t: Channel) -> Any:
            kind, dtype_name, shape = json.loads(await broadcast_bytes(outline, root, t))
            rows = chunks(shape[0], t.size)
            width = math.prod(shape[1:])
            mine = rows[t.rank]
            due = DTYPES[dtype_name], (mine.stop - mine.start, *shape[1:])
            parts = [slice(part.start * width, part.stop * width) for part in rows]

            async def fill(made: Array) -> None:
                flat = adapter_for(made).flat(made)
                await perform(node_or(linear, t).scatter_, t, whole, flat, parts, root)

            if is_device_kind(kind):
                out, staging = device_executor().make(group, kind, *due)
                return await staging.bring(t, out=out, fill=fill, finish=lambda: out)
            out = adapter_of_kind(kind).make(*due)
            await fill(out)
            return out

        return Plan(self.call, 0 if whole is None else whole.bytes.nbytes, run)
