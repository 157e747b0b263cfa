"""Schedules of messages: sender, receiver, part and step. Pure: numbers in, numbers out.

The ring flows right: every rank sends to rank + 1 and receives from rank - 1. A buffer is cut into
`size` chunks. In size - 1 steps of reduce-scatter each chunk travels once round the ring and grows
by one rank's part at each stop, until chunk r is complete at rank r. In size - 1 steps of allgather
the complete chunks travel round once more and are copied. Every rank is busy in both directions all
the time, and sends 2 (size - 1) / size of the buffer, the least that any allreduce can.

Source: Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from ringcomm.transport.members import Hashed


class Step(NamedTuple):
    """One step of the ring: the chunk that goes right, and the chunk that comes from the left."""

    send: int
    receive: int


class Parts(list[slice]):
    """Parts of a buffer that operations share, so nobody changes it."""

    @functools.cached_property
    def bounds(self) -> Hashed:
        """Start and stop of each: slices are no keys before Python 3.12."""
        return Hashed(bound for part in self for bound in (part.start, part.stop))


@functools.lru_cache(maxsize=32)
def chunks(count: int, size: int, width: int = 1) -> Parts:
    """Cut range(count) into `size` slices; the first count % size hold one more. Times `width`."""
    share, extra = divmod(count, size)
    starts = [(rank * share + min(rank, extra)) * width for rank in range(size + 1)]
    return Parts(slice(start, stop) for start, stop in pairwise(starts))


def consecutive(counts: list[int]) -> list[slice]:
    """Return the slices of consecutive parts of the given lengths."""
    slices, start = [], 0
    for count in counts:
        slices.append(slice(start, start + count))
        start += count
    return slices


def within(place: slice, own: slice) -> slice:
    """Return which elements of the range `place`, counted from its start, are in `own`."""
    n = place.stop - place.start
    start, stop = (min(max(end - place.start, 0), n) for end in (own.start, own.stop))
    return slice(start, stop)


def reduce_scatter_steps(rank: int, size: int) -> Iterator[Step]:
    """Yield this rank's steps; what is received is added. After them, rank owns chunk `rank`."""
    for step in range(size - 1):
        yield Step(send=(rank - 1 - step) % size, receive=(rank - 2 - step) % size)


def allgather_steps(rank: int, size: int) -> Iterator[Step]:
    """Yield this rank's steps from owning chunk `rank` to holding them all."""
    for step in range(size - 1):
        yield Step(send=(rank - step) % size, receive=(rank - 1 - step) % size)


# Open MPI sends less than 64 KiB over TCP at once; beyond, both sides must look for a handshake
# first: 8 MiB between 3 hosts of 200 Mbit/s in segments of 60 KiB took half the time of 96 KiB to
# 1 MiB (measured on busy processors). Within a host each message costs more than it hides.
WIRE_SEGMENT_NBYTES = 60 << 10
NODE_SEGMENT_NBYTES = 1 << 20


def segment_count(nbytes: int, nodes: Sequence[int]) -> int:
    """Return in how many segments chunks travel, of which the longest has `nbytes`."""
    limit = WIRE_SEGMENT_NBYTES if len(set(nodes)) > 1 else NODE_SEGMENT_NBYTES
    return max(1, -(-nbytes // limit))


class Hop(NamedTuple):
    """One round of the circulant graph: how far it reaches, and the number of chunks that go."""

    distance: int
    n_chunks: int


def circulant_hops(size: int) -> list[Hop]:
    """Return the rounds of a reduce-scatter; reversed, those of an allgather.

    In a round, rank r sends n_chunks chunks, from chunk r + distance on, to rank r + distance, and
    adds what comes from rank r - distance to as many from chunk r on. Half the chunks, rounded up,
    remain: ceil(log2 size) rounds and size - 1 chunks sent, for any size the least possible.

    Source: Traeff 2024, "Optimal, non-pipelined reduce-scatter and allreduce algorithms",
    arXiv:2410.14234.
    """
    hops = []
    while size > 1:
        half = (size + 1) // 2
        hops.append(Hop(half, size - half))
        size = half
    return hops


def cyclic_runs(first: int, n: int, size: int) -> list[range]:
    """Return `n` numbers from `first` on, modulo size, as at most two runs without a gap."""
    first %= size
    beyond = max(first + n - size, 0)
    return [range(first, first + n - beyond), *([range(beyond)] if beyond else [])]


def shifted_pairs(rank: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (dest, source) so that everybody meets everybody, and nobody two at a time."""
    for shift in range(1, size):
        yield (rank + shift) % size, (rank - shift) % size


def binomial_tree(rank: int, size: int, root: int) -> tuple[int | None, list[int]]:
    """Return (parent, children) of this rank; children in the order in which to send.

    ceil(log2 size) rounds: in each, every rank that has the data passes it on.
    """
    place = (rank - root) % size
    parent: int | None = None
    reach = 1
    while reach < size and not place & reach:
        reach <<= 1
    if place:
        parent = (place - reach + root) % size
    children = []
    while reach > 1:
        reach >>= 1
        if place + reach < size:
            children.append((place + reach + root) % size)
    return parent, children


def dissemination_steps(rank: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (dest, source): after ceil(log2 size) rounds everybody has heard of everybody.

    Source: Hensgen, Finkel and Manber 1988, doi:10.1007/BF01379320.
    """
    distance = 1
    while distance < size:
        yield (rank + distance) % size, (rank - distance) % size
        distance *= 2
