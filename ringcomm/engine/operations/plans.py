"""How each collective checks its arguments and is carried out: one body for all of its forms.

Each function here returns a Plan: what all ranks must agree on, and what to do once they have. The
arguments are those of the public function (api/collectives.py), behind the group and the name.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import operator
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from ringcomm.arrays import (
    DTYPES,
    AnyAdapter,
    Array,
    ArrayAdapter,
    Flat,
    adapter_for,
    adapter_of_kind,
    arrived,
    device_adapter_for,
    is_device_kind,
)
from ringcomm.arrays.base import Bytes
from ringcomm.collectives.algorithms import linear, node, tree
from ringcomm.collectives.fusion import Item, plan_fusion
from ringcomm.collectives.op import Op
from ringcomm.collectives.recording import perform
from ringcomm.collectives.scaling import Scaling, scale
from ringcomm.collectives.schedule import chunks, consecutive
from ringcomm.engine.core.agreement import broadcast_bytes, gather_bytes, gather_counts, module
from ringcomm.engine.core.call import Call, call_of_reduction
from ringcomm.engine.core.execution import AllDeferred, Plan
from ringcomm.engine.core.group import Group
from ringcomm.engine.executors.device import device_executor, note_current_gpu
from ringcomm.transport.channel import Channel
from ringcomm.transport.node.steps import MEET, NodeCopy, NodeReduction, To

A = TypeVar("A", bound=Any)
P = TypeVar("P", bound=Callable[..., Plan[Any]])
MIB = 1 << 20
_NO_BYTES: Bytes = np.empty(0, np.uint8)
_AS_IT_IS = Scaling()


def wherever(plan: P) -> P:
    """Let a function plan for arrays in host memory, and the GPU's executor for others.

    Either gets arrays that can be read: what is still under way is waited for here.
    """

    @functools.wraps(plan)
    def choose(group: Group, name: str | None, x: Any, *args: Any, **options: Any) -> Plan[Any]:
        if type(x) is np.ndarray:
            return plan(group, name, x, *args, **options)
        x = arrived(x)
        first = (x[0] if x else None) if isinstance(x, list | tuple) else x
        if device_adapter_for(first) is None:
            return plan(group, name, x, *args, **options)
        return device_executor().plan(plan.__name__, group, name, x, *args, **options)

    return cast(P, choose)


@wherever
def allreduce(
    group: Group,
    name: str | None,
    x: A,
    op: Op,
    *,
    in_place: bool = False,
    is_borrowed: bool = False,
    deterministic: bool = False,
    scaling: Scaling = _AS_IT_IS,
) -> Plan[A]:
    """Plan an allreduce; the result is x itself if in_place.

    is_borrowed: x stays as it is until the operation is over, so it need not be copied at once.
    """
    adapter = adapter_for(x)
    kind = "allreduce_" if in_place else "allreduce"
    call = reduction(kind, name, op, x, adapter, deterministic=deterministic, scaling=scaling)
    if scaling:
        if in_place:
            adapter.require_writable(x)
        work, source = _scaled(x, adapter, scaling)
        flat = source
    elif is_borrowed:
        source = adapter.flat(_contiguous(x, adapter))
        work = adapter.empty(x, adapter.shape(x))
        flat = adapter.flat(work)
    else:
        work = _working_copy(x, adapter, in_place=in_place)
        source = flat = adapter.flat(work)

    op, factor = scaling.on_the_wire(op, flat.dtype, group.size)
    choose = group.engine.selection.algorithm

    def finish(t: Channel | None = None) -> A:
        scale(flat, factor)
        return _written(x, work, adapter, t) if in_place else work

    async def run(t: Channel) -> A:
        if source is not flat:
            t.copy(flat, source)
        algorithm = choose("allreduce", flat, t, is_deterministic=deterministic)
        await perform(algorithm.allreduce_, t, flat, op=op)
        return finish(t)

    step = reduction_in_node(source, flat.bytes, op, group)
    return Plan(call, flat.bytes.nbytes, run, step, finish)


@wherever
def reduce(
    group: Group,
    name: str | None,
    x: A,
    op: Op,
    root: int,
    *,
    in_place: bool = False,
    deterministic: bool = False,
) -> Plan[A | None]:
    """Plan a reduction whose result root alone gets; in place the others' x is left alone."""
    adapter = adapter_for(x)
    root = root_of(root, group)
    kind = "reduce_" if in_place else "reduce"
    call = reduction(kind, name, op, x, adapter, root=root, deterministic=deterministic)
    is_root = group.rank == root
    work = _working_copy(x, adapter, in_place=in_place and is_root)
    flat = adapter.flat(work)

    choose = group.engine.selection.algorithm

    async def run(t: Channel) -> A | None:
        out = flat if is_root else None
        algorithm = choose("reduce_scatter", flat, t, is_deterministic=deterministic)
        if algorithm is node:
            await node.reduce(flat, out, root, t, op)
        else:
            parts = chunks(flat.count, t.size)
            own = await perform(algorithm.reduce_scatter_, t, flat, parts, op=op)
            await perform(module(t, linear).gather_, t, out, own, parts, root)
        if in_place:
            return _written(x, work, adapter, t) if is_root else x
        return work if is_root else None

    return Plan(call, flat.bytes.nbytes, run)


@wherever
def reduce_scatter(
    group: Group,
    name: str | None,
    x: A,
    op: Op,
    *,
    in_place: bool = False,
    is_borrowed: bool = False,
    deterministic: bool = False,
    scaling: Scaling = _AS_IT_IS,
) -> Plan[A]:
    """Plan a reduction of which each rank gets its rows; in place they stand in x, as a view.

    is_borrowed: see allreduce(). scaling: not in place.
    """
    adapter = adapter_for(x)
    kind = "reduce_scatter_" if in_place else "reduce_scatter"
    call = reduction(kind, name, op, x, adapter, deterministic=deterministic, scaling=scaling)
    shape = adapter.shape(x)
    require_rows(shape, kind)
    if in_place and not adapter.is_contiguous(x):
        raise ValueError(f"{kind} returns a view of x, so x must be contiguous: pass x.copy()")
    if scaling:
        work, source = _scaled(x, adapter, scaling)
    else:
        work = (
            _contiguous(x, adapter) if is_borrowed else _working_copy(x, adapter, in_place=in_place)
        )
        source = adapter.flat(work)
    parts, mine = rows_by_rank(shape, group)
    out: A = x[mine] if in_place else adapter.empty(x, (mine.stop - mine.start, *shape[1:]))
    target = adapter.flat(out)

    op, factor = scaling.on_the_wire(op, source.dtype, group.size)
    choose = group.engine.selection.algorithm

    def finish(t: Channel | None = None) -> A:
        scale(target, factor)
        if in_place:
            _written(x, work, adapter, t)
        return out

    async def run(t: Channel) -> A:
        flat = source
        if is_borrowed:
            flat = source.like(source.count)
            t.copy(flat, source)
        algorithm = choose("reduce_scatter", flat, t, is_deterministic=deterministic)
        own = await perform(algorithm.reduce_scatter_, t, flat, parts, op=op)
        if not in_place:
            t.copy(target, own)
        return finish(t)

    step = reduction_in_node(source, target.bytes, op, group, parts)
    return Plan(call, source.bytes.nbytes, run, step, finish)


@wherever
def allgather(group: Group, name: str | None, x: A) -> Plan[A]:
    """Plan the concatenation of all ranks' rows."""
    adapter, call, mine = _rows_of(x, "allgather", name)
    shape = adapter.shape(x)

    choose = group.engine.selection.algorithm

    async def run(t: Channel) -> A:
        rows = await gather_counts(shape[0], t)
        out: A = adapter.empty(x, (sum(rows), *shape[1:]))
        flat = adapter.flat(out)
        parts = consecutive([n * math.prod(shape[1:]) for n in rows])
        with t.phase("copy"):
            flat[parts[t.rank]].bytes[:] = mine.bytes
        await perform(choose("allgather", flat, t).allgather_, t, flat, parts)
        return out

    return Plan(call, mine.bytes.nbytes, run)


@wherever
def gather(group: Group, name: str | None, x: A, root: int) -> Plan[A | None]:
    """Plan the concatenation of all ranks' rows on root."""
    root = root_of(root, group)
    adapter, call, mine = _rows_of(x, "gather", name, root=root)
    shape = adapter.shape(x)

    async def run(t: Channel) -> A | None:
        rows = await gather_counts(shape[0], t)
        parts = consecutive([n * math.prod(shape[1:]) for n in rows])
        if t.rank != root:
            await perform(module(t, linear).gather_, t, None, mine, parts, root)
            return None
        out: A = adapter.empty(x, (sum(rows), *shape[1:]))
        flat = adapter.flat(out)
        with t.phase("copy"):
            flat[parts[t.rank]].bytes[:] = mine.bytes
        await perform(module(t, linear).gather_, t, flat, flat[parts[t.rank]], parts, root)
        return out

    return Plan(call, mine.bytes.nbytes, run)


@wherever
def scatter(
    group: Group, name: str | None, x: A | None, root: int, *, kind: str | None = None
) -> Plan[A]:
    """Plan the distribution of root's rows.

    kind: on root: what all get, if that is another kind of array than x; see Staging.
    """
    root = root_of(root, group)
    is_root = group.rank == root
    call = Call("scatter", name, root=root)
    whole = None
    outline = b""
    if is_root:
        adapter = adapter_for(x)
        shape, dtype = adapter.shape(x), adapter.dtype(x)
        require_rows(shape, "scatter")
        whole = adapter.flat(_contiguous(x, adapter))
        outline = json.dumps([kind or adapter.kind, dtype.name, shape]).encode()
    else:
        note_current_gpu(group.engine)  # what comes may be for a GPU

    async def run(t: Channel) -> Any:
        what, dtype_name, shape = json.loads(await broadcast_bytes(outline, root, t))
        rows = chunks(shape[0], t.size)
        width = math.prod(shape[1:])
        mine = rows[t.rank]
        due = DTYPES[dtype_name], (mine.stop - mine.start, *shape[1:])
        parts = [slice(part.start * width, part.stop * width) for part in rows]

        async def fill(made: Array) -> None:
            flat = adapter_for(made).flat(made)
            await perform(module(t, linear).scatter_, t, whole, flat, parts, root)

        if is_device_kind(what):
            out, staging = device_executor().make(group, what, *due)
            return await staging.bring(t, out=out, fill=fill, finish=lambda: out)
        out = adapter_of_kind(what).make(*due)
        await fill(out)
        return out

    return Plan(call, 0 if whole is None else whole.bytes.nbytes, run)


@wherever
def alltoall(
    group: Group,
    name: str | None,
    x: A,
    splits: Sequence[int] | None,
    *,
    return_splits: bool,
) -> Plan[A | tuple[A, list[int]]]:
    """Plan the exchange of rows between all pairs of ranks."""
    require_flag("return_splits", return_splits)
    adapter, call, mine = _rows_of(x, "alltoall", name)
    shape = adapter.shape(x)
    width = math.prod(shape[1:])
    sent = splits_of(splits, shape[0], group.size)

    async def run(t: Channel) -> A | tuple[A, list[int]]:
        received = await module(t, linear).alltoall_counts(sent, t)
        out: A = adapter.empty(x, (sum(received), *shape[1:]))
        await perform(
            module(t, linear).alltoall_,
            t,
            mine,
            consecutive([n * width for n in sent]),
            adapter.flat(out),
            consecutive([n * width for n in received]),
        )
        return (out, received) if return_splits else out

    return Plan(call, mine.bytes.nbytes, run)


@wherever
def broadcast(
    group: Group, name: str | None, x: A, root: int, *, in_place: bool = False
) -> Plan[A]:
    """Plan the copy of root's x to all."""
    adapter = adapter_for(x)
    root = root_of(root, group)
    kind = "broadcast_" if in_place else "broadcast"
    dtype = str(adapter.dtype(x))
    call = Call(kind, name, dtype=dtype, shape=adapter.shape(x), root=root)
    is_overwritten = in_place and group.rank != root
    if is_overwritten:
        adapter.require_writable(x)
    work: A = _contiguous(x, adapter) if in_place else adapter.copy(x)
    flat = adapter.flat(work)

    def finish(t: Channel | None = None) -> A:
        if is_overwritten:
            return _written(x, work, adapter, t)
        return x if in_place else work

    async def run(t: Channel) -> A:
        await perform(module(t, tree).broadcast_, t, flat, root)
        return finish(t)

    shown = group.rank == root
    step = NodeCopy(flat.bytes) if shown else NodeCopy(_NO_BYTES, [(root, 0, flat.bytes)])
    return Plan(call, flat.bytes.nbytes, run, step, finish)


def barrier(group: Group, name: str | None) -> Plan[None]:
    """Plan nothing: the agreement is the barrier."""
    del group

    async def run(_: Channel) -> None:
        return None

    return Plan(Call("barrier", name), 0, run, MEET, _nothing)


def broadcast_object(group: Group, name: str | None, obj: Any, root: int) -> Plan[Any]:
    """Plan the copy of root's object to all."""
    root = root_of(root, group)
    is_root = group.rank == root
    packed = _pickled("broadcast_object", obj) if is_root else b""

    async def run(t: Channel) -> Any:
        return await broadcast_bytes(packed, root, t)

    return Plan(Call("broadcast_object", name, root=root), len(packed), run)


def allgather_object(group: Group, name: str | None, obj: Any) -> Plan[list[bytes]]:
    """Plan the exchange of one object per rank, pickled."""
    del group
    packed = _pickled("allgather_object", obj)
    call = Call("allgather_object", name)
    return Plan(call, len(packed), lambda t: gather_bytes(packed, t))


def _pickled(kind: str, obj: Any) -> bytes:
    try:
        return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"{kind}: obj cannot be pickled: {error}") from error


def grouped_allgather(group: Group, name: str | None, xs: Sequence[A]) -> Plan[list[A]]:
    """Plan several allgathers as one."""
    kind = "grouped_allgather"
    return grouped(kind, name, [allgather(group, None, x) for x in _listed(kind, xs)])


def grouped_reduce_scatter(
    group: Group,
    name: str | None,
    xs: Sequence[A],
    op: Op,
    *,
    deterministic: bool = False,
    scaling: Scaling = _AS_IT_IS,
) -> Plan[list[A]]:
    """Plan several reduce_scatters as one."""
    kind = "grouped_reduce_scatter"
    plans = [
        reduce_scatter(group, None, x, op, deterministic=deterministic, scaling=scaling)
        for x in _listed(kind, xs)
    ]
    return grouped(kind, name, plans)


@wherever
def grouped_allreduce(
    group: Group,
    name: str | None,
    xs: Sequence[A],
    op: Op,
    *,
    in_place: bool = False,
    deterministic: bool = False,
    scaling: Scaling = _AS_IT_IS,
) -> Plan[list[A]]:
    """Plan an allreduce of several arrays, fused where they share a dtype."""
    kind = "grouped_allreduce_" if in_place else "grouped_allreduce"
    adapters = [adapter_for(x) for x in _listed(kind, xs)]
    if in_place and len({id(x) for x in xs}) < len(xs):
        raise ValueError(f"{kind}: the same array is passed twice: it can be reduced but once")
    calls = [
        reduction(kind, None, op, x, adapter, deterministic=deterministic, scaling=scaling)
        for x, adapter in zip(xs, adapters, strict=True)
    ]
    work = [
        _working_copy(x, adapter, in_place=in_place and not scaling)
        for x, adapter in zip(xs, adapters, strict=True)
    ]
    flats = [adapter.flat(each) for each, adapter in zip(work, adapters, strict=True)]
    if in_place:
        spans = [(flat.bytes.ctypes.data, flat.bytes.nbytes) for flat in flats]
        require_apart(kind, spans)
        for x, adapter in zip(xs, adapters, strict=True):
            adapter.require_writable(x)
    for flat in flats:
        scale(flat, scaling.before)
    items = [Item(flat.bytes.nbytes, flat.dtype.name) for flat in flats]
    batches = plan_fusion(items, group.engine.settings.fusion_mib * MIB)

    choose = group.engine.selection.algorithm

    async def run(t: Channel) -> list[A]:
        for batch in batches:
            together = [flats[i] for i in batch]
            with t.phase("copy"):
                fused = together[0] if len(together) == 1 else _fused(together)
            algorithm = choose("allreduce", fused, t, is_deterministic=deterministic)
            way, factor = scaling.on_the_wire(op, fused.dtype, group.size)
            await perform(algorithm.allreduce_, t, fused, op=way)
            scale(fused, factor)
            if len(together) > 1:
                with t.phase("copy"):
                    _unfuse(fused, together)
        if not in_place:
            return work
        return [_written(x, w, a, t) for x, w, a in zip(xs, work, adapters, strict=True)]

    nbytes = sum(item.nbytes for item in items)
    return Plan(grouped_call(kind, name, calls), nbytes, run)


def grouped(kind: str, name: str | None, plans: list[Plan[A]]) -> Plan[list[A]]:
    """Plan several collectives as one, with one agreement for all of them."""

    waits = any(plan.agrees_first for plan in plans)

    async def run(t: Channel) -> Any:
        results = [await plan.run(t) for plan in plans]
        return AllDeferred(results) if waits else results

    call = grouped_call(kind, name, [plan.call for plan in plans])
    return Plan(call, sum(plan.nbytes for plan in plans), run, agrees_first=waits)


def _fused(flats: list[Flat]) -> Flat:
    return Flat(np.concatenate([flat.bytes for flat in flats]), flats[0].dtype)


def _unfuse(fused: Flat, flats: list[Flat]) -> None:
    for flat, part in zip(flats, consecutive([flat.count for flat in flats]), strict=True):
        flat.bytes[:] = fused[part].bytes


def reduction(
    kind: str,
    name: str | None,
    op: Op,
    x: Array,
    adapter: AnyAdapter,
    *,
    root: int | None = None,
    deterministic: bool = False,
    scaling: Scaling = _AS_IT_IS,
    place: str | None = None,
) -> Call:
    """Return what all ranks must agree on before they reduce x."""
    if not isinstance(op, Op):
        raise TypeError(f"op must be one of ringcomm.{', '.join(map(str, Op))}, not {op!r}")
    dtype = adapter.dtype(x)
    op.require(dtype)
    if deterministic is not False:
        require_flag("deterministic", deterministic)
    scaling.require(dtype)
    how = f"{op.name}, deterministic" if deterministic else op.name
    if scaling:
        how = f"{how}, {scaling}"
    if root is None:
        return call_of_reduction(kind, name, how, dtype.name, adapter.shape(x), place=place)
    shape = adapter.shape(x)
    return Call(kind, name, op=how, dtype=dtype.name, shape=shape, root=root, place=place)


def _rows_of(
    x: Array, kind: str, name: str | None, root: int | None = None
) -> tuple[ArrayAdapter, Call, Flat]:
    adapter = adapter_for(x)
    shape = adapter.shape(x)
    require_rows(shape, kind)
    call = Call(kind, name, dtype=str(adapter.dtype(x)), shape=(None, *shape[1:]), root=root)
    return adapter, call, adapter.flat(_contiguous(x, adapter))


def _listed(kind: str, xs: Sequence[A]) -> Sequence[A]:
    if not isinstance(xs, list | tuple):
        raise TypeError(f"{kind} takes a list or tuple of arrays, not {type(xs).__qualname__}")
    return xs


def require_apart(kind: str, spans: Sequence[tuple[int, int]]) -> None:
    """Raise ValueError if two of these (address, nbytes) overlap."""
    pairs = itertools.pairwise(sorted(spans))
    if any(at + nbytes > after for (at, nbytes), (after, _) in pairs):
        raise ValueError(f"{kind}: two of the arrays overlap in memory: it can be reduced but once")


def grouped_call(kind: str, name: str | None, calls: Sequence[Call]) -> Call:
    """Return what all ranks must agree on before several collectives."""
    ops = {call.op for call in calls}
    members = tuple((call.dtype or "", call.shape or ()) for call in calls)
    places = {call.place for call in calls}
    if len(places) > 1:
        raise TypeError(
            f"{kind}: some arrays are on a GPU, some in host memory. Pass arrays of one."
        )
    op, place = (each.pop() if each else None for each in (ops, places))
    return Call(kind, name, op=op, members=members, place=place)


def splits_of(splits: Sequence[int] | None, n_rows: int, size: int) -> list[int]:
    """Return how many rows go to each rank. Raises TypeError, ValueError."""
    if splits is None:
        if n_rows % size:
            raise ValueError(
                f"alltoall: {n_rows} rows cannot be shared evenly by {size} ranks: pass splits="
            )
        return [n_rows // size] * size
    try:
        # One more than there are ranks tells enough; 1.5 is refused, not cut.
        rows = [operator.index(n) for n in itertools.islice(splits, size + 1)]
    except TypeError as error:
        raise TypeError(
            f"alltoall: splits={splits!r} must be {size} integers, one per rank: how many rows go "
            "to each"
        ) from error
    if len(rows) != size or sum(rows) != n_rows or min(rows) < 0:
        raise ValueError(
            f"alltoall: splits={rows} must be {size} numbers >= 0, one per rank, with the sum "
            f"{n_rows}, the rows of x"
        )
    return rows


def root_of(root: int, group: Group) -> int:
    """Return a rank of the group as an int. Raises TypeError or ValueError if it is none."""
    if isinstance(root, bool) or not hasattr(root, "__index__"):
        raise TypeError(f"root must be a rank, an int, not {root!r}")
    index = operator.index(root)
    if not 0 <= index < group.size:
        raise ValueError(f"root is {index}; ranks are 0 to {group.size - 1}")
    return index


def require_flag(what: str, flag: object) -> None:
    """Raise TypeError unless it is True or False: what has no truth would fail among messages."""
    if not isinstance(flag, bool | np.bool_):
        raise TypeError(f"{what} must be True or False, not {flag!r}")


def require_rows(shape: tuple[int, ...], kind: str) -> None:
    """Raise ValueError for an array without dimensions."""
    if not shape:
        raise ValueError(f"{kind} needs at least one dimension; use x.reshape(1) for a number")


def _contiguous(x: A, adapter: ArrayAdapter) -> A:
    copied: A = x if adapter.is_contiguous(x) else adapter.copy(x)
    return copied


def _working_copy(x: A, adapter: ArrayAdapter, *, in_place: bool) -> A:
    """Return contiguous memory to reduce in: x itself only where x is to be overwritten."""
    if not in_place:
        copied: A = adapter.copy(x)
        return copied
    adapter.require_writable(x)
    return _contiguous(x, adapter)


def _scaled(x: A, adapter: ArrayAdapter, scaling: Scaling) -> tuple[A, Flat]:
    """Return a copy of x times what comes before a reduction, and the copy's memory."""
    work: A = adapter.copy(x)
    flat = adapter.flat(work)
    scale(flat, scaling.before)
    return work, flat


def _written(x: A, work: A, adapter: ArrayAdapter, t: Channel | None) -> A:
    if work is x:
        adapter.written(x)
    else:
        with contextlib.nullcontext() if t is None else t.phase("copy"):
            adapter.assign(x, work)
    return x


def rows_by_rank(shape: tuple[int, ...], group: Group) -> tuple[list[slice], slice]:
    """Return whose which elements are after a reduce_scatter, and which rows are this rank's."""
    rows = chunks(shape[0], group.size)
    width = math.prod(shape[1:])
    return [slice(r.start * width, r.stop * width) for r in rows], rows[group.index]


def reduction_in_node(
    source: Flat, target: Bytes, op: Op, group: Group, parts: Sequence[slice] = ()
) -> NodeReduction:
    """Return a reduction where all ranks share memory; with `parts`, each rank gets its part."""
    to = To.OWNER if parts else To.ALL
    item = source.dtype.itemsize
    bounds = [0, *(part.stop * item for part in parts)] if parts else ()
    divisor = op.divisor(group.size)
    return NodeReduction(
        source.bytes, target, op.kernel, source.dtype.kernel, divisor, to, 0, bounds
    )


def _nothing(t: Channel | None = None) -> None:
    del t
