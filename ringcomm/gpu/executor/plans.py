"""The executor that the engine loads for arrays on GPUs; see engine/operations/base.py.

It plans operations on arrays in a GPU's memory, after their arguments have been checked.

The ranks agree as on any other operation. A plan notes how far the caller's stream is at
the call. Once the ranks agree, the operation is enqueued on the team's stream, behind that point.
Taking the result makes the current stream wait for it. No host waits for a GPU, unless arrays
go through host memory: then the CPU's operation is carried out on copies of the arrays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial, singledispatch
from typing import Any, Final

import numpy as np

from ringcomm.arrays import Array, DeviceAdapter, Span
from ringcomm.arrays.dtypes import DType
from ringcomm.collectives.fusion import Item
from ringcomm.collectives.message_patterns import consecutive
from ringcomm.collectives.operators import ReductionOptions
from ringcomm.engine.core.agreement import gather_alike, gather_counts
from ringcomm.engine.core.call import Call
from ringcomm.engine.core.context import EngineContext
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.plan import Plan
from ringcomm.engine.operations.adasum import Adasum
from ringcomm.engine.operations.allgather_and_gather import Gathering
from ringcomm.engine.operations.alltoall import Alltoall
from ringcomm.engine.operations.base import (
    ArrayReduction,
    DeviceExecutor,
    Operation,
    contiguous,
    rows_by_rank,
    written,
)
from ringcomm.engine.operations.broadcast import Broadcast
from ringcomm.engine.operations.grouped import GroupedAllreduce
from ringcomm.engine.operations.into_array import AllgatherInto, AlltoallInto, ReduceScatterInto
from ringcomm.engine.operations.scan import Scan
from ringcomm.engine.operations.scatter import Scatter
from ringcomm.gpu.executor.engine_gpus import Gpus, issue_of
from ringcomm.gpu.executor.host_staging import Staging, copied, make, through_host
from ringcomm.gpu.executor.jobs import Jobs
from ringcomm.gpu.executor.streams import Issue
from ringcomm.gpu.kernels.scale import can_scale
from ringcomm.gpu.transports.base import GpuTransport
from ringcomm.gpu.transports.transport_choice import GpuChoice
from ringcomm.gpu.transports.works import GpuMove, GpuReduce, Job, Pull
from ringcomm.transport.channel import Channel
from ringcomm.transport.node import To

_NO_FACTORS = "factors of integers and complex numbers are applied by the CPU"
_NO_SCAN = "transports of GPUs do not compute scans"
_NO_ADASUM = "transports of GPUs do not compute Adasum"


@singledispatch
def plan(operation: Operation) -> Plan[Any]:
    raise TypeError(f"{operation.call.kind} takes only arrays in host memory")


@dataclass(slots=True, eq=False)
class _Course:
    """One operation, for any transport.

    Attributes:
        group: the operation's group.
        issue: the operation's Issue.
        sources: arrays that the operation reads.
        results: arrays that the operation writes; None: this rank does not get that result.
        finish: function that is called last, after the operation was enqueued on the current
            stream; returns the result.
        on_mirrors: function that plans the operation for copies of the sources in host memory.
        enqueues: finish() enqueues copies; False: it enqueues nothing.
        host_only: why the operation always goes through host memory; "": it need not.
        is_elementwise: see through_host().
    """

    group: Group
    issue: Issue
    sources: Sequence[Array]
    results: Sequence[Array | None]
    finish: Callable[[], Any]
    on_mirrors: Callable[[list[Any]], Plan[Any]]
    enqueues: bool = True
    host_only: str = ""
    is_elementwise: bool = False

    async def run(self, t: Channel, jobs: Jobs) -> Any:
        team = Gpus.of(self.group.engine).team(self.group)
        prepared = await team.take_turn(t, self.issue, None if self.host_only else jobs)
        try:
            if team.transport is not None and not self.host_only:
                return await team.carry_out(
                    *(t, self.issue, jobs, self.finish, self.sources),
                    enqueues=self.enqueues,
                    prepared=prepared,
                )
        finally:
            team.order.end_turn()
        if team.transport is not None:
            team.announce(self.host_only)
        return await through_host(
            team,
            t,
            self.issue,
            sources=self.sources,
            results=self.results,
            on_mirrors=self.on_mirrors,
            finish=self.finish,
            is_elementwise=self.is_elementwise,
        )

    def plan(self, call: Call, nbytes: int, *jobs: Job) -> Plan[Any]:
        return _plan(call, nbytes, lambda t: self.run(t, jobs))


@plan.register
def _reduction(o: ArrayReduction) -> Plan[Any]:
    x, adapter, group, options = o.x, o.adapter, o.group, o.options
    source, shape = contiguous(x, adapter), adapter.shape(x)
    span = adapter.span(source)
    parts: list[slice] = []
    out = None
    if o.to is To.OWNER:
        parts, mine = rows_by_rank(shape, group)
        out = x[mine] if o.in_place else adapter.empty(x, (mine.stop - mine.start, *shape[1:]))
    elif o.to is To.ALL or group.rank == o.root:
        out = source if o.in_place else adapter.empty(x, shape)

    def finish() -> Any:
        if not o.in_place or out is None:
            return x if o.in_place else out
        if o.to is To.OWNER:
            adapter.written(x)
            return out
        return written(x, out, adapter)

    course = _Course(
        group,
        issue_of(group, adapter, x),
        [source],
        [out],
        finish,
        o.on_mirrors,
        enqueues=o.in_place and source is not x,
        host_only=_why_on_host(options, [span]),
        is_elementwise=o.to is To.ALL,
    )
    target = span if out is source else None if out is None else adapter.span(out)

    def work(source: Span) -> GpuReduce:
        is_ordered = options.deterministic
        return GpuReduce(source, target, options.op, o.to, o.root, tuple(parts), is_ordered)

    def jobs(transport: GpuTransport) -> list[Job]:
        here = _scratch(transport, [span])
        return [Job(work(here), [span], (), here, options)]

    if options.prescale == 1.0:  # nothing is copied
        return course.plan(o.call, span.nbytes, Job(work(span), options=options))
    return _plan(o.call, span.nbytes, lambda t: course.run(t, jobs))


@plan.register(GroupedAllreduce)
@plan.register(Adasum)
def _grouped(o: GroupedAllreduce | Adasum) -> Plan[Any]:
    xs, adapter, group, options = o.x, o.adapter[0], o.group, o.options
    sources = [contiguous(x, adapter) for x in xs]
    work = sources if o.in_place else [adapter.empty(x, adapter.shape(x)) for x in xs]
    spans, targets = ([adapter.span(x) for x in each] for each in (sources, work))
    if isinstance(o, Adasum):
        batches, host_only = [], _NO_ADASUM
    else:
        batches = o.batches([Item(span.nbytes, span.dtype.name) for span in spans])
        host_only = _why_on_host(options, spans)

    def finish() -> list[Any]:
        if not o.in_place:
            return work
        # The current stream copies results to strided arrays.
        return [written(x, w, a) for x, w, a in zip(xs, work, o.adapter, strict=True)]

    def jobs(transport: GpuTransport) -> list[Job]:
        return [
            _fused(transport, [spans[i] for i in each], [targets[i] for i in each], options)
            for each in batches
        ]

    issue = issue_of(group, adapter, *xs)
    course = _Course(group, issue, sources, work, finish, o.on_mirrors, host_only=host_only)
    return _plan(o.call, sum(span.nbytes for span in spans), lambda t: course.run(t, jobs))


@plan.register
def _gathering(o: Gathering) -> Plan[Any]:
    x, adapter, group = o.x, o.adapter, o.group
    source, shape = contiguous(x, adapter), adapter.shape(x)
    issue, span = issue_of(group, adapter, x), adapter.span(source)
    width = math.prod(shape[1:]) * span.dtype.itemsize

    async def run(t: Channel) -> Any:
        rows = await gather_counts(shape[0], t)
        is_due = o.root in (None, t.rank)
        wanted = (sum(rows), *shape[1:])
        out = await issue.memory.launcher.call(lambda: issue.empty(x, wanted)) if is_due else None
        parts = consecutive([n * width for n in rows])
        takers = range(t.size) if o.root is None else [o.root]
        pulls = tuple(
            Pull(r, d, 0, rows[r] * width, parts[r].start)
            for r, d in itertools.product(range(t.size), takers)
        )
        job = Job(GpuMove(span, adapter.span(out) if is_due else None, pulls))
        course = _Course(group, issue, [source], [out], lambda: out, o.on_mirrors)
        return await course.run(t, [job])

    return _plan(o.call, span.nbytes, run)


@plan.register
def _allgather_into(o: AllgatherInto) -> Plan[Any]:
    out, x, adapter, group, parts = o.out, o.x, o.adapter, o.group, o.parts
    target, source = o.target, o.source
    item = source.dtype.itemsize
    pulls = tuple(
        Pull(r, d, 0, (parts[r].stop - parts[r].start) * item, parts[r].start * item)
        for r, d in itertools.product(range(group.size), range(group.size))
        if r != d or target[parts[r]].address != source.address
    )

    def finish() -> Any:
        adapter.written(out)
        return out

    issue = issue_of(group, adapter, out, x)
    course = _Course(group, issue, [out, x], [out], finish, o.on_mirrors)
    job = Job(GpuMove(source, target, pulls))
    return course.plan(o.call, target.nbytes, job)


@plan.register
def _reduce_scatter_into(o: ReduceScatterInto) -> Plan[Any]:
    out, x, adapter, group, parts = o.out, o.x, o.adapter, o.group, o.parts
    target, source = o.target, o.source
    own = source[parts[group.index]]
    is_apart = target.end <= source.address or source.end <= target.address
    # Other ranks read x until the end, except for this rank's part.
    is_direct = is_apart or own.address == target.address
    result = out if is_direct else adapter.empty(out, adapter.shape(out))

    def finish() -> Any:
        return written(out, result, adapter)

    issue = issue_of(group, adapter, out, x)
    course = _Course(group, issue, [x], [result], finish, o.on_mirrors)
    options, to = o.options, adapter.span(result)
    reduce = GpuReduce(source, to, options.op, To.OWNER, 0, tuple(parts), options.deterministic)
    return course.plan(o.call, source.nbytes, Job(reduce))


@plan.register
def _alltoall_into(o: AlltoallInto) -> Plan[Any]:
    out, x, adapter, group = o.out, o.x, o.adapter, o.group

    def finish() -> Any:
        adapter.written(out)
        return out

    issue = issue_of(group, adapter, out, x)
    course = _Course(group, issue, [x], [out], finish, o.on_mirrors)

    async def run(t: Channel) -> Any:
        pulls = _exchanges(await o.require_alike(t), o.source.dtype.itemsize)
        return await course.run(t, [Job(GpuMove(o.source, o.target, pulls))])

    return _plan(o.call, o.source.nbytes, run)


@plan.register
def _scatter(o: Scatter) -> Plan[Any]:
    source = contiguous(o.x, o.adapter)
    staging = Staging(o.group, issue_of(o.group, o.adapter, o.x))

    async def run(t: Channel) -> Any:
        mirror, lease = await staging.fetch(source)
        result = await o.on_mirrors([mirror]).carry_out(t)
        del lease
        return result

    return Plan(o.call, o.adapter.span(source).nbytes, run)


@plan.register
def _scan(o: Scan) -> Plan[Any]:
    x, adapter, group = o.x, o.adapter, o.group
    source = contiguous(x, adapter)
    out = adapter.empty(x, adapter.shape(x))
    course = _Course(
        group,
        issue_of(group, adapter, x),
        [source],
        [out],
        lambda: out,
        o.on_mirrors,
        host_only=_NO_SCAN,
        is_elementwise=True,
    )
    return course.plan(o.call, adapter.span(source).nbytes)


@plan.register
def _alltoall(o: Alltoall) -> Plan[Any]:
    x, adapter, group = o.x, o.adapter, o.group
    source, shape = contiguous(x, adapter), adapter.shape(x)
    issue, span = issue_of(group, adapter, x), adapter.span(source)
    width = math.prod(shape[1:]) * span.dtype.itemsize

    async def run(t: Channel) -> Any:
        rows = await gather_alike(np.array(o.sent, np.int64).tobytes(), t)
        table = np.frombuffer(b"".join(rows), np.int64).reshape(t.size, t.size)
        received = table[:, t.rank].tolist()
        wanted = (sum(received), *shape[1:])
        out = await issue.memory.launcher.call(lambda: issue.empty(x, wanted))
        result = (out, received) if o.return_splits else out
        course = _Course(group, issue, [source], [out], lambda: result, o.on_mirrors)
        job = Job(GpuMove(span, adapter.span(out), _exchanges(table, width)))
        return await course.run(t, [job])

    return _plan(o.call, span.nbytes, run)


def _exchanges(table: np.ndarray[Any, np.dtype[np.int64]], width: int) -> tuple[Pull, ...]:
    """Return the pulls that bring table[r, d] rows from rank r to rank d."""
    starts = np.cumsum(table, axis=1) - table  # row offsets in rank r's source
    places = np.cumsum(table, axis=0) - table  # row offsets in rank d's target
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


@plan.register
def _broadcast(o: Broadcast) -> Plan[Any]:
    x, adapter, group, root = o.x, o.adapter, o.group, o.root
    is_root = group.rank == root
    if o.in_place:
        work = contiguous(x, adapter)
    else:
        work = adapter.copy(x) if is_root else adapter.empty(x, adapter.shape(x))
    span = adapter.span(work)
    pulls = tuple(Pull(root, d, 0, span.nbytes, 0) for d in range(group.size) if d != root)
    job = Job(GpuMove(span if is_root else None, None if is_root else span, pulls))

    def finish() -> Any:
        if is_root or not o.in_place:
            return x if o.in_place else work
        return written(x, work, adapter)

    issue = issue_of(group, adapter, x)
    results = [None if is_root else work]
    course = _Course(group, issue, [work], results, finish, o.on_mirrors)
    return course.plan(o.call, span.nbytes, job)


def _fused(
    transport: GpuTransport,
    sources: Sequence[Span],
    targets: Sequence[Span],
    options: ReductionOptions,
) -> Job:
    """Return one reduction for several arrays of one dtype."""
    reduce = partial(GpuReduce, op=options.op, is_deterministic=options.deterministic)
    if len(sources) == 1 and options.prescale == 1.0:
        return Job(reduce(sources[0], targets[0]), options=options)
    whole = _scratch(transport, sources)
    return Job(reduce(whole, whole), sources, targets, whole, options)


def _scratch(transport: GpuTransport, sources: Sequence[Span]) -> Span:
    memory = transport.scratch(sum(source.nbytes for source in sources))
    count = sum(source.count for source in sources)
    return Span(memory.address, count, sources[0].dtype, memory.owner)


def _why_on_host(options: ReductionOptions, spans: Sequence[Span]) -> str:
    is_scaled = options.is_scaled and not all(can_scale(span.dtype) for span in spans)
    return _NO_FACTORS if is_scaled else ""


def _plan(call: Call, nbytes: int, run: Callable[[Channel], Coroutine[Any, Any, Any]]) -> Plan[Any]:
    return Plan(call, nbytes, run, agrees_first=True)


class _GpuExecutor:
    """The DeviceExecutor of CUDA; Gpus holds its state, one per engine."""

    def plan(self, operation: Operation) -> Plan[Any]:
        return plan(operation)

    def stage(self, group: Group, adapter: DeviceAdapter, x: Array) -> Staging:
        return Staging(group, issue_of(group, adapter, x))

    def make(
        self, group: Group, kind: str, dtype: DType, shape: tuple[int, ...]
    ) -> tuple[Array, Staging]:
        return make(group, kind, dtype, shape)

    def copied(self, group: Group, x: Array) -> Array:
        return copied(group, x)

    def note_current(self, engine: EngineContext, index: int) -> None:
        Gpus.of(engine).current = index

    def require(self, engine: EngineContext) -> None:
        Gpus.of(engine).require()

    def allocate(
        self, engine: EngineContext, adapter: DeviceAdapter, index: int, nbytes: int
    ) -> Span:
        regions = Gpus.of(engine).memory(index).device.regions
        return regions.take(nbytes, adapter.stream(index), adapter.stream_owner(index))

    def choice(self, engine: EngineContext, group: Group) -> GpuChoice | None:
        return None if group.rank is None else Gpus.of(engine).choice(group)


EXECUTOR: Final[DeviceExecutor] = _GpuExecutor()
