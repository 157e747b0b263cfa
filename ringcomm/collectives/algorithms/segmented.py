"""The ring of ring.py for several hosts: visits host by host, and sends chunks in segments.

While a rank reduces one segment, the next are on the wire. The ring visits all ranks of a host
before it goes to the next host, so each host sends to one host only. As in ring.py, rank r owns
chunk r. An allreduce sends 2 (size - 1) / size * nbytes, and takes AHEAD segments of scratch
memory. Not for 16-bit floats, see direct.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ringcomm.arrays.base import Flat
from ringcomm.collectives.algorithms.ring import allreduce_of
from ringcomm.collectives.algorithms.segments_under_way import AHEAD, Pipeline, cut
from ringcomm.collectives.message_patterns import Step, allgather_steps, reduce_scatter_steps
from ringcomm.collectives.operators import SUM, Op
from ringcomm.collectives.ranks_by_host import host_order
from ringcomm.transport.performer import Performer


async def reduce_scatter_(x: Flat, parts: list[slice], t: Performer, op: Op = SUM) -> Flat:
    """Return this rank's reduced chunk, a view of x; the rest of x has partial results."""
    ring, cuts = _ring(x, parts, t)
    ahead = min(AHEAD, len(cuts[0]))
    scratch = [t.scratch(x, max(each[0].count for each in cuts)) for _ in range(ahead)]
    moves = []
    for n, (sent, total) in enumerate(_segments(cuts, reduce_scatter_steps(ring.rank, ring.size))):
        arriving = scratch[n % ahead][: total.count]
        moves.append(SegmentMove(sent, arriving, functools.partial(t.combine, total, arriving, op)))
    await _flow(moves, ahead, ring)
    own = x[parts[t.rank]]
    t.finish(own, op, t.size)
    return own


async def allgather_(x: Flat, parts: list[slice], t: Performer) -> None:
    """Fill x with every rank's chunk. This rank's chunk is in its place already."""
    ring, cuts = _ring(x, parts, t)
    moves = [SegmentMove(*pair) for pair in _segments(cuts, allgather_steps(ring.rank, ring.size))]
    await _flow(moves, min(AHEAD, len(cuts[0])), ring)


allreduce_ = allreduce_of(reduce_scatter_, allgather_)


class SegmentMove(NamedTuple):
    """One segment sent to the right, and one received from the left."""

    sent: Flat
    arriving: Flat
    when_complete: Callable[[], None] | None = None


async def _flow(moves: Iterable[SegmentMove], ahead: int, ring: Performer) -> None:
    """Carry out `moves` in order, `ahead` of them at a time.

    A segment that arrives in one step is sent in the next, so `ahead` must not be more than the
    number of segments of a step.
    """
    left, right = (ring.rank - 1) % ring.size, (ring.rank + 1) % ring.size
    pipeline = Pipeline(ring, ahead)
    for sent, arriving, when_complete in moves:
        await pipeline.make_room()
        requests = [ring.irecv(arriving.bytes, left), ring.isend(sent.bytes, right)]
        pipeline.put(requests, when_complete)
    await pipeline.drain()


def _ring(x: Flat, parts: list[slice], t: Performer) -> tuple[Performer, list[list[Flat]]]:
    order = host_order(t.nodes)
    return t.among(order), cut(x, [parts[rank] for rank in order], t)


def _segments(cuts: list[list[Flat]], steps: Iterable[Step]) -> Iterator[tuple[Flat, Flat]]:
    for step in steps:
        yield from zip(cuts[step.send], cuts[step.receive], strict=True)
