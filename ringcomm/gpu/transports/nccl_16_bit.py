"""Sums of 16-bit floats between hosts: each host sends its own sum, in float32.

If the owners of the elements received the values of all ranks, a host would send as many bytes as
the array has for each of its GPUs. So the ranks of a host add up their values first, each a part of
the array. Then the owners of a part on all hosts do the same, each a piece of the part; each owner
rounds once, and the results go back the same way. A host sends 3 (hosts - 1) / hosts of the array,
as collectives/algorithms/hierarchical.py does.

In a reduce-scatter, the ranks of a host add up the values for one rank of each host, and send each
of these ranks its sum: 2 (hosts - 1) / hosts of the array for a host. In a reduce, the owners send
their results to the root.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ringcomm.arrays.base import Span
from ringcomm.arrays.dtypes import DTYPES
from ringcomm.collectives.message_patterns import consecutive
from ringcomm.collectives.operators import AVERAGE, SUM, Op
from ringcomm.collectives.ranks_by_host import columns, host_of, hosts, owned
from ringcomm.gpu.device.base import Device
from ringcomm.gpu.kernels.base import Kernel
from ringcomm.gpu.kernels.reduce import ReduceKernel
from ringcomm.gpu.transports import slices
from ringcomm.gpu.transports.slices import even_parts, whole_grains
from ringcomm.gpu.transports.works import GpuReduce
from ringcomm.transport.node import To

_BYTE, _FLOAT32 = DTYPES["uint8"], DTYPES["float32"]
_GRAIN = 128  # elements: parts of windows begin at multiples of 256 bytes
Messages = Sequence[tuple[Span, int]]  # (bytes, the other rank)


class SumsByHost:
    """One rank's part in the sums.

    Args:
        device: this rank's GPU.
        stream: the stream of all work.
        rank: number of this rank.
        nodes: for each rank, a number that identifies its node.
        exchange: function that sends and receives messages at once. All ranks call it as often.
        take: function that returns memory for a purpose, which is kept for later calls.
    """

    def __init__(
        self,
        device: Device,
        stream: int,
        rank: int,
        nodes: tuple[int, ...],
        exchange: Callable[[Messages, Messages], None],
        take: Callable[[str, int], Span],
    ) -> None:
        self._device, self._stream, self._rank = device, stream, rank
        self._exchange, self._take = exchange, take
        self._size = len(nodes)
        self._hosts, self._columns = hosts(nodes), columns(nodes)
        self._served = owned(nodes)
        self._here = host_of(rank, nodes)
        place = self._here.index(rank)
        self._column = self._columns[place] if place < len(self._columns) else ()
        self._place = place

    def is_fit(self, work: GpuReduce) -> bool:
        """Return True if combine() sends fewer bytes between hosts than all pairs do."""
        if not work.dtype.is_16bit_float or work.is_deterministic or len(self._hosts) == 1:
            return False
        # Of all pairs, a host sends as many bytes as its ranks have; of its sums 3, or 2.
        return self._size > (1 if work.to is To.ALL else 2) * len(self._hosts)

    def kernels(self, work: GpuReduce) -> list[Kernel]:
        """Return the kernels of combine(); the same on all ranks."""
        numbers = sorted({len(host) for host in self._hosts})
        first = [self._within((0,) * n, 0, 0, work) for n in numbers]
        return [*first, self._between((0,) * len(self._hosts), 0, 0, work)]

    def combine(self, work: GpuReduce) -> None:
        """Enqueue this rank's part of a reduction, in passes."""
        if work.to is To.OWNER:
            self._scatter(work)
            return
        # An owner's memory for an element of its part: the values of its host, their sum, and the
        # sums of all hosts for its piece, which is shorter than the part.
        most = max(len(host) for host in self._hosts)
        room = slices.STAGING_NBYTES // (work.dtype.itemsize * most + 2 * _FLOAT32.itemsize)
        window = len(self._columns) * max(1, room // _GRAIN) * _GRAIN
        for start in range(0, work.source.count, window):
            source = work.source[start : start + window]
            parts = even_parts(source.count, len(self._columns), work.dtype.itemsize)
            own = parts[self._place] if self._column else slice(0, 0)
            total = self._sum_of_host(source, parts, own, work)
            if work.to is To.ROOT:
                target = work.target and work.target[start : start + window]
                self._bring_to_root(total, parts, target, work)
                continue
            assert work.target is not None
            target = work.target[start : start + window]
            self._sum_of_hosts(total, target[own], work)
            mates = [rank for rank in self._here if rank != self._rank]
            self._exchange([(target[own], rank) for rank in mates], self._of_owners(target, parts))

    def _bring_to_root(
        self, x: Span, parts: Sequence[slice], target: Span | None, work: GpuReduce
    ) -> None:
        """Reduce x over this rank's column; send the pieces to the root, which has a `target`."""
        mine = self._cut(x, work)
        own = mine.get(self._rank, slice(0, 0))
        memory = self._take("result", max(1, (own.stop - own.start) * work.dtype.itemsize))
        result = Span(memory.address, own.stop - own.start, work.dtype)
        if target is not None and self._column:
            result = target[parts[self._place]][own]
        self._reduce_over_hosts(x, mine, result, work)
        sends = [] if target is not None else [(result, work.root)]
        receives: list[tuple[Span, int]] = []
        if target is not None:
            for part, column in zip(parts, self._columns, strict=True):
                pieces = even_parts(part.stop - part.start, len(column), work.dtype.itemsize)
                of_ranks = zip(pieces, column, strict=True)
                receives += [(target[part][cut], r) for cut, r in of_ranks if r != self._rank]
        self._exchange(sends, receives)

    # --- reduce-scatter ---------------------------------------------------------------------------
    def _scatter(self, work: GpuReduce) -> None:
        """Enqueue this rank's part of a reduction of which each rank gets its elements."""
        item, most = work.dtype.itemsize, max(len(host) for host in self._hosts)
        # An owner's memory for an element: the values of its host, their sum, and for its own
        # host the sums of all hosts.
        n_served = max(len(ranks) for column in self._served for ranks in column)
        room = slices.STAGING_NBYTES // (item * most + 2 * _FLOAT32.itemsize)
        step = max(1, room // (len(self._hosts) * n_served) // _GRAIN) * _GRAIN
        longest = max(part.stop - part.start for part in work.parts)
        for at in range(0, longest, step):
            cuts = [
                slice(min(p.start + at, p.stop), min(p.start + at + step, p.stop))
                for p in work.parts
            ]
            self._scatter_pass(work, cuts)

    def _scatter_pass(self, work: GpuReduce, cuts: Sequence[slice]) -> None:
        x, item = work.source, work.dtype.itemsize
        served = self._served[self._place] if self._column else ()  # by host
        lengths = [sum(cuts[r].stop - cuts[r].start for r in ranks) for ranks in served]
        count = sum(lengths)
        room = whole_grains(count * item)
        start = self._take("pieces", max(1, room * len(self._here))).address
        places = {rank: start + k * room for k, rank in enumerate(self._here)}
        mine = [cuts[r] for ranks in served for r in ranks]
        sends, receives = [], []
        for place, mate in enumerate(self._here[: len(self._served)]):
            if mate != self._rank:
                theirs = [cuts[r] for ranks in self._served[place] for r in ranks]
                sends += [(x[cut], mate) for cut in theirs]
        for rank, place in places.items():
            for cut in mine:
                nbytes = (cut.stop - cut.start) * item
                if rank != self._rank:
                    receives.append((Span(place, nbytes, _BYTE), rank))
                elif nbytes:
                    self._device.copy(self._stream, place, x[cut].address, nbytes)
                place += nbytes  # noqa: PLW2901 - of the next one
        self._exchange(sends, receives)
        memory = self._take("total", max(1, count * _FLOAT32.itemsize))
        total = Span(memory.address, count, _FLOAT32)
        if count:
            kernel = self._within(tuple(places.values()), total.address, count, work)
            self._device.launch(self._stream, kernel)
        pieces = dict(zip(self._column, consecutive(lengths), strict=True))
        own = pieces.get(self._rank, slice(0, 0))
        n_own = own.stop - own.start
        result = Span(self._take("result", max(1, n_own * item)).address, n_own, work.dtype)
        self._reduce_over_hosts(total, pieces, result, work)
        self._hand_out(work, cuts, result)

    def _hand_out(self, work: GpuReduce, cuts: Sequence[slice], result: Span) -> None:
        """Copy this rank's elements from the result; send the others theirs, or receive mine."""
        assert work.target is not None
        first = work.parts[self._rank].start
        mine = cuts[self._rank]
        target = work.target[mine.start - first : mine.stop - first]
        sends, receives = [], []
        if self._column:
            at = 0
            for rank in self._served[self._place][self._hosts.index(self._here)]:
                count = cuts[rank].stop - cuts[rank].start
                part = result[at : at + count]
                at += count
                if rank != self._rank:
                    sends.append((part, rank))
                elif count:
                    self._device.copy(self._stream, target.address, part.address, part.nbytes)
        else:
            receives.append((target, self._here[self._place % len(self._served)]))
        self._exchange(sends, receives)

    def _of_owners(self, x: Span, parts: Sequence[slice]) -> list[tuple[Span, int]]:
        owners = zip(self._here, parts, strict=False)  # the first ranks of the host
        return [(x[part], rank) for rank, part in owners if rank != self._rank]

    def _sum_of_host(self, x: Span, parts: Sequence[slice], own: slice, work: GpuReduce) -> Span:
        """Return the reduction of this rank's part over its host, in float32."""
        mine = x[own]
        places = self._places("pieces", self._here, mine)
        others = [rank for rank in self._here if rank != self._rank]
        receives = [(Span(places[rank], mine.nbytes, _BYTE), rank) for rank in others]
        self._exchange(self._of_owners(x, parts), receives)
        memory = self._take("total", max(1, mine.count * _FLOAT32.itemsize))
        if mine.count:
            sources = tuple(places.values())
            kernel = self._within(sources, memory.address, mine.count, work)
            self._device.launch(self._stream, kernel)
        return Span(memory.address, mine.count, _FLOAT32)

    def _sum_of_hosts(self, x: Span, target: Span, work: GpuReduce) -> None:
        """Fill `target` with the reduction of x over this rank's column, rounded once."""
        pieces = self._cut(x, work)
        result = target[pieces.get(self._rank, slice(0, 0))]
        self._reduce_over_hosts(x, pieces, result, work)
        others = [(rank, piece) for rank, piece in pieces.items() if rank != self._rank]
        self._exchange(
            [(result, rank) for rank, _ in others],
            [(target[piece], rank) for rank, piece in others],
        )

    def _cut(self, x: Span, work: GpuReduce) -> dict[int, slice]:
        pieces = even_parts(x.count, max(1, len(self._column)), work.dtype.itemsize)
        return dict(zip(self._column, pieces, strict=False))

    def _reduce_over_hosts(
        self, x: Span, pieces: dict[int, slice], result: Span, work: GpuReduce
    ) -> None:
        """Fill `result` with the reduction of this rank's piece over its column, rounded once."""
        mine = x[pieces.get(self._rank, slice(0, 0))]
        places = self._places("sums", self._column, mine)
        others = [rank for rank in self._column if rank != self._rank]
        self._exchange(
            [(x[pieces[rank]], rank) for rank in others],
            [(Span(places[rank], mine.nbytes, _BYTE), rank) for rank in others],
        )
        if mine.count:
            kernel = self._between(tuple(places.values()), result.address, mine.count, work)
            self._device.launch(self._stream, kernel)

    def _places(self, what: str, ranks: Sequence[int], mine: Span) -> dict[int, int]:
        """Return where the values of `ranks` lie, in their order: `mine`, or memory for others'."""
        room = whole_grains(mine.nbytes)
        start = self._take(what, max(1, room * len(ranks))).address
        places = {rank: start + k * room for k, rank in enumerate(ranks)}
        if self._rank in places:
            places[self._rank] = mine.address
        return places

    @staticmethod
    def _within(sources: tuple[int, ...], target: int, count: int, work: GpuReduce) -> ReduceKernel:
        op: Op = SUM if work.op is AVERAGE else work.op
        return ReduceKernel(sources, (target,), count, work.dtype, op, result=_FLOAT32)

    def _between(
        self, sources: tuple[int, ...], target: int, count: int, work: GpuReduce
    ) -> ReduceKernel:
        divisor = work.op.divisor(self._size)
        return ReduceKernel(sources, (target,), count, _FLOAT32, work.op, divisor, work.dtype)
