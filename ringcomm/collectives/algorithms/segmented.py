"""The ring of ring.py as it runs between hosts: host by host, and in segments.

While a segment is reduced, the next ones are on the wire. The ring visits all ranks of a host
before it goes on, so that each wire is crossed once; every rank owns the chunk of its own number
all the same. 2 (size - 1) / size * nbytes sent,
and AHEAD segments of scratch. Not for 16-bit floats, see direct.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ringcomm.arrays.base import Flat
from ringcomm.collectives.algorithms.pipeline import AHEAD, Pipeline, cut
from ringcomm.collectives.algorithms.two_phases import allreduce_of
from ringcomm.collectives.layout import host_order
from ringcomm.collectives.op import SUM, Op
from ringcomm.collectives.schedule import Step, allgather_steps, reduce_scatter_steps
from ringcomm.transport.performer import Performer


async def reduce_scatter_(x: Flat, parts: list[slice], t: Performer, op: Op = SUM) -> Flat:
    """Return this rank's reduced chunk, a view of x; the rest of x is left half-reduced."""
    ring, cuts = _ring(x, parts, t)
    ahead = min(AHEAD, len(cuts[0]))
    scratch = [t.scratch(x, max(each[0].count for each in cuts)) for _ in range(ahead)]
    steps = reduce_scatter_steps(ring.rank, ring.size)

    def add(total: Flat, arrived: Flat) -> None:
        t.combine(total, arrived, op)

    moves = [
        Move(sent, scratch[n % ahead][: total.count], functools.partial(add, total))
        for n, (sent, total) in enumerate(_segments(cuts, steps))
    ]
    await _flow(moves, ahead, ring)
    own = x[parts[t.rank]]
    t.finish(own, op, t.size)
    return own


async def allgather_(x: Flat, parts: list[slice], t: Performer) -> None:
    """Fill x with every rank's chunk, this rank's being in its place already."""
    ring, cuts = _ring(x, parts, t)
    steps = allgather_steps(ring.rank, ring.size)
    moves = [Move(sent, filled, lambda _: None) for sent, filled in _segments(cuts, steps)]
    await _flow(moves, min(AHEAD, len(cuts[0])), ring)


allreduce_ = allreduce_of(reduce_scatter_, allgather_)


class Move(NamedTuple):
    """A segment that goes right, where the one from the left arrives, and what is done with it."""

    sent: Flat
    arriving: Flat
    arrived: Callable[[Flat], None]


async def _flow(moves: Iterable[Move], ahead: int, ring: Performer) -> None:
    """Carry out `moves` in order, `ahead` of them at a time.

    What arrives in one step goes right in the next: `ahead` must not exceed the segments of a step.
    """
    left, right = (ring.rank - 1) % ring.size, (ring.rank + 1) % ring.size
    pipeline = Pipeline(ring, ahead)
    for sent, arriving, arrived in moves:
        await pipeline.make_room()
        requests = [ring.irecv(arriving.bytes, left), ring.isend(sent.bytes, right)]
        pipeline.put(requests, functools.partial(arrived, arriving))
    await pipeline.drain()


def _ring(x: Flat, parts: list[slice], t: Performer) -> tuple[Performer, list[list[Flat]]]:
    """Return the ring host by host, and the segments of the chunks in its order."""
    order = host_order(t.nodes)
    return t.among(order), cut(x, [parts[rank] for rank in order], t)


def _segments(cuts: list[list[Flat]], steps: Iterable[Step]) -> Iterator[tuple[Flat, Flat]]:
    """Yield what goes right and what comes from the left, segment by segment, step by step."""
    for step in steps:
        yield from zip(cuts[step.send], cuts[step.receive], strict=True)
