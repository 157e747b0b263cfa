"""Plans for arrays in a GPU's memory, the counterparts of operations/plans.py.

The same contracts, and the same agreement between the hosts. A plan notes the caller's stream at
the moment of the call; what the ranks then do is put on the team's stream, behind that moment, and
the result is behind it on the stream of whoever waits. No host waits for a GPU, except where the
arrays go through host memory: there the plans of the CPU's collectives do the work.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ringcomm.arrays import Array, DeviceAdapter, Span, device_adapter_for
from ringcomm.collectives.fusion import Item, plan_fusion
from ringcomm.collectives.op import Op
from ringcomm.collectives.scaling import Scaling
from ringcomm.collectives.schedule import consecutive
from ringcomm.engine.core.agreement import gather_alike, gather_counts
from ringcomm.engine.core.call import Call
from ringcomm.engine.core.execution import Plan
from ringcomm.engine.core.group import Group
from ringcomm.engine.operations import adasum as host_adasum
from ringcomm.engine.operations import into, plans
from ringcomm.errors import RingcommError
from ringcomm.gpu.executor.gpus import Gpus, Issue, Launched
from ringcomm.gpu.executor.staged import Staging, through_host
from ringcomm.gpu.executor.team import GpuTeam
from ringcomm.gpu.transports.base import Job, Move, Pull, Reduce, Update, UpdatePiece
from ringcomm.transport.channel import Channel
from ringcomm.transport.node.steps import To

A = TypeVar("A", bound=Any)
_AS_IT_IS = Scaling()
_PLACE = "cuda"


@dataclass(frozen=True)
class _Way:
    """How one operation goes, whichever transport the team has.

    Attributes:
        group: whose it is.
        issue: its moment.
        sources: what it reads.
        host: plans it for mirrors of the sources.
        host_only: why it goes through host memory whatever the transport; "": it need not.
        is_elementwise: see through_host().
    """

    group: Group
    issue: Issue
    sources: Sequence[Array]
    host: Callable[[list[Any]], Plan[Any]]
    host_only: str = ""
    is_elementwise: bool = False

    async def run(
        self,
        t: Channel,
        results: Sequence[Array],
        jobs: Callable[[GpuTeam], Sequence[Job]],
        finish: Callable[[], Any],
    ) -> Launched[Any]:
        """Carry it out.

        Args:
            t: of the operation.
            results: where the host's results go; none: into new arrays.
            jobs: returns what to put on the stream.
            finish: called with the stream current, behind all that; returns the result.
        """
        team = Gpus.of(self.group.engine).team(self.group)
        async with team.turn(t, self.issue):
            if team.mover is not None and not self.host_only:
                stream = team.begin(self.issue)
                todo = jobs(team)
                keeps = (*todo, *self.sources)
                try:
                    for job in todo:
                        await team.put(t, job)
                    with self.issue.on(stream):
                        result = finish()
                except BaseException:  # a death, or what CUDA refuses: nobody follows the stream
                    team.break_off(keeps)
                    raise
                return team.follow(t, self.issue, stream, result, keeps=keeps)
        if team.mover is not None:
            team.announce(self.host_only)
        return await through_host(
            team,
            t,
            self.issue,
            sources=self.sources,
            results=results,
            host=self.host,
            finish=finish,
            is_elementwise=self.is_elementwise,
        )


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
    """Plan an allreduce; see plans.allreduce(). What is borrowed need not be copied on a GPU."""
    del is_borrowed
    adapter = _adapter_of(x)
    kind = "allreduce_" if in_place else "allreduce"
    call = _reduction(kind, name, op, x, adapter, deterministic=deterministic, scaling=scaling)
    if in_place:
        adapter.require_writable(x)
    source = _contiguous(x, adapter)
    work = source if in_place else adapter.empty(x, adapter.shape(x))
    issue = Issue.of(group, adapter, x)
    way = _Way(
        group,
        issue,
        [source],
        lambda xs: plans.allreduce(
            group, None, xs[0], op, in_place=True, deterministic=deterministic, scaling=scaling
        ),
        _NO_FACTORS if scaling else "",
        is_elementwise=True,
    )
    job = Job(Reduce(adapter.span(source), adapter.span(work), op, is_deterministic=deterministic))

    async def run(t: Channel) -> Any:
        return await way.run(
            t, [work], lambda _: [job], lambda: _written(x, work, adapter, in_place=in_place)
        )

    return _plan(call, adapter.span(source).nbytes, run)


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
    """Plan a reduction whose result root alone gets; see plans.reduce()."""
    adapter = _adapter_of(x)
    root = plans.root_of(root, group)
    kind = "reduce_" if in_place else "reduce"
    call = _reduction(kind, name, op, x, adapter, root=root, deterministic=deterministic)
    is_root = group.rank == root
    if in_place and is_root:
        adapter.require_writable(x)
    source = _contiguous(x, adapter)
    work = source if in_place else adapter.empty(x, adapter.shape(x)) if is_root else None
    issue = Issue.of(group, adapter, x)
    way = _Way(
        group,
        issue,
        [source],
        lambda xs: plans.reduce(
            group, None, xs[0], op, root, in_place=True, deterministic=deterministic
        ),
    )
    target = adapter.span(work) if is_root else None
    job = Job(Reduce(adapter.span(source), target, op, To.ROOT, root, (), deterministic))

    def finish() -> Any:
        if is_root:
            return _written(x, work, adapter, in_place=in_place)
        return x if in_place else None

    async def run(t: Channel) -> Any:
        return await way.run(t, [work] if is_root else [None], lambda _: [job], finish)

    return _plan(call, adapter.span(source).nbytes, run)


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
    """Plan a reduction of which each rank gets its rows; see plans.reduce_scatter()."""
    del is_borrowed
    adapter = _adapter_of(x)
    kind = "reduce_scatter_" if in_place else "reduce_scatter"
    call = _reduction(kind, name, op, x, adapter, deterministic=deterministic, scaling=scaling)
    shape = adapter.shape(x)
    plans.require_rows(shape, kind)
    if in_place and not adapter.is_contiguous(x):
        raise ValueError(f"{kind} returns a view of x, so x must be contiguous: pass x.copy()")
    source = _contiguous(x, adapter)
    parts, mine = plans.rows_by_rank(shape, group)
    out: A = x[mine] if in_place else adapter.empty(x, (mine.stop - mine.start, *shape[1:]))
    issue = Issue.of(group, adapter, x)
    way = _Way(
        group,
        issue,
        [source],
        lambda xs: plans.reduce_scatter(
            group,
            None,
            xs[0],
            op,
            is_borrowed=not scaling,
            deterministic=deterministic,
            scaling=scaling,
        ),
        _NO_FACTORS if scaling else "",
    )
    job = Job(
        Reduce(
            adapter.span(source), adapter.span(out), op, To.OWNER, 0, tuple(parts), deterministic
        )
    )

    def finish() -> A:
        if in_place:
            adapter.written(x)
        return out

    async def run(t: Channel) -> Any:
        return await way.run(t, [out], lambda _: [job], finish)

    return _plan(call, adapter.span(source).nbytes, run)


def allgather(group: Group, name: str | None, x: A) -> Plan[A]:
    """Plan the concatenation of all ranks' rows."""
    return _gathering(group, name, x, "allgather", None)


def allgather_into(
    group: Group, name: str | None, out: A, x: Array, counts: Sequence[int] | None = None
) -> Plan[A]:
    """Plan to fill `out` with the elements of all ranks' x; see into.allgather_into()."""
    adapter = _adapter_of_all("allgather_into", [out, x])
    for what, each in (("out", out), ("x", x)):
        if not adapter.is_contiguous(each):
            raise ValueError(f"allgather_into: {what} must be contiguous")
    adapter.require_writable(out)
    target, source = adapter.span(out), adapter.span(x)
    into.require_one_dtype("allgather_into", target.dtype, source.dtype)
    counts = [source.count] * group.size if counts is None else list(counts)
    parts = into.parts_of("allgather_into", counts, target.count, "out", group)
    into.require_own(counts, source.count, group)
    item = source.dtype.itemsize
    pulls = tuple(
        Pull(r, d, 0, counts[r] * item, parts[r].start * item)
        for r, d in itertools.product(range(group.size), range(group.size))
        if r != d or target[parts[r]].address != source.address
    )
    issue = Issue.of(group, adapter, out, x)
    way = _Way(
        group, issue, [out, x], lambda xs: into.allgather_into(group, None, xs[0], xs[1], counts)
    )
    call = into.call_of(
        "allgather_into", name, None, source.dtype.name, tuple(counts), place=_PLACE
    )

    def finish() -> A:
        adapter.written(out)
        return out

    async def run(t: Channel) -> Any:
        return await way.run(t, [out], lambda _: [Job(Move(source, target, pulls))], finish)

    return _plan(call, target.nbytes, run)


def update(
    group: Group,
    name: str | None,
    gradients: Array,
    weights: Array,
    pieces: Sequence[UpdatePiece],
    *,
    scale: float,
) -> Plan[None]:
    """Plan a step of an optimizer whose state is spread over the ranks; see gpu.base.Update.

    Both arrays are registered, and the group's transport is "ipc".
    """
    return _update(group, name, gradients, weights, pieces, scale=scale, is_reduced=False)


def update_reduced(
    group: Group, name: str | None, gradients: Array, weights: Array, pieces: Sequence[UpdatePiece]
) -> Plan[None]:
    """Plan the same where each rank's own elements of `gradients` are the mean of all ranks'.

    What reduces them can run beside what computes the next; gradients need not be registered then.
    """
    return _update(group, name, gradients, weights, pieces, scale=1.0, is_reduced=True)


def _update(
    group: Group,
    name: str | None,
    gradients: Array,
    weights: Array,
    pieces: Sequence[UpdatePiece],
    *,
    scale: float,
    is_reduced: bool,
) -> Plan[None]:
    adapter = _adapter_of_all("update", [gradients, weights])
    source, target = adapter.span(gradients), adapter.span(weights)
    issue = Issue.of(group, adapter, gradients, weights)

    def refuse(_: list[Any]) -> Plan[Any]:
        raise RingcommError("update: the ranks' transport is not ipc; see rc.explain()")

    way = _Way(group, issue, [gradients, weights], refuse)
    job = Job(Update(source, target, tuple(pieces), scale, is_reduced=is_reduced))
    members = ((source.dtype.name, (source.count,)), (target.dtype.name, (target.count,)))
    op = f"scale={scale!r}" + ", reduced" * is_reduced
    call = Call("update", name, op=op, members=members, place=_PLACE)

    async def run(t: Channel) -> Any:
        return await way.run(t, [], lambda _: [job], lambda: adapter.written(weights))

    return _plan(call, source.nbytes, run)


def gather(group: Group, name: str | None, x: A, root: int) -> Plan[A | None]:
    """Plan the concatenation of all ranks' rows on root."""
    root = plans.root_of(root, group)
    return _gathering(group, name, x, "gather", root)


def _gathering(group: Group, name: str | None, x: A, kind: str, root: int | None) -> Plan[Any]:
    adapter = _adapter_of(x)
    shape = adapter.shape(x)
    plans.require_rows(shape, kind)
    dtype = adapter.dtype(x)
    call = Call(kind, name, dtype=str(dtype), shape=(None, *shape[1:]), root=root, place=_PLACE)
    source = _contiguous(x, adapter)
    issue = Issue.of(group, adapter, x)
    width = math.prod(shape[1:]) * dtype.itemsize
    host = plans.allgather if root is None else plans.gather
    roots = () if root is None else (root,)
    way = _Way(group, issue, [source], lambda xs: host(group, None, xs[0], *roots))

    async def run(t: Channel) -> Any:
        rows = await gather_counts(shape[0], t)
        is_due = root in (None, t.rank)
        out = issue.empty(x, (sum(rows), *shape[1:])) if is_due else None
        parts = consecutive([n * width for n in rows])
        pulls = tuple(
            Pull(r, d, 0, rows[r] * width, parts[r].start)
            for r, d in itertools.product(range(t.size), range(t.size) if root is None else roots)
        )
        target = adapter.span(out) if is_due else None
        job = Job(Move(adapter.span(source), target, pulls))
        return await way.run(t, [out], lambda _: [job], lambda: out)

    return _plan(call, adapter.span(source).nbytes, run)


def scatter(group: Group, name: str | None, x: A, root: int) -> Plan[A]:
    """Plan the distribution of root's rows, on root: the others have no array to tell it by."""
    root = plans.root_of(root, group)
    if group.rank != root:
        return plans.scatter(group, name, None, root)
    adapter = _adapter_of(x)
    plans.require_rows(adapter.shape(x), "scatter")
    call = Call("scatter", name, root=root)
    source = _contiguous(x, adapter)
    issue = Issue.of(group, adapter, x)

    async def run(t: Channel) -> Any:
        mirror, lease = await Staging(group, issue).fetch(source)
        result = await plans.scatter(group, None, mirror, root, kind=adapter.kind).run(t)
        del lease
        return result

    return Plan(call, adapter.span(source).nbytes, run)


def alltoall(
    group: Group,
    name: str | None,
    x: A,
    splits: Sequence[int] | None,
    *,
    return_splits: bool,
) -> Plan[A | tuple[A, list[int]]]:
    """Plan the exchange of rows between all pairs of ranks."""
    adapter = _adapter_of(x)
    shape = adapter.shape(x)
    plans.require_rows(shape, "alltoall")
    dtype = adapter.dtype(x)
    call = Call("alltoall", name, dtype=str(dtype), shape=(None, *shape[1:]), place=_PLACE)
    sent = plans.splits_of(splits, shape[0], group.size)
    source = _contiguous(x, adapter)
    issue = Issue.of(group, adapter, x)
    width = math.prod(shape[1:]) * dtype.itemsize
    way = _Way(
        group,
        issue,
        [source],
        lambda xs: plans.alltoall(group, None, xs[0], sent, return_splits=False),
    )

    async def run(t: Channel) -> Any:
        told = await gather_alike(np.array(sent, np.int64).tobytes(), t)
        table = np.frombuffer(b"".join(told), np.int64).reshape(t.size, t.size)
        received = table[:, t.rank].tolist()
        out = issue.empty(x, (sum(received), *shape[1:]))
        work = Move(adapter.span(source), adapter.span(out), _exchanges(table, width))
        return await way.run(
            t, [out], lambda _: [Job(work)], lambda: (out, received) if return_splits else out
        )

    return _plan(call, adapter.span(source).nbytes, run)


def _exchanges(table: np.ndarray[Any, np.dtype[np.int64]], width: int) -> tuple[Pull, ...]:
    """Return who takes which bytes from whom, when table[r, d] rows go from r to d; pure."""
    starts = np.cumsum(table, axis=1) - table  # in what r shows
    places = np.cumsum(table, axis=0) - table  # in what d gets
    size = len(table)
    return tuple(
        Pull(
            r,
            d,
            int(starts[r, d]) * width,
            int(starts[r, d] + table[r, d]) * width,
            int(places[r, d]) * width,
        )
        for r, d in itertools.product(range(size), range(size))
    )


def broadcast(
    group: Group, name: str | None, x: A, root: int, *, in_place: bool = False
) -> Plan[A]:
    """Plan the copy of root's x to all."""
    adapter = _adapter_of(x)
    root = plans.root_of(root, group)
    kind = "broadcast_" if in_place else "broadcast"
    shape = adapter.shape(x)
    dtype = str(adapter.dtype(x))
    call = Call(kind, name, dtype=dtype, shape=shape, root=root, place=_PLACE)
    is_root = group.rank == root
    if in_place and not is_root:
        adapter.require_writable(x)
    if in_place:
        work: A = _contiguous(x, adapter)
    else:
        work = adapter.copy(x) if is_root else adapter.empty(x, shape)
    issue = Issue.of(group, adapter, x)
    way = _Way(
        group,
        issue,
        [work],
        lambda xs: plans.broadcast(group, None, xs[0], root, in_place=True),
    )
    span = adapter.span(work)
    pulls = tuple(Pull(root, d, 0, span.nbytes, 0) for d in range(group.size) if d != root)
    job = Job(Move(span if is_root else None, None if is_root else span, pulls))

    def finish() -> A:
        if is_root or not in_place:
            return x if in_place else work
        return _written(x, work, adapter, in_place=True)

    async def run(t: Channel) -> Any:
        return await way.run(t, [None if is_root else work], lambda _: [job], finish)

    return _plan(call, span.nbytes, run)


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
    adapter = _adapter_of_all(kind, xs)
    if in_place and len({id(x) for x in xs}) < len(xs):
        raise ValueError(f"{kind}: the same array is passed twice: it can be reduced but once")
    calls = [
        _reduction(kind, None, op, x, adapter, deterministic=deterministic, scaling=scaling)
        for x in xs
    ]
    sources = [_contiguous(x, adapter) for x in xs]
    if in_place:
        for x in xs:
            adapter.require_writable(x)
    work = sources if in_place else [adapter.empty(x, adapter.shape(x)) for x in xs]
    spans = [adapter.span(x) for x in sources]
    if in_place:
        plans.require_apart(kind, [(span.address, span.nbytes) for span in spans])
    items = [Item(span.nbytes, span.dtype.name) for span in spans]
    batches = plan_fusion(items, group.engine.settings.fusion_mib * plans.MIB)
    issue = Issue.of(group, adapter, *xs)
    way = _Way(
        group,
        issue,
        sources,
        lambda mirrors: plans.grouped_allreduce(
            group, None, mirrors, op, in_place=True, deterministic=deterministic, scaling=scaling
        ),
        _NO_FACTORS if scaling else "",
    )
    targets = [adapter.span(x) for x in work]

    def jobs(team: GpuTeam) -> list[Job]:
        return [
            _fused(team, [spans[i] for i in each], [targets[i] for i in each], op, deterministic)
            for each in batches
        ]

    def finish() -> list[A]:
        return [_written(x, w, adapter, in_place=in_place) for x, w in zip(xs, work, strict=True)]

    async def run(t: Channel) -> Any:
        return await way.run(t, work, jobs, finish)

    return _plan(plans.grouped_call(kind, name, calls), sum(item.nbytes for item in items), run)


def adasum(
    group: Group, name: str | None, xs: Sequence[A], *, in_place: bool, scaling: Scaling
) -> Plan[list[A]]:
    """Plan the Adasum of each array; the host computes it."""
    kind = "adasum_" if in_place else "adasum"
    adapter = _adapter_of_all(kind, xs)
    if in_place:
        for x in xs:
            adapter.require_writable(x)
    sources = [_contiguous(x, adapter) for x in xs]
    work = sources if in_place else [adapter.empty(x, adapter.shape(x)) for x in xs]
    way = _Way(
        group,
        Issue.of(group, adapter, *xs),
        sources,
        lambda mirrors: host_adasum.plan(group, None, mirrors, in_place=True, scaling=scaling),
        "Adasum is computed there",
    )

    def finish() -> list[A]:
        return [_written(x, w, adapter, in_place=in_place) for x, w in zip(xs, work, strict=True)]

    async def run(t: Channel) -> Any:
        return await way.run(t, work, lambda _: [], finish)

    call = host_adasum.call_of(name, xs, in_place=in_place, scaling=scaling, place=_PLACE)
    return _plan(call, sum(adapter.span(x).nbytes for x in sources), run)


def _fused(
    team: GpuTeam,
    sources: Sequence[Span],
    targets: Sequence[Span],
    op: Op,
    is_deterministic: bool,
) -> Job:
    """Return the reduction of several arrays of one dtype as one."""
    if len(sources) == 1:
        return Job(Reduce(sources[0], targets[0], op, is_deterministic=is_deterministic))
    counts = [source.count for source in sources]
    memory = team.scratch(sum(source.nbytes for source in sources))
    whole = Span(memory.address, sum(counts), sources[0].dtype, memory.owner)
    work = Reduce(whole, whole, op, is_deterministic=is_deterministic)
    return Job(work, packed=sources, unpacked=targets, buffer=whole)


_NO_FACTORS = "factors before and after a reduction are applied there"


def _plan(call: Call, nbytes: int, run: Callable[[Channel], Coroutine[Any, Any, Any]]) -> Plan[Any]:
    return Plan(call, nbytes, run, agrees_first=True)


def _adapter_of(x: Array) -> DeviceAdapter:
    adapter = device_adapter_for(x)
    assert adapter is not None
    return adapter


def _adapter_of_all(kind: str, xs: Sequence[Array]) -> DeviceAdapter:
    """Return the adapter that all arrays have. Raises TypeError if they have not."""
    adapters = [device_adapter_for(x) for x in xs]
    first = adapters[0]
    assert first is not None
    other = next((i for i, adapter in enumerate(adapters) if adapter is not first), None)
    if other is not None:
        kinds = "in host memory" if adapters[other] is None else "of another library"
        raise TypeError(
            f"{kind}: array 0 is on a GPU, array {other} is {kinds}. Pass arrays of one kind."
        )
    return first


def _reduction(
    kind: str, name: str | None, op: Op, x: Array, adapter: DeviceAdapter, **options: Any
) -> Call:
    return plans.reduction(kind, name, op, x, adapter, place=_PLACE, **options)


def _contiguous(x: A, adapter: DeviceAdapter) -> A:
    copied: A = x if adapter.is_contiguous(x) else adapter.copy(x)
    return copied


def _written(x: A, work: A, adapter: DeviceAdapter, *, in_place: bool) -> A:
    """Return the result; a strided array gets it by a copy on the current stream."""
    if not in_place:
        return work
    if work is x:
        adapter.written(x)
    else:
        adapter.assign(x, work)
    return x
