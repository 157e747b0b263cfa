"""Returns the commands for one rank's stream that carry out a Work over IPC, by phase. Pure.

One rank of each GPU reduces a part of the elements. It reads that part from the memory of all
ranks, combines it in the order of ranks, and writes the result to the memory of each rank that gets
it. That moves 2 * size * nbytes through memory, the least possible, and a GPU that ranks share need
not switch between their contexts. In a reduce-scatter, it does so for the part of each rank of its
GPU. Arrays in memory of device/ipc_pool.py are used directly. Elements of other arrays go
through staging memory, unless the rank that has the array also reduces them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from ringcomm.arrays.base import Span
from ringcomm.arrays.dtypes import DType
from ringcomm.collectives.operators import Op
from ringcomm.gpu.device.memory import NOWHERE, Address
from ringcomm.gpu.kernels.base import Kernel
from ringcomm.gpu.kernels.reduce import ReduceKernel
from ringcomm.gpu.transports.slices import Slice, even_parts, passes
from ringcomm.gpu.transports.works import GpuMove, GpuReduce, Pull, Work
from ringcomm.transport.node import To

_T = TypeVar("_T")


@dataclass(frozen=True)
class Copy:
    """A copy from address to address."""

    target: int
    source: int
    nbytes: int


Command = Copy | ReduceKernel


@dataclass(frozen=True)
class Outline:
    """The addresses at which other ranks find the arrays of one rank for a Work."""

    source: Address = NOWHERE  # NOWHERE: other ranks cannot map it
    target: Address = NOWHERE  # NOWHERE: other ranks cannot map it
    staging: Address = NOWHERE  # staging memory, for a source or target that they cannot map
    shown: int = 0  # Move: bytes of the source that go through the staging memory

    NBYTES: ClassVar = 8 + 3 * Address.NBYTES

    def pack(self) -> bytes:
        parts = (self.source.pack(), self.target.pack(), self.staging.pack())
        return self.shown.to_bytes(8, "little") + b"".join(parts)

    @classmethod
    def unpack(cls, packed: bytes) -> Outline:
        n = Address.NBYTES
        source, target, staging = (Address.unpack(packed[8 + k * n :][:n]) for k in range(3))
        return cls(source, target, staging, int.from_bytes(packed[:8], "little"))


@dataclass(frozen=True)
class MappedView:
    """The memory of a team, as one rank sees it.

    Attributes:
        rank: this rank.
        reducers: for each rank, the rank that reduces on its GPU: the first one there.
        outlines: the outlines of all ranks for the same work, by rank.
        capacity: bytes of each rank's staging memory.
        staging: function that returns the address of this rank's staging memory.
        find: function that maps another rank's memory into this process; returns the address.
    """

    rank: int
    reducers: tuple[int, ...]
    outlines: Sequence[Outline]
    capacity: int
    staging: Callable[[], int]
    find: Callable[[int, Address], int]

    @property
    def mine(self) -> Outline:
        return self.outlines[self.rank]

    @property
    def size(self) -> int:
        return len(self.outlines)


def others_of(each: Sequence[_T], rank: int) -> list[_T]:
    """Return the entries of the other ranks; each rank begins with the entry after its own."""
    return [each[(rank + shift) % len(each)] for shift in range(1, len(each))]


def is_written_by_others(work: GpuReduce, *, reduces: bool) -> bool:
    """Return True if other ranks write parts of this rank's result; `reduces`: it reduces, too."""
    if work.to is To.OWNER:
        return not reduces
    return work.to is To.ALL or work.target is not None


def phases(work: Work, view: MappedView) -> Iterator[list[Command]]:
    """Yield the commands of each phase; all ranks meet between two phases."""
    return _reduce(work, view) if isinstance(work, GpuReduce) else _move(work, view)


def kernels(work: Work, size: int) -> list[Kernel]:
    if isinstance(work, GpuMove):
        return []
    return [_reduce_kernel(size, size if work.to is To.ALL else 1, work.dtype, work.op)]


@functools.lru_cache(maxsize=64)
def _reduce_kernel(size: int, n_targets: int, dtype: DType, op: Op) -> ReduceKernel:
    return ReduceKernel((0,) * size, (0,) * n_targets, 0, dtype, op, op.divisor(size))


# --- reductions -----------------------------------------------------------------------------------
def _reduce(work: GpuReduce, view: MappedView) -> Iterator[list[Command]]:
    item = work.dtype.itemsize
    having = range(view.size) if work.to is To.OWNER else sorted(set(view.reducers))
    parts = work.parts or even_parts(work.source.count, len(having), item)
    is_staged = any(outline.staging.region for outline in view.outlines)
    ready: list[Command] = []
    for slices in passes(parts, item, view.capacity if is_staged else None):
        by_rank = [(r, each) for r, each in zip(having, slices, strict=True) if each.count]
        mine = [(r, each) for r, each in by_rank if view.reducers[r] == view.rank]
        theirs = [(r, each) for r, each in by_rank if view.reducers[r] != view.rank]
        yield ready + _stage(work, view, [each for _, each in theirs])
        yield [_combine(work, view, r, each) for r, each in mine]
        ready = _unstage(work, view, theirs)
    yield ready


def _stage(work: GpuReduce, view: MappedView, slices: Sequence[Slice]) -> list[Command]:
    """Copy the slices that others reduce to the staging memory if those cannot map the source."""
    if view.mine.source.region:
        return []
    pieces = [(piece, work.source[piece.start : piece.stop]) for piece in slices]
    return [Copy(view.staging() + p.staged_at, span.address, span.nbytes) for p, span in pieces]


def _unstage(
    work: GpuReduce, view: MappedView, slices: Sequence[tuple[int, Slice]]
) -> list[Command]:
    """Copy the results of others from the staging memory if those cannot map the target."""
    is_written = is_written_by_others(work, reduces=view.reducers[view.rank] == view.rank)
    if view.mine.target.region or work.target is None or not is_written:
        return []
    first = _first_of_target(work, view.rank)
    pieces = [
        (piece, work.target[piece.start - first : piece.stop - first])
        for rank, piece in slices
        if work.to is not To.OWNER or rank == view.rank
    ]
    return [Copy(span.address, view.staging() + p.staged_at, span.nbytes) for p, span in pieces]


def _combine(work: GpuReduce, view: MappedView, rank: int, piece: Slice) -> Command:
    """Combine elements of a pass: those of `rank`, if each rank gets its own."""
    addresses = [outline.source for outline in view.outlines]
    sources = _places(view, range(view.size), addresses, work.source, piece)
    getting = {To.ALL: range(view.size), To.OWNER: (rank,), To.ROOT: (work.root,)}[work.to]
    own = work.target or work.source  # without a target, `own` gives only the itemsize
    first = _first_of_target(work, rank)
    targets = _places(view, getting, [o.target for o in view.outlines], own, piece, first=first)
    divisor = work.op.divisor(view.size)
    return ReduceKernel(sources, targets, piece.count, work.dtype, work.op, divisor)


def _first_of_target(work: GpuReduce, rank: int) -> int:
    return work.parts[rank].start if work.to is To.OWNER else 0


def _places(
    view: MappedView,
    ranks: Iterable[int],
    addresses: Sequence[Address],
    own: Span,
    piece: Slice,
    *,
    first: int = 0,
) -> tuple[int, ...]:
    """Return the addresses of a slice on some ranks: in their arrays, or in staging memory.

    Their arrays begin with the element of number `first`.
    """
    offset, places = (piece.start - first) * own.dtype.itemsize, []
    for r in ranks:
        if r == view.rank:
            places.append(own.address + offset)
        elif addresses[r].region:
            places.append(view.find(r, addresses[r]) + offset)
        else:
            places.append(view.find(r, view.outlines[r].staging) + piece.staged_at)
    return tuple(places)


# --- moves ----------------------------------------------------------------------------------------
def _move(work: GpuMove, view: MappedView) -> Iterator[list[Command]]:
    longest = max(outline.shown for outline in view.outlines)
    for start in range(0, max(1, longest), view.capacity):
        yield _show(work, view, start)
        mine = [p for p in work.pulls if p.dest == view.rank and p.start < p.stop]
        yield [copy for pull in mine for copy in _pull(pull, work, view, start)]
    yield []


def _show(work: GpuMove, view: MappedView, start: int) -> list[Command]:
    """Copy a window of the source to the staging memory if others pull from there."""
    is_wanted = any(p.source == view.rank != p.dest for p in work.pulls)
    if work.source is None or not view.mine.shown or not is_wanted:
        return []
    nbytes = min(view.capacity, work.source.nbytes - start)
    return [Copy(view.staging(), work.source.address + start, nbytes)] if nbytes > 0 else []


def _pull(pull: Pull, work: GpuMove, view: MappedView, window: int) -> list[Command]:
    """Copy the part of a pull that lies in a window of the source."""
    assert work.target is not None
    at, outline = work.target.address + pull.at, view.outlines[pull.source]
    if pull.source == view.rank or not outline.staging.region:
        if window:
            return []  # the first window has copied the whole pull
        if pull.source == view.rank:
            assert work.source is not None
            whole = work.source.address
        else:
            whole = view.find(pull.source, outline.source)
        return [Copy(at, whole + pull.start, pull.stop - pull.start)]
    start, stop = max(pull.start, window), min(pull.stop, window + view.capacity)
    if start >= stop:
        return []
    staged = view.find(pull.source, outline.staging) + start - window
    return [Copy(at + start - pull.start, staged, stop - start)]
