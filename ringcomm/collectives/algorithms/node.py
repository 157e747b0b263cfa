"""Collectives for the ranks of one node: each rank reads the arrays of the others in shared memory.

The functions are those of ring.py, direct.py, tree.py and linear.py. C++ carries them out
(csrc/shm/node_step.hpp). Sums are in rank order, in float32 for 16-bit floats. Each element is
computed once, or by every rank in the same way, so all ranks get the same bits.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ringcomm._core import combine_at_once
from ringcomm.arrays.base import Bytes, Flat
from ringcomm.arrays.dtypes import DTYPES
from ringcomm.collectives.message_patterns import chunks
from ringcomm.collectives.operators import SUM, Op
from ringcomm.collectives.recording import live
from ringcomm.transport.channel import Channel
from ringcomm.transport.node import To
from ringcomm.transport.node.steps import NodeReduction

_NOTHING: Bytes = np.empty(0, np.uint8)


@live
async def allreduce_(x: Flat, t: Channel, op: Op = SUM) -> None:
    """Replace x by its reduction over all ranks.

    Cost: moves two bytes per byte of x if x is in registered memory, else four.
    """
    await t.reduce_in_node(NodeReduction(x.bytes, x.bytes, *_kernel(x, t, op)))


@live
async def reduce(x: Flat, out: Flat | None, root: int, t: Channel, op: Op = SUM) -> None:
    """Write the reduction of x to root's `out`, which may be its x. Other ranks pass None."""
    target = None if out is None else out.bytes
    await t.reduce_in_node(NodeReduction(x.bytes, target, *_kernel(x, t, op), To.ROOT, root))


@live
async def reduce_scatter_(x: Flat, parts: list[slice], t: Channel, op: Op = SUM) -> Flat:
    """Return this rank's reduced chunk, a view of x; the rest of x keeps this rank's values."""
    own = x[parts[t.rank]]
    bounds = [0, *(part.stop * x.dtype.itemsize for part in parts)]
    await t.reduce_in_node(
        NodeReduction(x.bytes, own.bytes, *_kernel(x, t, op), To.OWNER, 0, bounds)
    )
    return own


@live
async def reduce_scatter_to_float32(x: Flat, parts: list[slice], t: Channel, op: Op = SUM) -> Flat:
    """Return this rank's reduced chunk of 16-bit floats in new memory: float32, not rounded."""
    own = x[parts[t.rank]]
    wide = Flat(np.empty(2 * own.bytes.nbytes, np.uint8), DTYPES["float32"])
    bounds = [0, *(part.stop * x.dtype.itemsize for part in parts)]
    what = NodeReduction(
        x.bytes, wide.bytes, *_kernel(x, t, op), To.OWNER, 0, bounds, is_widened=True
    )
    await t.reduce_in_node(what)
    return wide


@live
async def allgather_(x: Flat, parts: list[slice], t: Channel) -> None:
    """Fill x with every rank's chunk. This rank's chunk is in its place already."""
    own = x[parts[t.rank]].bytes
    await t.copy_in_node(own, [(r, 0, x[parts[r]].bytes) for r in _others(t)])


@live
async def broadcast_(x: Flat, root: int, t: Channel) -> None:
    if t.rank == root:
        await t.copy_in_node(x.bytes, [])
    else:
        await t.copy_in_node(_NOTHING, [(root, 0, x.bytes)])


@live
async def gather_(x: Flat | None, own: Flat, parts: list[slice], root: int, t: Channel) -> None:
    """Fill x[parts[r]] on root with `own` of each rank r. Root's part is in its place already."""
    if t.rank != root:
        await t.copy_in_node(own.bytes, [])
        return
    assert x is not None
    await t.copy_in_node(_NOTHING, [(r, 0, x[parts[r]].bytes) for r in _others(t)])


@live
async def scatter_(x: Flat | None, out: Flat, parts: list[slice], root: int, t: Channel) -> None:
    if t.rank != root:
        begin = parts[t.rank].start * out.dtype.itemsize
        await t.copy_in_node(_NOTHING, [(root, begin, out.bytes)])
        return
    assert x is not None
    out.bytes[:] = x[parts[root]].bytes
    await t.copy_in_node(x.bytes, [])


@live
async def alltoall_(
    x: Flat, sent: list[slice], out: Flat, received: list[slice], t: Channel
) -> None:
    begins = await alltoall_counts([part.start * x.dtype.itemsize for part in sent], t)
    ranks = (t.rank, *_others(t))
    await t.copy_in_node(x.bytes, [(r, begins[r], out[received[r]].bytes) for r in ranks])


@live
async def alltoall_counts(counts: list[int], t: Channel) -> list[int]:
    theirs = np.empty(t.size, np.int64)
    pulls = [(r, 8 * t.rank, theirs[r : r + 1].view(np.uint8)) for r in range(t.size)]
    await t.copy_in_node(np.array(counts, np.int64).view(np.uint8), pulls)
    return theirs.tolist()


SCAN_PIECE_NBYTES: Final = 1 << 20  # a scan copies so much of each rank before it at a time


@live
async def scan(x: Flat, out: Flat, t: Channel, op: Op, *, is_exclusive: bool) -> None:
    """Set `out` as chain.scan() does; pieces of x go one after another.

    Cost: the last rank reads the x of all; it takes (size - 1) * SCAN_PIECE_NBYTES of memory.
    """
    pieces = chunks(x.count, max(1, -(-x.bytes.nbytes // SCAN_PIECE_NBYTES)))
    scratch = [x.like(pieces[0].stop) for _ in range(t.rank)]
    for piece in pieces:
        mine = x[piece]
        theirs = [each[: mine.count] for each in scratch]
        await t.copy_in_node(mine.bytes, pulls_of_scan(theirs))
        if t.rank or not is_exclusive:
            combine_scanned(out[piece], theirs if is_exclusive else [*theirs, mine], op)


def pulls_of_scan(theirs: list[Flat]) -> list[tuple[int, int, Bytes]]:
    """Return what a rank pulls from those before it; the nearest first, for not all read one."""
    return [(r, 0, each.bytes) for r, each in reversed(list(enumerate(theirs)))]


def combine_scanned(out: Flat, sources: list[Flat], op: Op) -> None:
    """Set `out` to the reduction of the sources in their order, rounded once."""
    raw = [source.bytes for source in sources]
    combine_at_once(out.bytes, raw, out.dtype.kernel, op.kernel, 1)


def _kernel(x: Flat, t: Channel, op: Op) -> tuple[int, int, int]:
    return op.kernel, x.dtype.kernel, op.divisor(t.size)


def _others(t: Channel) -> list[int]:
    """Return the other ranks, the next one first, so that ranks do not all read the same memory."""
    return [(t.rank + shift) % t.size for shift in range(1, t.size)]
