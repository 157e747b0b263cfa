"""Broadcast: every rank gets root's array."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ringcomm.arrays import any_adapter_for, arrived
from ringcomm.arrays.base import Bytes
from ringcomm.collectives.algorithms import tree
from ringcomm.collectives.recording import perform
from ringcomm.engine.core.agreement import node_or
from ringcomm.engine.core.call import Call
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.plan import Plan
from ringcomm.engine.operations.base import A, Operation, contiguous, plan, rank_of, written
from ringcomm.engine.operations.scalars import takes_scalars
from ringcomm.transport.channel import Channel
from ringcomm.transport.node.steps import NodeCopy

_NO_BYTES: Bytes = np.empty(0, np.uint8)


@takes_scalars("broadcast")
def plan_broadcast(
    group: Group,
    name: str | None,
    x: A,
    root: int,
    *,
    in_place: bool = False,
    is_borrowed: bool = False,
) -> Plan[A]:
    """Plan a broadcast; the result is x itself if in_place.

    is_borrowed: the caller keeps x unchanged until the end, so no copy is needed.
    """
    x = arrived(x)
    adapter = any_adapter_for(x)
    root = rank_of("root", root, group)
    kind, dtype = "broadcast_" if in_place else "broadcast", adapter.dtype(x).name
    call = Call(kind, name, None, dtype, adapter.shape(x), root, place=adapter.place)
    if in_place and group.rank != root:
        adapter.require_writable(x)
    return plan(Broadcast(group, call, adapter, x, root, in_place, is_borrowed))


@dataclass(slots=True, eq=False)
class Broadcast(Operation):
    root: int
    in_place: bool  # x gets the result
    is_borrowed: bool = False
    mirrored: ClassVar[dict[str, Any]] = {"in_place": True}

    def on_host(self) -> Plan[Any]:
        """Return the plan; in a node it is one step."""
        x, adapter, root, in_place = self.x, self.adapter, self.root, self.in_place
        is_root = self.group.rank == root
        if in_place:
            work = contiguous(x, adapter)
        elif is_root and not self.is_borrowed:
            work = adapter.copy(x)
        else:
            work = adapter.empty(x, adapter.shape(x))
        flat = adapter.flat(work)
        is_copied = is_root and not in_place and self.is_borrowed
        source = adapter.flat(contiguous(x, adapter)) if is_copied else flat

        def finish(t: Channel | None = None) -> Any:
            if in_place and not is_root:
                return written(x, work, adapter, t)
            return x if in_place else work

        async def run(t: Channel) -> Any:
            if source is not flat:
                t.copy(flat, source)
            await perform(node_or(tree, t).broadcast_, t, flat, root)
            return finish(t)

        pulls = [] if is_root and source is flat else [(root, 0, flat.bytes)]
        step = NodeCopy(source.bytes if is_root else _NO_BYTES, pulls)
        return Plan(self.call, flat.bytes.nbytes, run, step, finish, acts_through_channel=True)
