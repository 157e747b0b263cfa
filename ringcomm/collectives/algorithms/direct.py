"""All pairs at once: each rank receives all ranks' values of its chunk, and adds in rank order.

It is used for
    small arrays: it takes two rounds, for any number of ranks;
    deterministic sums: a ring begins the sum of each chunk at another rank;
    16-bit floats: it adds in float32 and rounds once, while a ring rounds at every rank. The rms
        error over 64 ranks in bfloat16 is 2.1e-3; that of the ring is 1.23e-2.

It sends as many bytes as the ring. Its scratch memory has the size of x, or AHEAD segments per rank
if chunks have more segments than that.
"""

from __future__ import annotations

import functools

from ringcomm.arrays.base import Flat
from ringcomm.collectives.algorithms.ring import allreduce_of
from ringcomm.collectives.algorithms.segments_under_way import AHEAD, Pipeline, cut
from ringcomm.collectives.message_patterns import shifted_pairs
from ringcomm.collectives.operators import SUM, Op
from ringcomm.transport.performer import Performer


async def reduce_scatter_(x: Flat, parts: list[slice], t: Performer, op: Op = SUM) -> Flat:
    """Return this rank's reduced chunk, a view of x; the rest of x keeps this rank's values."""
    cuts = cut(x, parts, t)
    own = cuts[t.rank]
    lengths = [0 if rank == t.rank else own[0].count for rank in range(t.size)]
    scratch = [[t.scratch(own[0], length) for length in lengths] for _ in own[:AHEAD]]
    pipeline = Pipeline(t, AHEAD)
    for n, mine in enumerate(own):
        await pipeline.make_room()
        sources = [each[: mine.count] for each in scratch[n % AHEAD]]
        requests = []
        for dest, sender in shifted_pairs(t.rank, t.size):
            requests.append(t.irecv(sources[sender].bytes, sender))
            requests.append(t.isend(cuts[dest][n].bytes, dest))
        sources[t.rank] = mine
        pipeline.put(requests, functools.partial(t.combine_all, mine, sources, op))
    await pipeline.drain()
    return x[parts[t.rank]]


async def allgather_(x: Flat, parts: list[slice], t: Performer) -> None:
    """Fill x with every rank's chunk. This rank's chunk is in its place already."""
    cuts = cut(x, parts, t)
    pipeline = Pipeline(t, AHEAD)
    for n, mine in enumerate(cuts[t.rank]):
        await pipeline.make_room()
        requests = []
        for dest, source in shifted_pairs(t.rank, t.size):
            requests.append(t.irecv(cuts[source][n].bytes, source))
            requests.append(t.isend(mine.bytes, dest))
        pipeline.put(requests)
    await pipeline.drain()


allreduce_ = allreduce_of(reduce_scatter_, allgather_)
