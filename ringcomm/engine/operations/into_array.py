"""Collectives that write the result into an array of the caller, as torch.distributed needs.

Arguments are contiguous; only their number of elements matters, not their shape. All ranks pass
the same counts, so the ranks exchange no counts. The rest is as in the other operations.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ringcomm.arrays import DTYPES, AnyAdapter, Array, Flat, any_adapter_for, arrived
from ringcomm.arrays.base import is_same, overlap
from ringcomm.arrays.host_mirror import MIRROR
from ringcomm.collectives.algorithms import circulant, linear
from ringcomm.collectives.message_patterns import consecutive, from_own
from ringcomm.collectives.operators import ReductionOptions
from ringcomm.collectives.recording import perform
from ringcomm.engine.core.agreement import node_or
from ringcomm.engine.core.call import Call, checked_options
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.plan import Plan
from ringcomm.engine.operations.base import (
    A,
    Operation,
    extent_of,
    memory_of,
    plan,
    reduction_in_node,
    require_one_kind,
)
from ringcomm.errors import MismatchError
from ringcomm.transport.channel import Channel
from ringcomm.transport.node.steps import MOST_HEADER, NodeCopy, NodeExchange, Pulls, ShownByAll

# By rank: how many elements it sends to each rank, and how many it expects from each.
Table: TypeAlias = NDArray[np.int64]


def plan_allgather_into(
    group: Group, name: str | None, out: A, x: Array, counts: Sequence[int] | None = None
) -> Plan[A]:
    """Plan to fill `out` with the elements of all ranks' x, in rank order.

    Args:
        out: array with as many elements as the x of all ranks together.
        x: array of the same dtype; may be this rank's part of `out`.
        counts: number of elements of each rank's x; None: all have as many as this rank.
    """
    kind = "allgather_into"
    out, x = arrived(out), arrived(x)
    adapter, target, source = _pair(kind, out, x)
    adapter.require_writable(out)
    counts = [source.count] * group.size if counts is None else list(counts)
    parts = _parts_of(kind, counts, target.count, "out", group)
    if counts[group.index] != source.count:
        raise ValueError(
            f"{kind}: x has {source.count} elements, but {counts[group.index]} are due from it"
        )
    call = _call_of(kind, name, None, source.dtype.name, tuple(counts), place=adapter.place)
    return plan(AllgatherInto(group, call, adapter, x, out, target, source, parts))


@dataclass(slots=True, eq=False)
class AllgatherInto(Operation):
    out: Any
    target: Any  # memory of `out`, a Flat or a Span
    source: Any  # memory of x
    parts: list[slice]  # elements of `out` that come from each rank

    def on_host(self) -> Plan[Any]:
        """Return the plan; in a node it is one step."""
        group, adapter, out, parts = self.group, self.adapter, self.out, self.parts
        target, source = self.target, self.source
        own = target[parts[group.index]]
        others = [(group.index + shift) % group.size for shift in range(1, group.size)]
        if overlap(source, target) and not is_same(own, source):
            apart = source.like(source.count)  # `out` stays as it is until all ranks agree
            apart.bytes[:] = source.bytes
            source = apart
        takes_from = others if is_same(own, source) else [group.index, *others]
        choose = group.engine.selection.algorithm

        def finish(_: Channel | None = None) -> Any:
            adapter.written(out)
            return out

        async def run(t: Channel) -> Any:
            if takes_from is not others:
                t.copy(own, source)
            await perform(choose("allgather", target, t).allgather_, t, target, parts)
            return finish()

        step = NodeCopy(source.bytes, [(r, 0, target[parts[r]].bytes) for r in takes_from])
        nbytes = target.bytes.nbytes
        return Plan(self.call, nbytes, run, step, finish, acts_through_channel=True)

    def on_mirrors(self, mirrors: list[Any]) -> Plan[Any]:
        out, x = mirrors
        flats = {"target": out.flat, "source": x.flat}
        return replace(self, adapter=MIRROR, out=out, x=x, **flats).on_host()


def plan_reduce_scatter_into(
    group: Group,
    name: str | None,
    out: A,
    x: Array,
    options: ReductionOptions,
    *,
    counts: Sequence[int] | None = None,
) -> Plan[A]:
    """Plan to fill `out` with this rank's part of the reduction of x over all ranks.

    Args:
        out: array with as many elements as this rank gets; may overlap with x, or be part of x.
        x: array of the same dtype. Must not change until the operation is over.
        options: options of the reduction; both factors are 1.
        counts: number of elements that each rank gets; None: all get as many as `out` has.
    """
    adapter, target, source = _pair("reduce_scatter_into", out, x)
    adapter.require_writable(out)
    options = checked_options(options)
    options.require(source.dtype)
    counts = [target.count] * group.size if counts is None else list(counts)
    parts = _parts_of("reduce_scatter_into", counts, source.count, "x", group)
    if counts[group.index] != target.count:
        raise ValueError(
            f"reduce_scatter_into: out has {target.count} elements, but "
            f"this rank gets {counts[group.index]}"
        )
    call = _call_of(
        "reduce_scatter_into",
        name,
        options,
        source.dtype.name,
        tuple(counts),
        place=adapter.place,
    )
    return plan(ReduceScatterInto(group, call, adapter, x, out, target, source, parts, options))


@dataclass(slots=True, eq=False)
class ReduceScatterInto(Operation):
    out: Any
    target: Any  # memory of `out`, a Flat or a Span
    source: Any  # memory of x
    parts: list[slice]  # elements of x that each rank gets
    options: ReductionOptions

    def on_host(self) -> Plan[Any]:
        """Return the plan; in a node it is one step."""
        group, adapter, out, parts, options = (
            self.group,
            self.adapter,
            self.out,
            self.parts,
            self.options,
        )
        target, source = self.target, self.source
        choose = group.engine.selection.algorithm
        # Other ranks read x until the end, except for this rank's part.
        is_apart = not overlap(source, target) or is_same(source[parts[group.index]], target)
        result = target if is_apart else target.like(target.count)

        def finish(_: Channel | None = None) -> Any:
            if result is not target:
                target.bytes[:] = result.bytes
            adapter.written(out)
            return out

        async def run(t: Channel) -> Any:
            flat = source.like(source.count)
            t.copy(flat, source)
            algorithm = choose("reduce_scatter", flat, t, options)
            own = await perform(algorithm.reduce_scatter_, t, flat, parts, op=options.op)
            t.copy(target, own)
            adapter.written(out)
            return out

        step = reduction_in_node(source, result.bytes, options.op, group, parts=parts)
        nbytes = source.bytes.nbytes
        return Plan(self.call, nbytes, run, step, finish, acts_through_channel=True)

    def on_mirrors(self, mirrors: list[Any]) -> Plan[Any]:
        (x,) = mirrors
        out = MIRROR.empty(x, (self.target.count,))
        flats = {"target": out.flat, "source": x.flat}
        return replace(self, adapter=MIRROR, out=out, x=x, **flats).on_host()


def plan_alltoall_into(
    group: Group,
    name: str | None,
    out: A,
    x: Array,
    *,
    received: Sequence[int],
    sent: Sequence[int],
) -> Plan[A]:
    """Plan to fill `out` with the elements that all ranks send to this rank, in rank order.

    Args:
        out: array that does not overlap with x, because others read x while `out` is written.
        x: array of the same dtype.
        received: number of elements from each rank.
        sent: number of elements for each rank. If it differs from what that rank expects, all
            ranks raise MismatchError.
    """
    adapter, target, source = _pair("alltoall_into", out, x)
    adapter.require_writable(out)
    (to, to_nbytes), (at, at_nbytes) = extent_of(out, adapter), extent_of(x, adapter)
    if max(to, at) < min(to + to_nbytes, at + at_nbytes):
        raise ValueError(
            f"alltoall_into: out, {to_nbytes} bytes at {to:#x}, overlaps with x, {at_nbytes} bytes "
            f"at {at:#x}, which other ranks read while it is written. Pass an array of its own "
            "memory"
        )
    _parts_of("alltoall_into", list(sent), source.count, "x", group)
    _parts_of("alltoall_into", list(received), target.count, "out", group)
    call = _call_of("alltoall_into", name, None, source.dtype.name, (), place=adapter.place)
    return plan(
        AlltoallInto(group, call, adapter, x, out, target, source, list(sent), list(received))
    )


@dataclass(slots=True, eq=False)
class AlltoallInto(Operation):
    out: Any
    target: Any  # memory of `out`, a Flat or a Span
    source: Any  # memory of x
    sent: list[int]  # elements for each rank
    received: list[int]  # elements from each rank

    def on_host(self) -> Plan[Any]:
        """Return the plan; in a node it is one step."""
        adapter, out, target, source = self.adapter, self.out, self.target, self.source
        outgoing, incoming = consecutive(self.sent), consecutive(self.received)
        group, itemsize, wrong = self.group, source.dtype.itemsize, ""

        def table_of(shown: ShownByAll) -> Table:
            return np.array([np.frombuffer(each, np.int64) for each, _ in shown]).reshape(
                -1, 2, group.size
            )

        def pulls_from(shown: ShownByAll) -> Pulls:
            nonlocal wrong
            table, me = table_of(shown), group.index
            wrong = _disagreement(table, group.ranks)
            if wrong:
                step.goes_on = True
                return ()
            return [
                (r, int(table[r, 0, :me].sum()) * itemsize, target[incoming[r]].bytes)
                for r in from_own(me, group.size)
            ]

        def finish(_: Channel | None = None) -> Any:
            adapter.written(out)
            return out

        async def refuse(_: Channel) -> Any:
            raise MismatchError(wrong)

        async def run(t: Channel) -> Any:
            if not step.has_chosen:
                await self.require_alike(t)
            elif wrong:
                return await refuse(t)
            alltoall_ = node_or(linear, t).alltoall_
            await perform(alltoall_, t, source, outgoing, target, incoming)
            return finish()

        header, nbytes = np.array([self.sent, self.received], np.int64), source.bytes.nbytes
        step = NodeExchange(source.bytes, header.tobytes(), pulls_from)
        if header.nbytes > MOST_HEADER:
            return Plan(self.call, nbytes, run)
        return Plan(self.call, nbytes, run, step, finish, rest=refuse, acts_through_channel=True)

    def on_mirrors(self, mirrors: list[Any]) -> Plan[Any]:
        (x,) = mirrors
        out = MIRROR.empty(x, (self.target.count,))
        flats = {"target": out.flat, "source": x.flat}
        return replace(self, adapter=MIRROR, out=out, x=x, **flats).on_host()

    async def require_alike(self, t: Channel) -> NDArray[np.int64]:
        """Return how many elements each rank (row) sends to each. Collective.

        Raises:
            MismatchError: on every rank, if two ranks disagree.
        """
        return await _require_alike(self.sent, self.received, t)


async def _require_alike(sent: list[int], received: list[int], t: Channel) -> NDArray[np.int64]:
    """Return all ranks' `sent`. Raise MismatchError on every rank if two ranks disagree."""
    size = t.size
    table = np.zeros((size, 2, size), np.int64)
    table[t.rank] = sent, received
    rows = consecutive([2 * size] * size)
    flat = Flat(table.reshape(-1).view(np.uint8), DTYPES["int64"])
    await node_or(circulant, t).allgather_(flat, rows, t)
    if wrong := _disagreement(table, t.members):
        raise MismatchError(wrong)
    return table[:, 0]


def _disagreement(table: Table, ranks: Sequence[int]) -> str:
    """Return the text of the first two ranks that disagree; empty if none do."""
    wrong = np.argwhere(table[:, 0] != table[:, 1].T)
    if not len(wrong):
        return ""
    source, dest = map(int, wrong[0])
    return (
        f"alltoall: rank {ranks[source]} sends {table[source, 0, dest]} elements to rank "
        f"{ranks[dest]}, which expects {table[dest, 1, source]}. Pass splits of input and output "
        "that agree."
    )


def _pair(kind: str, out: Array, x: Array) -> tuple[Any, Any, Any]:
    """Check both arrays. Return the adapter of `out`, the memory of `out` and that of x."""
    adapters: tuple[AnyAdapter, ...] = any_adapter_for(out), any_adapter_for(x)
    require_one_kind(kind, adapters)
    for what, each, of in zip(("out", "x"), (out, x), adapters, strict=True):
        of.dtype(each)
        if not of.is_contiguous(each):
            raise ValueError(f"{kind}: {what} must be contiguous")
    target, source = memory_of(out, adapters[0]), memory_of(x, adapters[1])
    if target.dtype != source.dtype:
        raise TypeError(f"{kind}: out is {target.dtype}, x is {source.dtype}. Pass one dtype.")
    return adapters[0], target, source


def _parts_of(kind: str, counts: list[int], count: int, what: str, group: Group) -> list[slice]:
    """Return each rank's slice. Raises ValueError if the counts do not fit."""
    if len(counts) != group.size or sum(counts) != count or min(counts) < 0:
        raise ValueError(
            f"{kind}: the parts {counts} must be {group.size} numbers >= 0, one per rank, with the "
            f"sum {count}, the elements of {what}"
        )
    return consecutive(counts)


@functools.lru_cache(maxsize=4096)
def _call_of(
    kind: str,
    name: str | None,
    options: ReductionOptions | None,
    dtype: str,
    counts: tuple[int, ...],
    *,
    place: str | None = None,
) -> Call:
    """Return one Call for equal arguments, so that its fingerprint is computed once."""
    if len(set(counts)) <= 1:  # without counts, ranks may differ
        return Call(kind, name, options, dtype, counts[:1], place=place)
    members = tuple((dtype, (n,)) for n in counts)
    return Call(kind, name, options, dtype, (sum(counts),), members=members, place=place)
