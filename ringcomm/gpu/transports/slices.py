"""Decides which elements each rank owns in each pass, and where they are staged. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringcomm.collectives.message_patterns import chunks

ALIGNMENT = 16  # bytes that a thread loads at once
STAGING_NBYTES = 64 << 20  # of a rank, for the elements of all ranks in one pass
_GRAIN = 256


@dataclass(frozen=True)
class Slice:
    """Elements [start, stop), and the byte of the staging memory at which they are staged."""

    start: int
    stop: int
    staged_at: int

    @property
    def count(self) -> int:
        return self.stop - self.start


def whole_grains(nbytes: int) -> int:
    """Return nbytes, rounded up so that what follows is aligned like the start of memory."""
    return -(-nbytes // _GRAIN) * _GRAIN


def staging_nbytes(size: int) -> int:
    return max(_GRAIN, STAGING_NBYTES // size // _GRAIN * _GRAIN) * size


def even_parts(count: int, size: int, itemsize: int) -> tuple[slice, ...]:
    """Cut range(count) into `size` parts that begin at multiples of 16 bytes."""
    grain = max(1, ALIGNMENT // itemsize)
    blocks = chunks(-(-count // grain), size)
    return tuple(slice(min(b.start * grain, count), min(b.stop * grain, count)) for b in blocks)


def passes(parts: Sequence[slice], itemsize: int, capacity: int | None) -> list[tuple[Slice, ...]]:
    """Return the slice that each rank owns in each pass.

    Args:
        parts: the elements that each rank owns, by rank.
        itemsize: bytes per element.
        capacity: bytes of the staging memory, at least 256 * len(parts); None: nothing is staged,
            so one pass suffices.

    Returns:
        For each pass, a slice per rank. Staged elements have the same offset modulo 16 as in the
        array, and therefore the same alignment.
    """
    if capacity is None:
        return [tuple(Slice(part.start, part.stop, 0) for part in parts)]
    room = capacity // len(parts) // _GRAIN * _GRAIN
    grain = max(1, ALIGNMENT // itemsize)
    step = (room - ALIGNMENT) // itemsize // grain * grain
    longest = max(part.stop - part.start for part in parts)
    n_passes = max(1, -(-longest // step))
    return [
        tuple(
            _piece(part, k * step, step, rank * room, itemsize) for rank, part in enumerate(parts)
        )
        for k in range(n_passes)
    ]


def _piece(part: slice, begin: int, step: int, room_at: int, itemsize: int) -> Slice:
    start = min(part.start + begin, part.stop)
    stop = min(start + step, part.stop)
    return Slice(start, stop, room_at + start * itemsize % ALIGNMENT)
