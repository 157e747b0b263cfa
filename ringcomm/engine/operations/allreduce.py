"""Allreduce: every rank gets the reduction of all ranks' arrays."""

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
    written,
)
from ringcomm.engine.operations.scalars import takes_scalars
from ringcomm.transport.channel import Channel
from ringcomm.transport.node import To


@takes_scalars("allreduce")
def plan_allreduce(
    group: Group,
    name: str | None,
    x: A,
    options: ReductionOptions,
    *,
    in_place: bool = False,
    is_borrowed: bool = False,
) -> Plan[A]:
    """Plan an allreduce; the result is x itself if in_place. For is_borrowed see Reduction."""
    x = arrived(x)
    adapter = any_adapter_for(x)
    kind = "allreduce_" if in_place else "allreduce"
    call = reduction_call(kind, name, options, x, adapter)
    if in_place:
        adapter.require_writable(x)
    return plan(Allreduce(group, call, adapter, x, options, in_place, is_borrowed))


class Allreduce(ArrayReduction):
    __slots__ = ()
    to: ClassVar[To] = To.ALL

    def on_host(self) -> Plan[Any]:
        """Return the plan; in a node it is one step."""
        x, adapter, options, group = self.x, self.adapter, self.options, self.group
        if self.is_borrowed and not options.is_scaled:
            source = adapter.flat(contiguous(x, adapter))
            work = adapter.empty(x, adapter.shape(x))
            flat = adapter.flat(work)
        else:
            work, flat = self.working_copy()
            source = flat
        choose = group.engine.selection.algorithm

        def finish(t: Channel | None = None) -> Any:
            scale(flat, options.postscale)
            return written(x, work, adapter, t) if self.in_place else work

        async def run(t: Channel) -> Any:
            if source is not flat:
                t.copy(flat, source)
            algorithm = choose("allreduce", flat, t, options)
            await perform(algorithm.allreduce_, t, flat, op=options.op)
            return finish(t)

        step = reduction_in_node(source, flat.bytes, options.op, group)
        return Plan(
            self.call,
            flat.bytes.nbytes,
            run,
            step,
            finish,
            acts_through_channel=not options.is_scaled,
        )
