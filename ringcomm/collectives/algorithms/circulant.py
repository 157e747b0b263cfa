"""Reduce-scatter and allgather on a circulant graph: few rounds for any number of ranks.

Sends as many bytes as the ring, in ceil(log2 size) rounds instead of size - 1. Rounds are not
pipelined, so this is for sizes at which latency counts. Takes nbytes / 2 of scratch memory. Not for
16-bit floats, see direct.py. The order of the additions differs from chunk to chunk.
"""

from __future__ import annotations

from ringcomm.arrays.base import Flat
from ringcomm.collectives.algorithms.ring import allreduce_of
from ringcomm.collectives.message_patterns import circulant_hops, cyclic_runs
from ringcomm.collectives.operators import SUM, Op
from ringcomm.transport.performer import Performer


async def reduce_scatter_(x: Flat, parts: list[slice], t: Performer, op: Op = SUM) -> Flat:
    """Return this rank's reduced chunk, a view of x; the rest of x has partial results."""
    for distance, n_chunks in circulant_hops(t.size):
        dest, source = (t.rank + distance) % t.size, (t.rank - distance) % t.size
        growing = _stretches(x, parts, t.rank, n_chunks)
        arriving = [t.scratch(each, each.count) for each in growing]
        await t.wait(
            *[t.irecv(each.bytes, source) for each in arriving],
            *[t.isend(each.bytes, dest) for each in _stretches(x, parts, dest, n_chunks)],
        )
        for target, part in zip(growing, arriving, strict=True):
            t.combine(target, part, op)
    own = x[parts[t.rank]]
    t.finish(own, op, t.size)
    return own


async def allgather_(x: Flat, parts: list[slice], t: Performer) -> None:
    """Fill x with every rank's chunk. This rank's chunk is in its place already."""
    for distance, n_chunks in reversed(circulant_hops(t.size)):
        dest, source = (t.rank - distance) % t.size, (t.rank + distance) % t.size
        await t.wait(
            *[t.irecv(e.bytes, source) for e in _stretches(x, parts, source, n_chunks)],
            *[t.isend(e.bytes, dest) for e in _stretches(x, parts, t.rank, n_chunks)],
        )


allreduce_ = allreduce_of(reduce_scatter_, allgather_)


def _stretches(x: Flat, parts: list[slice], first: int, n_chunks: int) -> list[Flat]:
    runs = cyclic_runs(first, n_chunks, len(parts))
    return [x[parts[run[0]].start : parts[run[-1]].stop] for run in runs]
