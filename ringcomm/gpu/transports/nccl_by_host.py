"""Sums of 16-bit floats between hosts: each host sends its own sum, in float32.

If the owners of the elements received the values of all ranks, a host would send as many bytes as
the array has for each of its GPUs. So the ranks of a host add up their values first, each a part of
the array. Then the owners of a part on all hosts do the same, each a piece of the part; each owner
rounds once, and the results go back the same way. A host sends 3 (hosts - 1) / hosts of the array,
as collectives/algorithms/hierarchical.py does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ringcomm.arrays.base import Span
from ringcomm.arrays.dtypes import DTYPES
from ringcomm.collectives.operators import AVERAGE, SUM, Op
from ringcomm.collectives.ranks_by_host import columns, host_of, hosts
from ringcomm.gpu.device.base import Device
from ringcomm.gpu.kernels.base import Kernel
from ringcomm.gpu.kernels.reduce import ReduceKernel
from ringcomm.gpu.transports import slices
from ringcomm.gpu.transports.slices import even_parts, whole_grains
from ringcomm.gpu.transports.works import Reduce
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
        self._here = host_of(rank, nodes)
        place = self._here.index(rank)
        self._column = self._columns[place] if place < len(self._columns) else ()
        self._place = place

    def is_fit(self, work: Reduce) -> bool:
        """Return True if combine() sends fewer bytes between hosts than all pairs do."""
        is_16bit_sum = work.dtype.is_16bit_float and work.to is To.ALL
        return is_16bit_sum and not work.is_deterministic and 1 < len(self._hosts) < self._size

    def kernels(self, work: Reduce) -> list[Kernel]:
        """Return the kernels of combine(); the same on all ranks."""
        numbers = sorted({len(host) for host in self._hosts})
        first = [self._within((0,) * n, 0, 0, work) for n in numbers]
        return [*first, self._between((0,) * len(self._hosts), 0, 0, work)]

    def combine(self, work: Reduce) -> None:
        """Enqueue this rank's part of a reduction, in passes."""
        assert work.target is not None
        # An owner's memory for an element of its part: the values of its host, their sum, and the
        # sums of all hosts for its piece, which is shorter than the part.
        most = max(len(host) for host in self._hosts)
        room = slices.STAGING_NBYTES // (work.dtype.itemsize * most + 2 * _FLOAT32.itemsize)
        window = len(self._columns) * max(1, room // _GRAIN) * _GRAIN
        for start in range(0, work.source.count, window):
            source, target = (x[start : start + window] for x in (work.source, work.target))
            parts = even_parts(source.count, len(self._columns), work.dtype.itemsize)
            own = parts[self._place] if self._column else slice(0, 0)
            total = self._sum_of_host(source, parts, own, work)
            self._sum_of_hosts(total, target[own], work)
            mates = [rank for rank in self._here if rank != self._rank]
            self._exchange([(target[own], rank) for rank in mates], self._of_owners(target, parts))

    def _of_owners(self, x: Span, parts: Sequence[slice]) -> list[tuple[Span, int]]:
        """Return the parts of x, each with its owner on this host, but for this rank's."""
        owners = zip(self._here, parts, strict=False)  # the first ranks of the host
        return [(x[part], rank) for rank, part in owners if rank != self._rank]

    def _sum_of_host(self, x: Span, parts: Sequence[slice], own: slice, work: Reduce) -> Span:
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

    def _sum_of_hosts(self, x: Span, target: Span, work: Reduce) -> None:
        """Fill `target` with the reduction of x over this rank's column, rounded once."""
        pieces = even_parts(x.count, max(1, len(self._column)), work.dtype.itemsize)
        by_rank = dict(zip(self._column, pieces, strict=False))
        own = by_rank.pop(self._rank, slice(0, 0))
        mine = x[own]
        places = self._places("sums", self._column, mine)
        self._exchange(
            [(x[piece], rank) for rank, piece in by_rank.items()],
            [(Span(places[rank], mine.nbytes, _BYTE), rank) for rank in by_rank],
        )
        result = target[own]
        if mine.count:
            kernel = self._between(tuple(places.values()), result.address, mine.count, work)
            self._device.launch(self._stream, kernel)
        self._exchange(
            [(result, rank) for rank in by_rank],
            [(target[piece], rank) for rank, piece in by_rank.items()],
        )

    def _places(self, what: str, ranks: Sequence[int], mine: Span) -> dict[int, int]:
        """Return where the values of `ranks` lie, in their order: `mine`, or memory for others'."""
        room = whole_grains(mine.nbytes)
        start = self._take(what, max(1, room * len(ranks))).address
        places = {rank: start + k * room for k, rank in enumerate(ranks)}
        if self._rank in places:
            places[self._rank] = mine.address
        return places

    @staticmethod
    def _within(sources: tuple[int, ...], target: int, count: int, work: Reduce) -> ReduceKernel:
        op: Op = SUM if work.op is AVERAGE else work.op
        return ReduceKernel(sources, (target,), count, work.dtype, op, result=_FLOAT32)

    def _between(
        self, sources: tuple[int, ...], target: int, count: int, work: Reduce
    ) -> ReduceKernel:
        divisor = work.op.divisor(self._size)
        return ReduceKernel(sources, (target,), count, _FLOAT32, work.op, divisor, work.dtype)
