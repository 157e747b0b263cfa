"""Many arrays in one buffer: by one kernel, where that is less work than a copy for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringcomm.arrays import DTYPES
from ringcomm.arrays.base import Bytes, Span
from ringcomm.collectives.schedule import consecutive
from ringcomm.gpu.device.base import Device, KernelPack
from ringcomm.gpu.kernels.kernel import Arguments
from ringcomm.gpu.kernels.pack import TENSORS_PER_LAUNCH, PackKernel, chunk_table

_WORTH_A_KERNEL: Final = 3  # arrays
_MOST_LAYOUTS: Final = 256  # who packs something else in every step need not keep it all
_BITS: Final = {2: "float16", 4: "float32", 8: "float64"}  # nothing is computed


def pack(device: Device, stream: int, arrays: Sequence[Span], buffer: Span) -> None:
    """Copy arrays into a buffer of their dtype, one behind the other."""
    _move(device, stream, arrays, buffer, unpacks=False)


def unpack(device: Device, stream: int, arrays: Sequence[Span], buffer: Span) -> None:
    """Copy them out of it."""
    _move(device, stream, arrays, buffer, unpacks=True)


def _move(
    device: Device, stream: int, arrays: Sequence[Span], buffer: Span, *, unpacks: bool
) -> None:
    counts = [array.count for array in arrays]
    width = buffer.dtype.itemsize
    if len(arrays) >= _WORTH_A_KERNEL and width > 1:
        halves = 2 if width > max(_BITS) else 1
        what = KernelPack(
            tuple(array.address for array in arrays),
            tuple(count * halves for count in counts),
            buffer.address,
            DTYPES[_BITS[width // halves]],
            unpacks,
        )
        if device.pack(stream, what):
            return
    for array, part in zip(arrays, consecutive(counts), strict=True):
        piece = buffer[part]
        target, source = (array, piece) if unpacks else (piece, array)
        if source.nbytes:
            device.copy(stream, target.address, source.address, source.nbytes)


@dataclass(frozen=True)
class Launch:
    """One launch of a PackKernel."""

    kernel: PackKernel
    arguments: Arguments
    n_chunks: int


class Layouts:
    """The tables of the layouts that were packed so far, in host memory that one GPU reads.

    Args:
        room: for the tables, which stay there.
        address: of the room, on the GPU.
    """

    def __init__(self, room: Bytes, address: int) -> None:
        self._room, self._address, self._used = room, address, 0
        self._known: dict[tuple[int, ...], list[_Table] | None] = {}

    def launches(self, what: KernelPack) -> list[Launch] | None:
        """Return what to launch; None: there is no room for one more layout."""
        if what.counts not in self._known:
            if len(self._known) >= _MOST_LAYOUTS:
                return None
            self._known[what.counts] = self._tables(what.counts)
        tables = self._known[what.counts]
        if tables is None:
            return None
        kernel = PackKernel(what.dtype, what.dtype, unpacks=what.unpacks)
        launches = []
        for which, chunks, n in tables:
            arrays = what.arrays[which]
            arguments = kernel.pack_arguments(arrays, what.buffer, chunks=chunks, n_chunks=n)
            launches.append(Launch(kernel, arguments, n))
        return launches

    def _write(self, table: NDArray[Any]) -> int | None:
        """Return where the GPU finds a table; None: there is no room."""
        start = self._used
        if start + table.nbytes > self._room.nbytes:
            return None
        self._room[start : start + table.nbytes] = table.view(np.uint8)
        self._used += -(-table.nbytes // 256) * 256
        return self._address + start

    def _tables(self, counts: tuple[int, ...]) -> list[_Table] | None:
        starts = [part.start for part in consecutive(list(counts))]
        made = []
        for first in range(0, len(counts), TENSORS_PER_LAUNCH):
            which = slice(first, first + TENSORS_PER_LAUNCH)
            table = chunk_table(counts[which], starts[which])
            address = self._write(table) if len(table) else 0
            if address is None:
                return None
            if len(table):
                made.append(_Table(which, address, len(table)))
        return made


class _Table(NamedTuple):
    """Arrays of one launch, and the table of their chunks on the GPU."""

    which: slice
    address: int
    n_chunks: int
