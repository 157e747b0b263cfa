"""Scan along a chain: each rank combines what the ranks before it sum up to with its own values.

The chain goes through the ranks in their order, so each element is combined in that order, and the
bits depend neither on the size of the array nor on the hosts. An array goes in segments: while a
rank combines one, the next are on the wire. 16-bit floats travel in float32; each rank rounds its
own result.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from ringcomm.arrays.base import Flat
from ringcomm.arrays.dtypes import DTYPES
from ringcomm.collectives.algorithms.segments_under_way import AHEAD, Pipeline
from ringcomm.collectives.message_patterns import chunks, segment_count
from ringcomm.collectives.operators import Op
from ringcomm.collectives.recording import live, perform
from ringcomm.transport.channel import Channel
from ringcomm.transport.performer import Performer


@live
async def scan(x: Flat, out: Flat, t: Channel, op: Op, *, is_exclusive: bool) -> None:
    """Set `out` to the reduction of the ranks up to this one; is_exclusive: of those before it.

    The first rank has none before it: then its `out` is undefined.

    Cost: each rank sends nbytes to the next one, of 16-bit floats twice as much; the last rank has
    its result after size - 1 messages, and those of the other segments.
    """
    if not x.dtype.is_16bit_float:
        await perform(_scan, t, x, out, op, is_exclusive=is_exclusive)
        return
    wide, result = (Flat(np.empty(2 * x.bytes.nbytes, np.uint8), DTYPES["float32"]) for _ in "ab")
    t.cast(wide, x)
    await perform(_scan, t, wide, result, op, is_exclusive=is_exclusive)
    if not (is_exclusive and t.rank == 0):
        t.cast(out, result)


async def _scan(x: Flat, out: Flat, op: Op, t: Performer, *, is_exclusive: bool) -> None:
    is_first, is_last = t.rank == 0, t.rank == t.size - 1
    sums = out
    if is_exclusive:
        sums = x if is_first or is_last else t.scratch(x, x.count)
    elif is_first:
        t.copy(out, x)
    arrivals, departures = Pipeline(t, AHEAD), Pipeline(t, AHEAD)

    def pass_on(part: slice) -> None:
        if not is_first and not (is_exclusive and is_last):
            if is_exclusive:
                t.copy(sums[part], out[part])
            t.combine(sums[part], x[part], op)
        if not is_last:
            departures.put([t.isend(sums[part].bytes, t.rank + 1)])

    for part in chunks(x.count, segment_count(x.bytes.nbytes, t.nodes)):
        await arrivals.make_room()
        await departures.make_room()
        arrival = [] if is_first else [t.irecv(out[part].bytes, t.rank - 1)]
        arrivals.put(arrival, partial(pass_on, part))
    await arrivals.drain()
    await departures.drain()
