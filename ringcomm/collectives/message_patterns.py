"""Schedules of messages: sender, receiver, part and step. Pure: numbers in, numbers out.

The ring flows right: every rank sends to rank + 1 and receives from rank - 1. A buffer is cut into
`size` chunks. In the size - 1 steps of reduce-scatter, each chunk travels once round the ring, and
each rank adds its part, until chunk r is complete at rank r. In the size - 1 steps of allgather,
the complete chunks travel round once more, and each rank copies them. Every rank sends and receives
all the time. It sends 2 (size - 1) / size of the buffer, the minimum of any allreduce.

Source: Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from ringcomm.transport.group_members import Hashed


class Step(NamedTuple):
    """One step of the ring: the chunk to send right, and the chunk to receive from the left."""

    send: int
    receive: int


class Parts(list[slice]):
    """Parts of a buffer; a key of dicts, which compares fast. It must not be changed."""

    @functools.cached_property
    def _bounds(self) -> Hashed:  # slices have no hash before Python 3.12
        return Hashed(bound for part in self for bound in (part.start, part.stop))

    def __hash__(self) -> int:  # type: ignore[override]  # list has no hash
        return hash(self._bounds)

    def __eq__(self, other: object) -> bool:
        return self._bounds == other._bounds if isinstance(other, Parts) else super().__eq__(other)


@functools.lru_cache(maxsize=32)
def chunks(count: int, size: int, width: int = 1) -> Parts:
    """Cut `count` rows of `width` elements into `size` chunks; return their slices of elements.

    The first count % size chunks have one row more.
    """
    share, extra = divmod(count, size)
    starts = [(rank * share + min(rank, extra)) * width for rank in range(size + 1)]
    return Parts(slice(start, stop) for start, stop in pairwise(starts))


def consecutive(counts: list[int]) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise(accumulate(counts, initial=0))]


def from_own(rank: int, size: int) -> list[int]:
    """Return all ranks, this one first, then the next, so that not all read the same memory."""
    return [(rank + shift) % size for shift in range(size)]


def within(place: slice, own: slice) -> slice:
    """Return the intersection of two ranges, counted from the start of `place`."""
    n = place.stop - place.start
    start, stop = (min(max(end - place.start, 0), n) for end in (own.start, own.stop))
    return slice(start, stop)


def reduce_scatter_steps(rank: int, size: int) -> Iterator[Step]:
    """Yield this rank's steps. The rank adds what it receives, and ends with chunk `rank`."""
    for step in range(size - 1):
        yield Step(send=(rank - 1 - step) % size, receive=(rank - 2 - step) % size)


def allgather_steps(rank: int, size: int) -> Iterator[Step]:
    """Yield this rank's steps. The rank begins with chunk `rank`, and ends with all."""
    for step in range(size - 1):
        yield Step(send=(rank - step) % size, receive=(rank - 1 - step) % size)


# Open MPI sends up to 64 KiB over TCP at once. Longer messages need a handshake of both sides:
# 8 MiB between 3 hosts of 200 Mbit/s took half as long in segments of 60 KiB as in segments of
# 96 KiB to 1 MiB (measured on busy processors). Within a host, short segments gain nothing.
WIRE_SEGMENT_NBYTES = 60 << 10
NODE_SEGMENT_NBYTES = 1 << 20


def segment_count(nbytes: int, nodes: Sequence[int]) -> int:
    """Return the number of segments of each chunk; `nbytes` is the length of the longest chunk."""
    limit = WIRE_SEGMENT_NBYTES if len(set(nodes)) > 1 else NODE_SEGMENT_NBYTES
    return max(1, -(-nbytes // limit))


class Hop(NamedTuple):
    distance: int  # from a sender to its receiver, in ranks
    n_chunks: int  # number of chunks that each rank sends


def circulant_hops(size: int) -> list[Hop]:
    """Return the rounds of a reduce-scatter; in reverse order, the rounds of an allgather.

    In a round, rank r sends n_chunks chunks to rank r + distance, starting with chunk r + distance.
    It adds the chunks from rank r - distance to its own, starting with chunk r. Half the chunks,
    rounded up, remain for the next round. There are ceil(log2 size) rounds, and each rank sends
    size - 1 chunks; both are the minimum for any size.

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
    first %= size
    beyond = max(first + n - size, 0)
    return [range(first, first + n - beyond), *([range(beyond)] if beyond else [])]


def shifted_pairs(rank: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (dest, source) for each step. After all steps, every pair of ranks has met."""
    for shift in range(1, size):
        yield (rank + shift) % size, (rank - shift) % size


def binomial_tree(rank: int, size: int, root: int) -> tuple[int | None, list[int]]:
    """Return (parent, children) of this rank; children in the order in which to send.

    In each of the ceil(log2 size) rounds, every rank that has the data sends it to one child.
    """
    place = (rank - root) % size
    reach = 1
    while reach < size and not place & reach:
        reach <<= 1
    parent = (place - reach + root) % size if place else None
    children = []
    while reach > 1:
        reach >>= 1
        if place + reach < size:
            children.append((place + reach + root) % size)
    return parent, children


def dissemination_steps(rank: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (dest, source) for ceil(log2 size) rounds, after which every rank has news of all.

    Source: Hensgen, Finkel and Manber 1988, doi:10.1007/BF01379320.
    """
    distance = 1
    while distance < size:
        yield (rank + distance) % size, (rank - distance) % size
        distance *= 2
