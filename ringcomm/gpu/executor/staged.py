"""Arrays of a GPU that go through host memory: out, through the CPU's collectives, and in again.

The blocks are memory that the ranks of a node share and that the GPU reaches, so nothing is copied
besides. Long reductions go in pieces: one is on its way out while another is reduced and a third on
its way in.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ringcomm.arrays import adapter_for, device_adapter_of_kind, first_device_kind
from ringcomm.arrays.base import Array, Bytes, Span
from ringcomm.arrays.dtypes import DType
from ringcomm.arrays.mirror import Mirror
from ringcomm.engine.core.execution import Plan
from ringcomm.gpu.device.base import Device
from ringcomm.gpu.device.host_pool import Block
from ringcomm.gpu.executor.gpus import Gpus, issue_of
from ringcomm.gpu.executor.streams import Event, GpuMemory, Issue, Launched, Reached
from ringcomm.transport.channel import Channel, Wait

if TYPE_CHECKING:
    from ringcomm.engine.core.group import Group
    from ringcomm.gpu.executor.team import GpuTeam

PIECE_NBYTES = 4 << 20
Host = Callable[[list[Any]], Plan[Any]]


class _Lease:
    """Blocks of one operation; they are given back with the last reference to this."""

    def __init__(self, memory: GpuMemory) -> None:
        self._pool = memory.host
        self._blocks: list[Block] = []

    def take(self, nbytes: int) -> Bytes:
        """Return memory that the GPU reaches."""
        block = self._pool.take(nbytes)
        self._blocks.append(block)
        return block.bytes

    def address(self, part: Bytes) -> int:
        """Return where the GPU finds a part of what was taken."""
        at = part.ctypes.data
        for block in self._blocks:
            offset = at - block.whole.ctypes.data
            if 0 <= offset < block.whole.nbytes:
                return block.address + offset
        raise AssertionError("a mirror lies in what was taken for it")

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
    host: Host,
    finish: Callable[[], Any],
    is_elementwise: bool = False,
) -> Launched[Any]:
    """Carry out a collective of the CPU on contiguous arrays of the GPU.

    `host` plans it for mirrors of the sources. Where there is a result for each source and it
    `is_elementwise`, it goes in pieces. `finish` is called with the stream current, behind it all.
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
    device = issue.memory.device
    issue.let_wait(stream)
    with device.active():
        fetched = [piece.fetch(device, stream, lease) for piece in pieces]
    for piece, here in zip(pieces, fetched, strict=True):
        await Wait((Reached(here),))
        made = await host(piece.mirrors).run(t)
        with device.active():
            piece.bring(made, device, stream, lease)
    with issue.on(stream):
        result = finish()
    keeps = (sources, lease)
    return team.follow(t, issue, stream, result, keeps=keeps, waits_for_others=False)


@dataclass(frozen=True)
class Staging:
    """Moves arrays of one operation through host memory, where that is all there is to do."""

    group: Group  # whose operation it is
    issue: Issue  # of the operation

    def empty(self, like: Array, shape: tuple[int, ...]) -> Array:
        """Return an array that belongs to the caller's stream."""
        return self.issue.empty(like, shape)

    async def fetch(self, x: Array) -> tuple[Mirror, object]:
        """Return a mirror of a contiguous array with its contents, and what keeps its memory."""
        issue = self.issue
        lease = _Lease(issue.memory)
        span = issue.adapter.span(x)
        mirror = Mirror.make(span.dtype, issue.adapter.shape(x), lease.take)
        device, stream = issue.memory.device, issue.memory.copy_stream
        issue.let_wait(stream)
        with device.active():
            here = _Piece([mirror], [span], []).fetch(device, stream, lease)
        await Wait((Reached(here),))
        return mirror, lease

    async def bring(
        self,
        t: Channel,
        *,
        out: Array,
        fill: Callable[[Mirror], Awaitable[object]],
        finish: Callable[[], Any],
    ) -> Launched[Any]:
        """Copy to a contiguous array what `fill` writes to a mirror of it; see through_host()."""
        issue = self.issue
        lease = _Lease(issue.memory)
        span = issue.adapter.span(out)
        mirror = Mirror.make(span.dtype, issue.adapter.shape(out), lease.take)
        await fill(mirror)
        device, stream = issue.memory.device, issue.memory.copy_stream
        issue.let_wait(stream)
        with device.active():
            _Piece([], [], [span]).bring(mirror, device, stream, lease)
        with issue.on(stream):
            result = finish()
        team = Gpus.of(self.group.engine).team(self.group)
        keeps = (out, lease)
        return team.follow(t, issue, stream, result, keeps=keeps, waits_for_others=False)


def make(group: Group, kind: str, dtype: DType, shape: tuple[int, ...]) -> tuple[Array, Staging]:
    """Return an uninitialised array of a library on this rank's GPU.

    For a rank that has passed none; see Gpus.any_memory.
    """
    adapter = device_adapter_of_kind(kind)
    memory = Gpus.of(group.engine).any_memory
    with adapter.on_stream(memory.device.index, 0):
        out = adapter.make(dtype, shape)
        return out, Staging(group, issue_of(group, adapter, out))


def copied(group: Group, x: Array) -> Array:
    """Return a copy, on this rank's GPU, of an array in host memory; see make()."""
    host = adapter_for(x)
    out, staging = make(group, first_device_kind(), host.dtype(x), host.shape(x))
    issue = staging.issue
    issue.memory.upload(host.flat(x), issue.adapter.span(out), issue.ready[0])
    return out


@dataclass(frozen=True)
class _Piece:
    """Arrays, or parts of them, that go through host memory at once."""

    mirrors: list[Mirror]  # of the sources
    sources: list[Span]  # on the GPU
    targets: list[Span | None]  # on the GPU, of each result; None: it is not wanted

    def cut(self) -> list[_Piece]:
        """Return parts of it: of one source and one result, element by element."""
        (mirror,), (source,), (target,) = self.mirrors, self.sources, self.targets
        assert target is not None
        step = PIECE_NBYTES // source.dtype.itemsize
        parts = [slice(at, at + step) for at in range(0, max(source.count, 1), step)]
        return [_Piece([mirror.line(p)], [source[p]], [target[p]]) for p in parts]

    def fetch(self, device: Device, stream: int, lease: _Lease) -> Event:
        """Copy to the mirrors; return the event behind it."""
        for mirror, source in zip(self.mirrors, self.sources, strict=True):
            if source.nbytes:
                at = lease.address(mirror.flat.bytes)
                device.copy(stream, at, source.address, source.nbytes)
        return Event(device, stream)

    def bring(self, made: Any, device: Device, stream: int, lease: _Lease) -> None:
        """Copy the results to the GPU."""
        results = made if isinstance(made, list) else [made]
        for target, result in zip(self.targets, results, strict=True):
            if target is not None and target.nbytes:
                at = lease.address(result.flat.bytes)
                device.copy(stream, target.address, at, target.nbytes)
