"""Many arrays in one buffer: by one kernel, where that is less work than a copy for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from numpy.typing import NDArray

from ringcomm.arrays import DTYPES
from ringcomm.arrays.base import Span
from ringcomm.collectives.schedule import consecutive
from ringcomm.gpu.base import Device, KernelPack
from ringcomm.gpu.kernels import TENSORS_PER_LAUNCH, Arguments, PackKernel, chunk_table

_WORTH_A_KERNEL: Final = 3  # arrays
_MOST_LAYOUTS: Final = 256  # a table is never given back: that would stop the GPU
_BITS: Final = {2: "float16", 4: "float32", 8: "float64"}  # nothing is computed


def pack(device: Device, stream: int, arrays: Sequence[Span], buffer: Span) -> None:
    """Let the stream copy arrays into a buffer of their dtype, one behind the other."""
    _move(device, stream, arrays, buffer, unpacks=False)


def unpack(device: Device, stream: int, arrays: Sequence[Span], buffer: Span) -> None:
    """Let the stream copy them out of it."""
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
    """One launch of a PackKernel.

    Attributes:
        kernel: which.
        arguments: of it.
        n_chunks: that it moves.
    """

    kernel: PackKernel
    arguments: Arguments
    n_chunks: int


class Layouts:
    """The tables of what was packed so far, on one GPU.

    Args:
        upload: copies a table to the GPU on a stream, and returns its address.
    """

    def __init__(self, upload: Callable[[int, NDArray[Any]], int]) -> None:
        self._upload = upload
        self._known: dict[tuple[int, tuple[int, ...]], list[tuple[slice, int, int]]] = {}

    def launches(self, stream: int, what: KernelPack) -> list[Launch] | None:
        """Return what to launch on the stream; None: there are too many layouts already."""
        key = stream, what.counts
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MOST_LAYOUTS:
                return None
            known = self._known[key] = list(self._tables(stream, what.counts))
        kernel = PackKernel(what.dtype, what.dtype, unpacks=what.unpacks)
        return [
            Launch(
                kernel,
                kernel.pack_arguments(
                    what.arrays[which], what.buffer, chunks=table, n_chunks=n_chunks
                ),
                n_chunks,
            )
            for which, table, n_chunks in known
        ]

    def _tables(self, stream: int, counts: tuple[int, ...]) -> Iterator[tuple[slice, int, int]]:
        """Return which arrays each launch moves, the address of its table, and that's length."""
        starts = [part.start for part in consecutive(list(counts))]
        for first in range(0, len(counts), TENSORS_PER_LAUNCH):
            which = slice(first, first + TENSORS_PER_LAUNCH)
            table = chunk_table(counts[which], starts[which])
            if len(table):
                yield which, self._upload(stream, table), len(table)
