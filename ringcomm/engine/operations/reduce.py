"""Reduce: one rank gets the reduction of all ranks' arrays."""

from __future__ import annotations

from typing import Any, ClassVar

from ringcomm.arrays import any_adapter_for, arrived
from ringcomm.collectives.algorithms import linear, node
from ringcomm.collectives.message_patterns import chunks
from ringcomm.collectives.operators import ReductionOptions
from ringcomm.collectives.recording import perform
from ringcomm.engine.core.agreement import node_or
from ringcomm.engine.core.call import reduction_call
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.plan import Plan
from ringcomm.engine.operations.base import (
    A,
    ArrayReduction,
    contiguous,
    plan,
    rank_of,
    reduction_in_node,
    written,
)
from ringcomm.engine.operations.scalars import takes_scalars
from ringcomm.transport.channel import Channel
from ringcomm.transport.node import To


@takes_scalars("reduce")
def plan_reduce(
    group: Group,
    name: str | None,
    x: A,
    options: ReductionOptions,
    root: int,
    *,
    in_place: bool = False,
    is_borrowed: bool = False,
) -> Plan[Any]:
    """Plan a reduction for root; in place, x of the other ranks stays as it is.

    For is_borrowed see ArrayReduction.
    """
    x = arrived(x)
    adapter = any_adapter_for(x)
    root = rank_of("root", root, group)
    call = reduction_call("reduce_" if in_place else "reduce", name, options, x, adapter, root)
    if in_place and group.rank == root:
        adapter.require_writable(x)
    return plan(Reduce(group, call, adapter, x, options, in_place, is_borrowed, root))


class Reduce(ArrayReduction):
    __slots__ = ()
    to: ClassVar[To] = To.ROOT

    def on_host(self) -> Plan[Any]:
        """Return the plan: in a node one step, else a reduce-scatter, and a gather at root."""
        x, adapter, group, root = self.x, self.adapter, self.group, self.root
        options, in_place = self.options, self.in_place
        is_root = group.rank == root
        is_kept = not (in_place and is_root)  # x is not overwritten
        if is_kept and self.is_borrowed and not options.is_scaled:
            source = adapter.flat(contiguous(x, adapter))
            work = adapter.empty(x, adapter.shape(x))
            flat = adapter.flat(work)
        elif in_place and not is_root:
            work = adapter.copy(x)
            source = flat = adapter.flat(work)
        else:
            work, flat = self.working_copy()
            source = flat
        out = flat if is_root else None
        choose = group.engine.selection.algorithm

        def finish(t: Channel | None = None) -> Any:
            if in_place:
                return written(x, work, adapter, t) if is_root else x
            return work if is_root else None

        async def run(t: Channel) -> Any:
            algorithm = choose("reduce_scatter", flat, t, options)
            if algorithm is node:
                await node.reduce(source, out, root, t, options.op)
            else:
                if source is not flat:
                    t.copy(flat, source)
                parts = chunks(flat.count, t.size)
                own = await perform(algorithm.reduce_scatter_, t, flat, parts, op=options.op)
                await perform(node_or(linear, t).gather_, t, out, own, parts, root)
            return finish(t)

        target = None if out is None else out.bytes
        step = reduction_in_node(source, target, options.op, group, root=root)
        acts = not options.is_scaled
        return Plan(self.call, flat.bytes.nbytes, run, step, finish, acts_through_channel=acts)
