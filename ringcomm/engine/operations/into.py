"""Plans of collectives that write into memory of the caller: nothing is counted or allocated.

Arguments are contiguous; their shapes do not matter, only how many elements they have. Who gets
how many of them is said by every rank, alike. Like those of plans.py otherwise; for faces whose
API passes the results' memory in.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from ringcomm.arrays import DTYPES, Array, ArrayAdapter, DType, Flat, adapter_for
from ringcomm.arrays.base import is_same, overlap
from ringcomm.collectives.algorithms import circulant, linear
from ringcomm.collectives.op import Op
from ringcomm.collectives.recording import perform
from ringcomm.collectives.schedule import consecutive
from ringcomm.engine.core.agreement import module
from ringcomm.engine.core.call import Call, call_of_reduction
from ringcomm.engine.core.execution import Plan
from ringcomm.engine.core.group import Group
from ringcomm.engine.operations import plans
from ringcomm.errors import MismatchError
from ringcomm.transport.channel import Channel
from ringcomm.transport.node.steps import NodeCopy

A = TypeVar("A", bound=Any)


@plans.wherever
def allgather_into(
    group: Group, name: str | None, out: A, x: Array, counts: Sequence[int] | None = None
) -> Plan[A]:
    """Plan to fill `out` with the elements of all ranks' x, in rank order.

    Args:
        group: who takes part.
        name: see ringcomm.engine.api.collectives.
        out: as many elements as all x together.
        x: the same dtype; may be its own part of `out`.
        counts: how many elements each rank gives; None: as many as x has.
    """
    adapter, target, source = _pair("allgather_into", out, x)
    adapter.require_writable(out)
    counts = [source.count] * group.size if counts is None else list(counts)
    parts = parts_of("allgather_into", counts, target.count, "out", group)
    require_own(counts, source.count, group)
    own = target[parts[group.index]]
    if own.bytes.ctypes.data != source.bytes.ctypes.data:
        own.bytes[:] = source.bytes
    choose = group.engine.selection.algorithm

    def finish(t: Channel | None = None) -> A:
        del t
        adapter.written(out)
        return out

    async def run(t: Channel) -> A:
        await perform(choose("allgather", target, t).allgather_, t, target, parts)
        return finish()

    others = [(group.index + shift) % group.size for shift in range(1, group.size)]
    step = NodeCopy(own.bytes, [(r, 0, target[parts[r]].bytes) for r in others])
    call = call_of("allgather_into", name, None, source.dtype.name, tuple(counts))
    return Plan(call, target.bytes.nbytes, run, step, finish)


def reduce_scatter_into(
    group: Group,
    name: str | None,
    out: A,
    x: Array,
    op: Op,
    *,
    counts: Sequence[int] | None = None,
) -> Plan[A]:
    """Plan to fill `out` with this rank's part of the reduction of x over all ranks.

    Args:
        group: who takes part.
        name: see ringcomm.engine.api.collectives.
        out: as many elements as are due to this rank; may overlap with x, as its own part does.
        x: the same dtype. Left alone otherwise, and must stay as it is until the operation is over.
        op: as for allreduce().
        counts: how many elements each rank gets; None: as many as `out` has.
    """
    adapter, target, source = _pair("reduce_scatter_into", out, x)
    adapter.require_writable(out)
    if not isinstance(op, Op):
        raise TypeError(f"op must be one of ringcomm.{', '.join(map(str, Op))}, not {op!r}")
    op.require(source.dtype)
    counts = [target.count] * group.size if counts is None else list(counts)
    parts = parts_of("reduce_scatter_into", counts, source.count, "x", group)
    if counts[group.index] != target.count:
        raise ValueError(
            f"reduce_scatter_into: out has {target.count} elements, and "
            f"{counts[group.index]} are due to this rank"
        )
    choose = group.engine.selection.algorithm
    # Other ranks read x until the end, but for this rank's part.
    is_apart = not overlap(source, target) or is_same(source[parts[group.index]], target)
    made = target if is_apart else target.like(target.count)

    def finish(t: Channel | None = None) -> A:
        del t
        if made is not target:
            target.bytes[:] = made.bytes
        adapter.written(out)
        return out

    async def run(t: Channel) -> A:
        flat = source.like(source.count)
        t.copy(flat, source)
        algorithm = choose("reduce_scatter", flat, t)
        own = await perform(algorithm.reduce_scatter_, t, flat, parts, op=op)
        t.copy(made, own)
        return finish()

    step = plans.reduction_in_node(source, made.bytes, op, group, parts)
    call = call_of("reduce_scatter_into", name, op.name, source.dtype.name, tuple(counts))
    return Plan(call, source.bytes.nbytes, run, step, finish)


def alltoall_into(
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
        group: who takes part.
        name: see ringcomm.engine.api.collectives.
        out: must not overlap with x, which other ranks read while it is written.
        x: the same dtype.
        received: how many elements come from each rank.
        sent: how many elements go to each rank. A rank that expects another number than is sent
            to it is a MismatchError on all ranks.
    """
    adapter, target, source = _pair("alltoall_into", out, x)
    adapter.require_writable(out)
    if overlap(source, target):
        raise ValueError(
            f"alltoall_into: out, {target.bytes.nbytes} bytes at {target.bytes.ctypes.data:#x}, "
            f"overlaps with x, {source.bytes.nbytes} bytes at {source.bytes.ctypes.data:#x}, which "
            "other ranks read while it is written. Pass an array of its own memory"
        )
    outgoing = parts_of("alltoall_into", list(sent), source.count, "x", group)
    incoming = parts_of("alltoall_into", list(received), target.count, "out", group)

    async def run(t: Channel) -> A:
        await _require_alike(list(sent), list(received), t)
        alltoall_ = module(t, linear).alltoall_
        await perform(alltoall_, t, source, outgoing, target, incoming)
        adapter.written(out)
        return out

    call = call_of_reduction("alltoall_into", name, None, source.dtype.name, ())
    return Plan(call, source.bytes.nbytes, run)


async def _require_alike(sent: list[int], received: list[int], t: Channel) -> None:
    """Raise on every rank if any of them expects another count than is sent to it."""
    size = t.size
    table = np.zeros((size, 2, size), np.int64)
    table[t.rank] = sent, received
    rows = consecutive([2 * size] * size)
    flat = Flat(table.reshape(-1).view(np.uint8), DTYPES["int64"])
    await module(t, circulant).allgather_(flat, rows, t)
    wrong = np.argwhere(table[:, 0] != table[:, 1].T)
    if len(wrong):
        source, dest = map(int, wrong[0])
        raise MismatchError(
            f"alltoall: rank {t.members[source]} sends {table[source, 0, dest]} elements to rank "
            f"{t.members[dest]}, which expects {table[dest, 1, source]}. Let the splits of input "
            "and output agree."
        )


def _pair(kind: str, out: Array, x: Array) -> tuple[ArrayAdapter, Flat, Flat]:
    """Return the memory of both, which must be contiguous and of one dtype."""
    adapter, other = adapter_for(out), adapter_for(x)
    for what, each, of in (("out", out, adapter), ("x", x, other)):
        of.dtype(each)
        if not of.is_contiguous(each):
            raise ValueError(f"{kind}: {what} must be contiguous")
    target, source = adapter.flat(out), other.flat(x)
    require_one_dtype(kind, target.dtype, source.dtype)
    return adapter, target, source


def require_one_dtype(kind: str, out: DType, x: DType) -> None:
    """Raise TypeError if they are not."""
    if out != x:
        raise TypeError(f"{kind}: out is {out}, x is {x}. Pass one dtype.")


def require_own(counts: Sequence[int], count: int, group: Group) -> None:
    """Raise ValueError if this rank's x has another number of elements than it is to give."""
    due = counts[group.index]
    if due != count:
        raise ValueError(f"allgather_into: x has {count} elements, and this rank is to give {due}")


def parts_of(kind: str, counts: list[int], count: int, what: str, group: Group) -> list[slice]:
    """Return whose which elements are. Raises ValueError if the counts do not fit."""
    if len(counts) != group.size or sum(counts) != count or min(counts) < 0:
        raise ValueError(
            f"{kind}: the parts {counts} must be {group.size} numbers >= 0, one per rank, with the "
            f"sum {count}, the elements of {what}"
        )
    return consecutive(counts)


@functools.lru_cache(maxsize=4096)
def call_of(
    kind: str,
    name: str | None,
    op: str | None,
    dtype: str,
    counts: tuple[int, ...],
    *,
    place: str | None = None,
) -> Call:
    """Return the same Call each time, so that its fingerprint is computed once."""
    if len(set(counts)) == 1:
        return Call(kind, name, op=op, dtype=dtype, shape=(counts[0],), place=place)
    members = tuple((dtype, (n,)) for n in counts)
    return Call(kind, name, op=op, dtype=dtype, shape=(sum(counts),), members=members, place=place)
