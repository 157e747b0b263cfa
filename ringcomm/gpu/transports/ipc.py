"""Ranks whose GPUs reach each other's memory: one kernel reads from all, and writes to all.

Every rank owns a part of the elements. It reads that part from the memory of all ranks, combines it
in the order of ranks and writes the result where all want it: 2 * size * nbytes of memory traffic
in all, which is the least that anyone can do. Memory of device/regions.py is used where it stands;
other arrays go through staging memory, but for the part that the rank itself owns.

Streams wait for each other by numbers in host memory that all ranks map: a stream writes its
rank's, and waits for the others'. No kernel ever spins, so whoever writes those numbers frees what
is stuck (release()), and who is late stands there for everyone to see.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ringcomm.arrays.base import Bytes, Span
from ringcomm.collectives.op import AVERAGE, SUM
from ringcomm.errors import RingcommError
from ringcomm.gpu.device.base import Device, KernelReduction, KernelUpdate
from ringcomm.gpu.device.host_pool import PAGE_NBYTES
from ringcomm.gpu.device.regions import NOWHERE, Address, Neighbour
from ringcomm.gpu.transports.base import Move, Pull, Reduce, Update, Work
from ringcomm.gpu.transports.slices import Slice, even_parts, passes
from ringcomm.transport.node.steps import To

LINE = 128  # bytes between the numbers of two ranks: no two share a cache line
STAGING_NBYTES = 64 << 20
_GRAIN = 256
_T = TypeVar("_T")
_FAR = 1 << 30  # ahead of any number that a stream may be waiting for


def flags_nbytes(size: int) -> int:
    """Return how much host memory `size` ranks meet in: whole pages, to be registered."""
    return -(-size * LINE // PAGE_NBYTES) * PAGE_NBYTES


@dataclass(frozen=True)
class _Outline:
    """Where a rank's part in a work is.

    Attributes:
        source: where the others read.
        target: where they write.
        staging: where they do either if they cannot there; NOWHERE: they can.
        shown: bytes that the others may read in the staging memory, in a Move.
    """

    source: Address = NOWHERE
    target: Address = NOWHERE
    staging: Address = NOWHERE
    shown: int = 0

    def pack(self) -> bytes:
        parts = (self.source.pack(), self.target.pack(), self.staging.pack())
        return self.shown.to_bytes(8, "little") + b"".join(parts)

    @classmethod
    def unpack(cls, packed: bytes) -> _Outline:
        n = Address.NBYTES
        source, target, staging = (Address.unpack(packed[8 + k * n :][:n]) for k in range(3))
        return cls(source, target, staging, int.from_bytes(packed[:8], "little"))


class IpcMover:
    """GpuTransport of ranks that map each other's GPU memory.

    Args:
        device: this rank's.
        rank: of this rank in the team.
        size: number of ranks.
        flags: host memory that all of them map, zeroed; see flags_nbytes().
    """

    name = "ipc"

    def __init__(self, device: Device, rank: int, size: int, *, flags: Bytes) -> None:
        self._device = device
        self._rank = rank
        self._size = size
        self._regions = device.regions
        self._numbers = flags.view(np.uint32)[:: LINE // 4][:size]
        start = device.register(flags)
        self._flags = [start + LINE * r for r in range(size)]
        self._neighbours = [Neighbour(device) for _ in range(size)]
        self._phase = 0
        share = max(_GRAIN, STAGING_NBYTES // size // _GRAIN * _GRAIN)
        self._capacity = share * size
        self._staging: Span | None = None
        self._scratch: Span | None = None
        self.stream = device.new_stream()
        self.meets_on_stream = device.has_stream_values

    def try_out(self, addresses: Sequence[Address]) -> None:
        """Map memory of each rank: what may be exported may still not be mapped, in containers.

        Args:
            addresses: by rank; NOWHERE: that rank has a problem of its own.
        """
        for neighbour, address in self._others(list(zip(self._neighbours, addresses, strict=True))):
            if address != NOWHERE:
                neighbour.find(address)

    def meet(self) -> None:
        """Let the stream write this rank's number, and wait for the others'."""
        self._phase = (self._phase + 1) % (1 << 32)
        self._device.write_value(self.stream, self._flags[self._rank], self._phase)
        for flag in self._others(self._flags):
            self._device.await_value(self.stream, flag, self._phase)

    def release(self) -> None:
        """Write numbers that no stream waits for any more."""
        self._numbers[:] = (self._phase + _FAR) % (1 << 32)

    @property
    def late(self) -> tuple[int, ...]:
        """Ranks whose number is behind this one's; if none is, this one where it is not through."""
        numbers = self._numbers.copy()
        own = numbers[self._rank]
        behind = np.flatnonzero((numbers - own).view(np.int32) < 0)
        if not len(behind) and own != self._phase:
            return (self._rank,)
        return tuple(int(rank) for rank in behind)

    def scratch(self, nbytes: int) -> Span:
        """Return memory that the others map."""
        if self._scratch is None or self._scratch.nbytes < nbytes:
            self._scratch = self._regions.take(nbytes)
        return self._scratch[:nbytes]

    def outline(self, work: Work) -> bytes:
        """Return where this rank's arrays are."""
        source = self._find(work.source)
        if isinstance(work, Update):
            return _Outline(source, self._find(work.target)).pack()
        if isinstance(work, Reduce):
            target = self._find(work.target)
            is_private = not source.region or (_is_written_by_others(work) and not target.region)
            is_private = is_private and work.source.count > 0
            return _Outline(source, target, self._staging_if(is_private)).pack()
        shown = work.source.nbytes if work.source is not None and not source.region else 0
        return _Outline(source, NOWHERE, self._staging_if(shown > 0), shown).pack()

    def phases(self, work: Work, outlines: Sequence[bytes]) -> Iterator[None]:
        """See Mover."""
        known = [_Outline.unpack(each) for each in outlines]
        if isinstance(work, Reduce):
            yield from self._reduce(work, known)
        elif isinstance(work, Update):
            yield from self._update(work, known)
        else:
            yield from self._move(work, known)

    def close(self, *, is_clean: bool) -> None:
        """Unmap what the others have shown."""
        if is_clean:
            for neighbour in self._neighbours:
                neighbour.close()

    # --- reductions -------------------------------------------------------------------------------
    def _reduce(self, work: Reduce, outlines: Sequence[_Outline]) -> Iterator[None]:
        item = work.dtype.itemsize
        parts = work.parts or even_parts(work.source.count, self._size, item)
        is_staged = any(outline.staging.region for outline in outlines)
        for slices in passes(parts, item, self._capacity if is_staged else None):
            self._stage(work, outlines[self._rank], slices)
            yield
            self._combine(work, outlines, slices)
            yield
            self._unstage(work, outlines[self._rank], slices)

    def _stage(self, work: Reduce, mine: _Outline, slices: Sequence[Slice]) -> None:
        """Copy what others are to read, if they cannot read it where it stands."""
        if mine.source.region:
            return
        for piece in self._others(slices):
            source = work.source[piece.start : piece.stop]
            self._device.copy(self.stream, self._staged(piece), source.address, source.nbytes)

    def _unstage(self, work: Reduce, mine: _Outline, slices: Sequence[Slice]) -> None:
        """Copy what others have written, if they could not write it where it belongs."""
        if mine.target.region or work.target is None or not _is_written_by_others(work):
            return
        for piece in self._others(slices):
            target = work.target[piece.start : piece.stop]
            self._device.copy(self.stream, target.address, self._staged(piece), target.nbytes)

    def _combine(self, work: Reduce, outlines: Sequence[_Outline], slices: Sequence[Slice]) -> None:
        """Combine this rank's elements of this pass."""
        piece = slices[self._rank]
        if piece.count == 0:
            return
        reduction = KernelReduction(
            sources=tuple(self._source(r, work, outlines[r], piece) for r in range(self._size)),
            targets=self._targets(work, outlines, piece),
            count=piece.count,
            dtype=work.dtype,
            op=SUM if work.op is AVERAGE else work.op,
            divisor=work.op.divisor(self._size),
        )
        self._device.reduce(self.stream, reduction)

    def _targets(self, work: Reduce, outlines: Sequence[_Outline], piece: Slice) -> tuple[int, ...]:
        if work.to is To.OWNER:
            assert work.target is not None
            first = work.parts[self._rank].start
            return (work.target[piece.start - first :].address,)
        ranks = range(self._size) if work.to is To.ALL else (work.root,)
        return tuple(self._target(r, work, outlines[r], piece) for r in ranks)

    def _source(self, rank: int, work: Reduce, outline: _Outline, piece: Slice) -> int:
        if rank == self._rank:
            return work.source[piece.start :].address
        return self._place(rank, outline, outline.source, piece, work.dtype.itemsize)

    def _target(self, rank: int, work: Reduce, outline: _Outline, piece: Slice) -> int:
        if rank == self._rank:
            assert work.target is not None
            return work.target[piece.start :].address
        return self._place(rank, outline, outline.target, piece, work.dtype.itemsize)

    def _place(
        self, rank: int, outline: _Outline, address: Address, piece: Slice, item: int
    ) -> int:
        """Return where this rank finds elements of another: where they stand, or staged."""
        if address.region:
            return self._neighbours[rank].find(address) + piece.start * item
        return self._neighbours[rank].find(outline.staging) + piece.staged_at

    # --- steps of an optimizer --------------------------------------------------------------------
    def _update(self, work: Update, outlines: Sequence[_Outline]) -> Iterator[None]:
        sources = [work.source.address]
        if not work.is_reduced:
            sources = self._wholes(work.source, [outline.source for outline in outlines])
        targets = self._wholes(work.target, [outline.target for outline in outlines])
        yield
        for piece in work.pieces:
            read = piece.start * work.source.dtype.itemsize
            write = piece.start * work.target.dtype.itemsize
            step = KernelUpdate(
                sources=tuple(at + read for at in sources),
                targets=tuple(at + write for at in targets),
                owned=tuple(span.address for span in piece.owned),
                count=piece.stop - piece.start,
                gradient=work.source.dtype,
                weight=work.target.dtype,
                rule=piece.rule,
                numbers=piece.numbers,
                scale=work.scale,
            )
            if step.count:
                self._device.update(self.stream, step)
        yield

    def _wholes(self, own: Span, addresses: Sequence[Address]) -> list[int]:
        """Return where this rank finds an array of each rank, which the others can reach."""
        if own.count and not all(address.region for address in addresses):
            raise RingcommError("an update needs gradients and weights of rc.zeros(device='cuda')")
        return [
            own.address if r == self._rank or not own.count else self._neighbours[r].find(address)
            for r, address in enumerate(addresses)
        ]

    # --- moves ------------------------------------------------------------------------------------
    def _move(self, work: Move, outlines: Sequence[_Outline]) -> Iterator[None]:
        longest = max(outline.shown for outline in outlines)
        for k in range(max(1, -(-longest // self._capacity))):
            window = slice(k * self._capacity, (k + 1) * self._capacity)
            self._show(work, outlines[self._rank], window)
            yield
            for pull in work.pulls:
                if pull.dest == self._rank and pull.start < pull.stop:
                    self._pull(pull, work, outlines[pull.source], window)
            yield

    def _show(self, work: Move, mine: _Outline, window: slice) -> None:
        is_wanted = any(p.source == self._rank != p.dest for p in work.pulls)
        if work.source is None or not mine.shown or not is_wanted:
            return
        start, stop = window.start, min(window.stop, work.source.nbytes)
        if start < stop:
            source = work.source.address + start
            self._device.copy(self.stream, self._own_staging().address, source, stop - start)

    def _pull(self, pull: Pull, work: Move, outline: _Outline, window: slice) -> None:
        assert work.target is not None
        at = work.target.address + pull.at
        if pull.source == self._rank or not outline.staging.region:
            if window.start == 0:
                start = self._shown_at(pull.source, work, outline) + pull.start
                self._device.copy(self.stream, at, start, pull.stop - pull.start)
            return
        start, stop = max(pull.start, window.start), min(pull.stop, window.stop)
        if start < stop:
            staging = self._neighbours[pull.source].find(outline.staging)
            staged = staging + start - window.start
            self._device.copy(self.stream, at + start - pull.start, staged, stop - start)

    def _shown_at(self, rank: int, work: Move, outline: _Outline) -> int:
        if rank == self._rank:
            assert work.source is not None
            return work.source.address
        return self._neighbours[rank].find(outline.source)

    # --- memory -----------------------------------------------------------------------------------
    def _find(self, span: Span | None) -> Address:
        return NOWHERE if span is None or not span.count else self._regions.find(span)

    def _staging_if(self, is_needed: bool) -> Address:
        return self._regions.find(self._own_staging()) if is_needed else NOWHERE

    def _own_staging(self) -> Span:
        if self._staging is None:
            self._staging = self._regions.take(self._capacity)
        return self._staging

    def _staged(self, piece: Slice) -> int:
        return self._own_staging().address + piece.staged_at

    def _others(self, each: Sequence[_T]) -> list[_T]:
        """Return what is of other ranks, each rank with another one first."""
        return [each[(self._rank + shift) % self._size] for shift in range(1, self._size)]


def _is_written_by_others(work: Reduce) -> bool:
    return work.to is To.ALL or (work.to is To.ROOT and work.target is not None)
