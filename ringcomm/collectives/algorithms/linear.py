"""Gather, scatter and alltoall that send each part straight to its receiver."""

from __future__ import annotations

import numpy as np

from ringcomm.arrays.base import Flat
from ringcomm.arrays.dtypes import DTYPES
from ringcomm.collectives.message_patterns import consecutive, shifted_pairs
from ringcomm.transport.performer import Performer


async def gather_(x: Flat | None, own: Flat, parts: list[slice], root: int, t: Performer) -> None:
    """Fill x[parts[r]] on root with `own` of each rank r. Root's part is in its place already."""
    if t.rank != root:
        await t.wait(t.isend(own.bytes, root))
        return
    assert x is not None
    await t.wait(*[t.irecv(x[parts[r]].bytes, r) for r in range(t.size) if r != root])


async def scatter_(x: Flat | None, out: Flat, parts: list[slice], root: int, t: Performer) -> None:
    if t.rank != root:
        await t.wait(t.irecv(out.bytes, root))
        return
    assert x is not None
    t.copy(out, x[parts[root]])
    await t.wait(*[t.isend(x[parts[r]].bytes, r) for r in range(t.size) if r != root])


async def alltoall_(
    x: Flat, sent: list[slice], out: Flat, received: list[slice], t: Performer
) -> None:
    """Send x[sent[r]] to each rank r, and receive out[received[r]] from it; all pairs at once."""
    t.copy(out[received[t.rank]], x[sent[t.rank]])
    requests = []
    for dest, source in shifted_pairs(t.rank, t.size):
        requests.append(t.irecv(out[received[source]].bytes, source))
        requests.append(t.isend(x[sent[dest]].bytes, dest))
    await t.wait(*requests)


async def alltoall_counts(counts: list[int], t: Performer) -> list[int]:
    mine, theirs = (Flat(np.empty(8 * t.size, np.uint8), DTYPES["int64"]) for _ in range(2))
    mine.bytes.view(np.int64)[:] = counts
    one_each = consecutive([1] * t.size)
    await alltoall_(mine, one_each, theirs, one_each, t)
    return [int(n) for n in theirs.bytes.view(np.int64)]
