"""Plans of collectives that write into memory of the caller: nothing is counted or allocated.

Arguments are contiguous; their shapes do not matter, only how many elements they have. Who gets
how many of them is said by every rank, alike. Like the other operations otherwise; for faces whose
API passes the results' memory in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ringcomm.arrays import (
    DTYPES,
    AnyAdapter,
    Array,
    Flat,
    adapter_for,
    any_adapter_for,
    arrived,
)
from ringcomm.arrays.base import is_same, overlap
from ringcomm.arrays.mirror import MIRROR
from ringcomm.collectives.algorithms import circulant, linear
from ringcomm.collectives.op import ReductionOptions
from ringcomm.collectives.recording import perform
from ringcomm.collectives.schedule import consecutive
from ringcomm.engine.core.agreement import node_or
from ringcomm.engine.core.call import Call, checked_options
from ringcomm.engine.core.execution import Plan
from ringcomm.engine.core.group import Group
from ringcomm.engine.executors.device import plan
from ringcomm.engine.operations.base import A, Operation, memory_of, require_one_kind
from ringcomm.engine.operations.reduction import reduction_in_node
from ringcomm.errors import MismatchError
from ringcomm.transport.channel import Channel
from ringcomm.transport.node.steps import NodeCopy


def plan_allgather_into(
    group: Group, name: str | None, out: A, x: Array, counts: Sequence[int] | None = None
) -> Plan[A]:
    """Plan to fill `out` with the elements of all ranks' x, in rank order.

    Args:
        out: as many elements as all x together.
        x: the same dtype; may be its own part of `out`.
        counts: how many elements each rank gives; None: as many as x has.
    """
    kind = "allgather_into"
    out, x = arrived(out), arrived(x)
    adapter, target, source = _pair(kind, out, x, any_adapter_for)
    adapter.require_writable(out)
    counts = [source.count] * group.size if counts is None else list(counts)
    parts = _parts_of(kind, counts, target.count, "out", group)
    if counts[group.index] != source.count:
        raise ValueError(
            f"{kind}: x has {source.count} elements, and this rank is to give {counts[group.index]}"
        )
    call = _call_of(kind, name, None, source.dtype.name, tuple(counts), place=adapter.place)
    return plan(AllgatherInto(group, call, adapter, x, out, target, source, parts))


@dataclass(slots=True, eq=False)
class AllgatherInto(Operation):
    """An allgather into memory of the caller."""

    out: Any  # gets all ranks' elements
    target: Any  # its memory, a Flat or a Span
    source: Any  # that of x
    parts: list[slice]  # which elements of `out` are whose

    def on_host(self) -> Plan[Any]:
        """Plan it; in a node it is one step."""
        group, adapter, out, parts = self.group, self.adapter, self.out, self.parts
        target, source = self.target, self.source
        own = target[parts[group.index]]
        if own.bytes.ctypes.data != source.bytes.ctypes.data:
            own.bytes[:] = source.bytes
        choose = group.engine.selection.algorithm

        def finish(_: Channel | None = None) -> Any:
            adapter.written(out)
            return out

        async def run(t: Channel) -> Any:
            await perform(choose("allgather", target, t).allgather_, t, target, parts)
            return finish()

        others = [(group.index + shift) % group.size for shift in range(1, group.size)]
        step = NodeCopy(own.bytes, [(r, 0, target[parts[r]].bytes) for r in others])
        return Plan(self.call, target.bytes.nbytes, run, step, finish)

    def on_mirrors(self, mirrors: list[Any]) -> Plan[Any]:
        """Return how a mirror of `out` is filled."""
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
        out: as many elements as are due to this rank; may overlap with x, as its own part does.
        x: the same dtype. Left alone otherwise, and must stay as it is until the operation is over.
        options: as for allreduce(), without factors.
        counts: how many elements each rank gets; None: as many as `out` has.
    """
    adapter, target, source = _pair("reduce_scatter_into", out, x, adapter_for)
    adapter.require_writable(out)
    options = checked_options(options)
    options.require(source.dtype)
    counts = [target.count] * group.size if counts is None else list(counts)
    parts = _parts_of("reduce_scatter_into", counts, source.count, "x", group)
    if counts[group.index] != target.count:
        raise ValueError(
            f"reduce_scatter_into: out has {target.count} elements, and "
            f"{counts[group.index]} are due to this rank"
        )
    choose = group.engine.selection.algorithm
    # Other ranks read x until the end, but for this rank's part.
    is_apart = not overlap(source, target) or is_same(source[parts[group.index]], target)
    made = target if is_apart else target.like(target.count)

    def finish(_: Channel | None = None) -> A:
        if made is not target:
            target.bytes[:] = made.bytes
        adapter.written(out)
        return out

    async def run(t: Channel) -> A:
        flat = source.like(source.count)
        t.copy(flat, source)
        algorithm = choose("reduce_scatter", flat, t, is_deterministic=options.deterministic)
        own = await perform(algorithm.reduce_scatter_, t, flat, parts, op=options.op)
        t.copy(made, own)
        return finish()

    step = reduction_in_node(source, made.bytes, options.op, group, parts)
    call = _call_of("reduce_scatter_into", name, options, source.dtype.name, tuple(counts))
    return Plan(call, source.bytes.nbytes, run, step, finish)


def plan_alltoall_into(
    group: Group,
    name: str | None,
    out: A,
    x: Array,
    *,
    received: Sequence[int],
    sent: Sequence[int],
) -> Plan[A]:
    """Plan to fill `out` with the elements that every rank has for this one, in rank order.

    Args:
        out: must not overlap with x, which other ranks read while it is written.
        x: the same dtype.
        received: how many elements come from each rank.
        sent: how many elements go to each rank. A rank that expects another number than is sent
            to it is a MismatchError on all ranks.
    """
    adapter, target, source = _pair("alltoall_into", out, x, adapter_for)
    adapter.require_writable(out)
    if overlap(source, target):
        raise ValueError(
            f"alltoall_into: out, {target.bytes.nbytes} bytes at {target.bytes.ctypes.data:#x}, "
            f"overlaps with x, {source.bytes.nbytes} bytes at {source.bytes.ctypes.data:#x}, which "
            "other ranks read while it is written. Pass an array of its own memory"
        )
    outgoing = _parts_of("alltoall_into", list(sent), source.count, "x", group)
    incoming = _parts_of("alltoall_into", list(received), target.count, "out", group)

    async def run(t: Channel) -> A:
        await _require_alike(list(sent), list(received), t)
        alltoall_ = node_or(linear, t).alltoall_
        await perform(alltoall_, t, source, outgoing, target, incoming)
        adapter.written(out)
        return out

    call = _call_of("alltoall_into", name, None, source.dtype.name, ())
    return Plan(call, source.bytes.nbytes, run)


async def _require_alike(sent: list[int], received: list[int], t: Channel) -> None:
    """Raise on every rank if any of them expects another count than is sent to it."""
    size = t.size
    table = np.zeros((size, 2, size), np.int64)
    table[t.rank] = sent, received
    rows = consecutive([2 * size] * size)
    flat = Flat(table.reshape(-1).view(np.uint8), DTYPES["int64"])
    await node_or(circulant, t).allgather_(flat, rows, t)
    wrong = np.argwhere(table[:, 0] != table[:, 1].T)
    if len(wrong):
        source, dest = map(int, wrong[0])
        raise MismatchError(
            f"alltoall: rank {t.members[source]} sends {table[source, 0, dest]} elements to rank "
            f"{t.members[dest]}, which expects {table[dest, 1, source]}. Let the splits of input "
            "and output agree."
        )


def _pair(
    kind: str, out: Array, x: Array, find: Callable[[Array], AnyAdapter]
) -> tuple[Any, Any, Any]:
    """Return the adapter of `out`, and both memories: contiguous, of one dtype, in one place."""
    adapters = find(out), find(x)
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
    """Return whose which elements are. Raises ValueError if the counts do not fit."""
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
    """Return the same Call each time, so that its fingerprint is computed once."""
    if len(set(counts)) <= 1:  # none: ranks may differ
        return Call(kind, name, options, dtype, counts[:1], place=place)
    members = tuple((dtype, (n,)) for n in counts)
    return Call(kind, name, options, dtype, (sum(counts),), members=members, place=place)
