"""Collectives of several arrays: one agreement for all; arrays of one dtype are reduced as one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringcomm.arrays import Flat, any_adapter_for, arrived
from ringcomm.collectives.fusion import Item, plan_fusion
from ringcomm.collectives.message_patterns import consecutive
from ringcomm.collectives.operators import ReductionOptions
from ringcomm.collectives.recording import perform
from ringcomm.collectives.scale_factors import scale
from ringcomm.engine.core.call import Call, reduction_call
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.plan import AllDeferred, Plan
from ringcomm.engine.operations.allgather_and_gather import plan_allgather
from ringcomm.engine.operations.base import (
    A,
    GroupedOperation,
    contiguous,
    extent_of,
    listed,
    plan,
    require_one_kind,
    written,
)
from ringcomm.engine.operations.reduce_scatter import plan_reduce_scatter
from ringcomm.transport.channel import Channel


def plan_grouped_allreduce(
    group: Group,
    name: str | None,
    xs: Sequence[A],
    options: ReductionOptions,
    *,
    in_place: bool = False,
) -> Plan[list[A]]:
    """Plan an allreduce of several arrays, fused where they share a dtype."""
    kind = "grouped_allreduce_" if in_place else "grouped_allreduce"
    xs = arrived(listed(kind, xs))
    adapters = [any_adapter_for(x) for x in xs]
    require_one_kind(kind, adapters)
    pairs = list(zip(xs, adapters, strict=True))
    calls = [reduction_call(kind, None, options, x, adapter) for x, adapter in pairs]
    if in_place:
        if len({id(x) for x in xs}) < len(xs):
            raise ValueError(f"{kind}: the same array is passed twice: it can be reduced only once")
        for x, adapter in pairs:
            adapter.require_writable(x)
        extents = sorted(extent_of(x, a) for x, a in pairs if a.is_contiguous(x))
        if any(at + nbytes > after for (at, nbytes), (after, _) in itertools.pairwise(extents)):
            raise ValueError(
                f"{kind}: two arrays overlap in memory, which can be reduced only once"
            )
    call = grouped_call(kind, name, calls)
    return plan(GroupedAllreduce(group, call, adapters, xs, options, in_place))


class GroupedAllreduce(GroupedOperation):
    __slots__ = ()

    def batches(self, items: Sequence[Item]) -> list[list[int]]:
        return plan_fusion(items, self.group.engine.settings.fusion_nbytes(self.call.place))

    def on_host(self) -> Plan[Any]:
        """Return the plan; it copies the arrays of a batch into one array."""
        options, group, in_place = self.options, self.group, self.in_place
        pairs = list(zip(self.x, self.adapter, strict=True))
        stays = in_place and not options.is_scaled
        work = [contiguous(x, a) if stays else a.copy(x) for x, a in pairs]
        flats = [a.flat(each) for each, (_, a) in zip(work, pairs, strict=True)]
        for flat in flats:
            scale(flat, options.own_prescale)
        items = [Item(flat.bytes.nbytes, flat.dtype.name) for flat in flats]
        batches = self.batches(items)
        choose = group.engine.selection.algorithm

        async def run(t: Channel) -> list[Any]:
            for batch in batches:
                parts = [flats[i] for i in batch]
                fused = parts[0]
                if len(parts) > 1:
                    with t.phase("copy"):
                        fused = Flat(np.concatenate([part.bytes for part in parts]), fused.dtype)
                algorithm = choose("allreduce", fused, t, options)
                await perform(algorithm.allreduce_, t, fused, op=options.op)
                scale(fused, options.postscale)
                if len(parts) > 1:
                    places = consecutive([part.count for part in parts])
                    with t.phase("copy"):
                        for part, place in zip(parts, places, strict=True):
                            part.bytes[:] = fused[place].bytes
            if not in_place:
                return work
            return [written(x, w, a, t) for (x, a), w in zip(pairs, work, strict=True)]

        return Plan(self.call, sum(item.nbytes for item in items), run)


def plan_grouped_allgather(group: Group, name: str | None, xs: Sequence[A]) -> Plan[list[A]]:
    kind = "grouped_allgather"
    return plan_grouped(kind, name, [plan_allgather(group, None, x) for x in listed(kind, xs)])


def plan_grouped_reduce_scatter(
    group: Group, name: str | None, xs: Sequence[A], options: ReductionOptions
) -> Plan[list[A]]:
    kind = "grouped_reduce_scatter"
    each = [plan_reduce_scatter(group, None, x, options) for x in listed(kind, xs)]
    return plan_grouped(kind, name, each)


def plan_grouped(kind: str, name: str | None, plans: list[Plan[A]]) -> Plan[list[A]]:
    waits = any(each.agrees_first for each in plans)

    async def run(t: Channel) -> Any:
        results = [await each.carry_out(t) for each in plans]
        return AllDeferred(results) if waits else results

    call = grouped_call(kind, name, [each.call for each in plans])
    return Plan(call, sum(each.nbytes for each in plans), run, agrees_first=waits)


def grouped_call(kind: str, name: str | None, calls: Sequence[Call]) -> Call:
    members = tuple((call.dtype or "", call.shape or ()) for call in calls)
    places = {call.place for call in calls}
    if len(places) > 1:
        raise TypeError(f"{kind}: some arrays are on a GPU, some in host memory. Pass one kind.")
    options = calls[0].reduction if calls else None
    place = calls[0].place if calls else None
    return Call(kind, name, options, members=members, place=place)
