"""Ring allreduce: reduce-scatter, then allgather. The schedule is in schedule.py."""

from __future__ import annotations

from ringcomm.arrays.base import Flat
from ringcomm.collectives.op import SUM, Op
from ringcomm.collectives.schedule import allgather_steps, chunks, reduce_scatter_steps
from ringcomm.transport.performer import Performer


async def allreduce_(x: Flat, t: Performer, op: Op = SUM) -> None:
    """Replace x by its reduction over all ranks; all ranks end up with the same bits.

    Args:
        x: same count and dtype on every rank; not 16-bit floats, see direct.py.
        t: the ring; two messages in flight at a time.
        op: AVERAGE divides each chunk once, at its owner.

    Raises:
        PeerFailedError: a rank died; x is undefined.
        CommTimeoutError: a rank did not come in time; x is undefined.

    Cost: 2 (size - 1) messages, 2 (size - 1) / size * nbytes sent.
    """
    parts = chunks(x.count, t.size)
    await reduce_scatter_(x, parts, t, op)
    await allgather_(x, parts, t)


async def reduce_scatter_(x: Flat, parts: list[slice], t: Performer, op: Op = SUM) -> Flat:
    """Return this rank's reduced chunk of x; the rest of x is left half-reduced.

    Args:
        x: as in allreduce_. Overwritten.
        parts: the chunks, one per rank, the same on every rank.
        t: the ring.
        op: the operator.

    Returns:
        View of x: chunk `rank` of the reduction.
    """
    left, right = (t.rank - 1) % t.size, (t.rank + 1) % t.size
    scratch = t.scratch(x, max((part.stop - part.start for part in parts), default=0))
    for step in reduce_scatter_steps(t.rank, t.size):
        mine = x[parts[step.receive]]
        arriving = scratch[: mine.count]
        await t.exchange(x[parts[step.send]].bytes, right, arriving.bytes, left)
        t.combine(mine, arriving, op)
    own = x[parts[t.rank]]
    t.finish(own, op, t.size)
    return own


async def allgather_(x: Flat, parts: list[slice], t: Performer) -> None:
    """Fill x with every rank's chunk, this rank's being in its place already."""
    left, right = (t.rank - 1) % t.size, (t.rank + 1) % t.size
    for step in allgather_steps(t.rank, t.size):
        await t.exchange(x[parts[step.send]].bytes, right, x[parts[step.receive]].bytes, left)
