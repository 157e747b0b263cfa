"""Carries out operations on arrays of a GPU by the CPU's collectives, with copies in host memory.

The GPU copies arrays to blocks of host memory and back. If possible, the ranks of a node share
these blocks, so that no other copy is made. Long reductions are cut into pieces: the GPU copies one
piece out and another one in while the CPU reduces a third.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ringcomm.arrays import adapter_for, device_adapter_of_kind, first_device_kind
from ringcomm.arrays.base import Array, Bytes, Span
from ringcomm.arrays.dtypes import DType
from ringcomm.arrays.host_mirror import Mirror
from ringcomm.engine.core.plan import Plan
from ringcomm.gpu.device.pinned_pool import PinnedBlock
from ringcomm.gpu.executor.engine_gpus import Gpus, issue_of
from ringcomm.gpu.executor.streams import GpuMemory, Issue, Launched, Mark, Reached
from ringcomm.transport.channel import Channel, Wait

if TYPE_CHECKING:
    from ringcomm.engine.core.group import Group
    from ringcomm.gpu.executor.team import GpuTeam

PIECE_NBYTES = 4 << 20


class _Lease:
    """Blocks of one operation, which are given back with the last reference to the lease."""

    def __init__(self, memory: GpuMemory) -> None:
        self._pool = memory.host
        self._blocks: list[PinnedBlock] = []

    def take(self, nbytes: int) -> Bytes:
        block = self._pool.take(nbytes)
        self._blocks.append(block)
        return block.bytes

    def address(self, part: Bytes) -> int:
        at = part.ctypes.data
        for block in self._blocks:
            offset = at - block.whole.ctypes.data
            if 0 <= offset < block.whole.nbytes:
                return self._pool.address(block) + offset
        raise AssertionError("a mirror lies in memory from take()")

    def __del__(self) -> None:
        for block in self._blocks:
            self._pool.give_back(block)


async def through_host(
    team: GpuTeam,
    t: Channel,
    issue: Issue,
    *,
    sources: Sequence[Array],
    results: Sequence[Array | None],
    on_mirrors: Callable[[list[Any]], Plan[Any]],
    finish: Callable[[], Any],
    is_elementwise: bool,
) -> Launched[Any]:
    """Carry out an operation on contiguous arrays of the GPU by the CPU's collective.

    Args:
        team: the group's team.
        t: the operation's channel.
        issue: the operation's Issue.
        sources: arrays that the operation reads.
        results: arrays that the operation writes; None: this rank does not get that result.
        on_mirrors: function that plans the operation for copies of the sources in host memory.
        finish: function that is called last, after the results were enqueued on the current
            stream; returns the result.
        is_elementwise: the operation has one source and one result, and can be cut into pieces.
    """
    lease = _Lease(issue.memory)
    stream = issue.memory.copy_stream
    spans = [issue.adapter.span(x) for x in sources]
    targets = [None if x is None else issue.adapter.span(x) for x in results]
    mirrors = [
        Mirror.make(span.dtype, issue.adapter.shape(x), lease.take)
        for span, x in zip(spans, sources, strict=True)
    ]
    whole = _Piece(mirrors, spans, targets)
    pieces = whole.cut() if is_elementwise else [whole]
    memory = issue.memory

    def fetch_all() -> list[Mark]:
        issue.let_wait(stream)
        return [piece.fetch(memory, lease) for piece in pieces]

    for piece, here in zip(pieces, await memory.launcher.call(fetch_all), strict=True):
        await Wait((Reached(here),))
        made = await on_mirrors(piece.mirrors).carry_out(t)
        await memory.launcher.call(partial(piece.bring, made, memory, lease))

    def end() -> Launched[Any]:
        with issue.on(stream):
            result = finish()
        return team.launched(issue, memory.copies, stream, result)

    return team.follow(t, await memory.launcher.call(end), (sources, lease))


@dataclass(frozen=True)
class Staging:
    """The Staging of engine/operations/base.py, for one operation."""

    group: Group
    issue: Issue

    def empty(self, like: Array, shape: tuple[int, ...]) -> Array:
        return self.issue.empty(like, shape)

    async def fetch(self, x: Array) -> tuple[Mirror, object]:
        """Return a copy of a contiguous array in host memory, and an object that keeps the copy."""
        issue = self.issue
        lease = _Lease(issue.memory)
        span = issue.adapter.span(x)
        mirror = Mirror.make(span.dtype, issue.adapter.shape(x), lease.take)
        memory = issue.memory

        def fetch() -> Mark:
            issue.let_wait(memory.copy_stream)
            return _Piece([mirror], [span], []).fetch(memory, lease)

        await Wait((Reached(await memory.launcher.call(fetch)),))
        return mirror, lease

    async def bring(
        self,
        t: Channel,
        *,
        out: Array,
        fill: Callable[[Mirror], Awaitable[object]],
        finish: Callable[[], Any],
    ) -> Launched[Any]:
        """Call `fill` with a mirror of `out`, then copy the mirror to `out`; see through_host()."""
        issue = self.issue
        lease = _Lease(issue.memory)
        span = issue.adapter.span(out)
        mirror = Mirror.make(span.dtype, issue.adapter.shape(out), lease.take)
        await fill(mirror)
        memory, team = issue.memory, Gpus.of(self.group.engine).team(self.group)
        stream = memory.copy_stream

        def bring() -> Launched[Any]:
            issue.let_wait(stream)
            _Piece([], [], [span]).bring(mirror, memory, lease)
            with issue.on(stream):
                result = finish()
            return team.launched(issue, memory.copies, stream, result)

        return team.follow(t, await memory.launcher.call(bring), (out, lease))


def make(group: Group, kind: str, dtype: DType, shape: tuple[int, ...]) -> tuple[Array, Staging]:
    """Return an uninitialised array of the library `kind` on Gpus.any_memory, and its Staging."""
    adapter = device_adapter_of_kind(kind)
    memory = Gpus.of(group.engine).any_memory
    device = memory.device
    with device.active(), adapter.on_stream(device.index, 0):
        out = adapter.make(dtype, shape)
        return out, Staging(group, issue_of(group, adapter, out))


def copied(group: Group, x: Array) -> Array:
    """Copy an array from host memory to Gpus.any_memory; return the copy."""
    host = adapter_for(x)
    out, staging = make(group, first_device_kind(), host.dtype(x), host.shape(x))
    issue = staging.issue
    issue.memory.upload(host.flat(x), issue.adapter.span(out), issue.ready[0])
    return out


@dataclass(frozen=True)
class _Piece:
    """Arrays, or parts of arrays, that go through host memory at once."""

    mirrors: list[Mirror]  # copies of the sources in host memory
    sources: list[Span]  # on the GPU
    targets: list[Span | None]  # on the GPU; None: this rank does not get that result

    def cut(self) -> list[_Piece]:
        (mirror,), (source,), (target,) = self.mirrors, self.sources, self.targets
        assert target is not None
        step = PIECE_NBYTES // source.dtype.itemsize
        parts = [slice(at, at + step) for at in range(0, max(source.count, 1), step)]
        return [_Piece([mirror.line(p)], [source[p]], [target[p]]) for p in parts]

    def fetch(self, memory: GpuMemory, lease: _Lease) -> Mark:
        for mirror, source in zip(self.mirrors, self.sources, strict=True):
            if source.nbytes:
                at = lease.address(mirror.flat.bytes)
                memory.device.copy(memory.copy_stream, at, source.address, source.nbytes)
        return memory.copies.make()

    def bring(self, made: Any, memory: GpuMemory, lease: _Lease) -> None:
        results = made if isinstance(made, list) else [made]
        for target, result in zip(self.targets, results, strict=True):
            if target is not None and target.nbytes:
                at = lease.address(result.flat.bytes)
                memory.device.copy(memory.copy_stream, target.address, at, target.nbytes)
