"""Reduce-scatter: every rank gets its rows of the reduction."""

from __future__ import annotations

from typing import Any, ClassVar

from ringcomm.arrays import any_adapter_for, arrived
from ringcomm.collectives.operators import ReductionOptions
from ringcomm.collectives.recording import perform
from ringcomm.collectives.scale_factors import scale
from ringcomm.engine.core.call import reduction_call
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.plan import Plan
from ringcomm.engine.operations.base import (
    A,
    ArrayReduction,
    contiguous,
    plan,
    reduction_in_node,
    require_rows,
    rows_by_rank,
    written,
)
from ringcomm.transport.channel import Channel
from ringcomm.transport.node import To


def plan_reduce_scatter(
    group: Group,
    name: str | None,
    x: A,
    options: ReductionOptions,
    *,
    in_place: bool = False,
    is_borrowed: bool = False,
) -> Plan[A]:
    """Plan a reduction of which each rank gets its rows; in place they are a view of x.

    In place, `options` has no factors. For is_borrowed see Reduction.
    """
    x = arrived(x)
    adapter = any_adapter_for(x)
    kind = "reduce_scatter_" if in_place else "reduce_scatter"
    call = reduction_call(kind, name, options, x, adapter)
    require_rows(adapter.shape(x), kind)
    if in_place:
        if not adapter.is_contiguous(x):
            raise ValueError(f"{kind} returns a view of x, so x must be contiguous: pass x.copy()")
        adapter.require_writable(x)
    return plan(ReduceScatter(group, call, adapter, x, options, in_place, is_borrowed))


class ReduceScatter(ArrayReduction):
    __slots__ = ()
    to: ClassVar[To] = To.OWNER
    mirrored: ClassVar[dict[str, Any]] = {"in_place": False, "is_borrowed": True}

    def on_host(self) -> Plan[Any]:
        """Return the plan; in a node it is one step."""
        x, adapter, group, options = self.x, self.adapter, self.group, self.options
        in_place = self.in_place
        is_borrowed = self.is_borrowed and not options.is_scaled
        shape = adapter.shape(x)
        if is_borrowed:
            work = contiguous(x, adapter)
            source = adapter.flat(work)
        else:
            work, source = self.working_copy()
        parts, mine = rows_by_rank(shape, group)
        out: Any = x[mine] if in_place else adapter.empty(x, (mine.stop - mine.start, *shape[1:]))
        target = adapter.flat(out)
        choose = group.engine.selection.algorithm

        def finish(t: Channel | None = None) -> Any:
            scale(target, options.postscale)
            if in_place:
                written(x, work, adapter, t)
            return out

        async def run(t: Channel) -> Any:
            flat = source
            if is_borrowed:
                flat = source.like(source.count)
                t.copy(flat, source)
            algorithm = choose("reduce_scatter", flat, t, options)
            own = await perform(algorithm.reduce_scatter_, t, flat, parts, op=options.op)
            if not in_place:
                t.copy(target, own)
            return finish(t)

        step = reduction_in_node(source, target.bytes, options.op, group, parts=parts)
        acts = not options.is_scaled
        return Plan(self.call, source.bytes.nbytes, run, step, finish, acts_through_channel=acts)
