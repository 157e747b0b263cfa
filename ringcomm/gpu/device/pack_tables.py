"""A cache of the tables that list the elements that a PackKernel copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from ringcomm.arrays.base import Bytes
from ringcomm.collectives.message_patterns import consecutive
from ringcomm.gpu.kernels.pack import TENSORS_PER_LAUNCH, PackKernel, chunk_table

_MOST_LAYOUTS: Final = 256  # a limit for programs that pack other sizes in every step


class _Table(NamedTuple):
    """The chunks of one launch, in memory that the GPU reads."""

    arrays: slice  # which of the packed arrays this launch copies
    address: int
    n_chunks: int


class Layouts:
    """The chunk tables of one GPU, by the counts of the packed arrays.

    Args:
        room: host memory for the tables, which are never removed.
        address: the room's address on the GPU.
    """

    def __init__(self, room: Bytes, address: int) -> None:
        self._room, self._address, self._used = room, address, 0
        self._known: dict[tuple[int, ...], list[_Table] | None] = {}

    def kernels(
        self,
        arrays: Sequence[int],
        counts: Sequence[int],
        buffer: int,
        itemsize: int,
        *,
        unpacks: bool,
    ) -> list[PackKernel] | None:
        """Return the kernels that copy arrays into one buffer, without gaps, or out of it.

        Return None if there is no room for their tables.

        Args:
            arrays: the address of each array.
            counts: elements of each array.
            buffer: the address of the buffer.
            itemsize: one of PACKED_ITEMSIZES.
            unpacks: copy from the buffer to the arrays.
        """
        layout = tuple(counts)
        if layout not in self._known:
            if len(self._known) >= _MOST_LAYOUTS:
                return None
            self._known[layout] = self._tables(layout)
        tables = self._known[layout]
        if tables is None:
            return None
        return [
            PackKernel(tuple(arrays[which]), buffer, itemsize, unpacks, chunks, n_chunks)
            for which, chunks, n_chunks in tables
        ]

    def _tables(self, counts: tuple[int, ...]) -> list[_Table] | None:
        starts = [part.start for part in consecutive(list(counts))]
        made = []
        for first in range(0, len(counts), TENSORS_PER_LAUNCH):
            which = slice(first, first + TENSORS_PER_LAUNCH)
            table = chunk_table(counts[which], starts[which])
            if not len(table):
                continue
            begin = self._used
            if begin + table.nbytes > self._room.nbytes:
                return None
            self._room[begin : begin + table.nbytes] = table.view(np.uint8)
            self._used += -(-table.nbytes // 256) * 256
            made.append(_Table(which, self._address + begin, len(table)))
        return made
