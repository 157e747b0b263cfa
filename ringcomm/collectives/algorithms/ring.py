"""Ring allreduce: reduce-scatter, then allgather. The schedule is in message_patterns.py."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from ringcomm.arrays.base import Flat
from ringcomm.collectives.message_patterns import allgather_steps, chunks, reduce_scatter_steps
from ringcomm.collectives.operators import SUM, Op
from ringcomm.transport.performer import Performer


async def reduce_scatter_(x: Flat, parts: list[slice], t: Performer, op: Op = SUM) -> Flat:
    """Return this rank's reduced chunk, a view of x; the rest of x has partial results.

    `parts` are the chunks, one per rank, the same on every rank.
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
    """Fill x with every rank's chunk. This rank's chunk is in its place already."""
    left, right = (t.rank - 1) % t.size, (t.rank + 1) % t.size
    for step in allgather_steps(t.rank, t.size):
        await t.exchange(x[parts[step.send]].bytes, right, x[parts[step.receive]].bytes, left)


def allreduce_of(
    reduce_scatter_: Callable[..., Coroutine[Any, Any, Flat]],
    allgather_: Callable[..., Coroutine[Any, Any, None]],
) -> Callable[..., Coroutine[Any, Any, None]]:
    async def allreduce_(x: Flat, t: Performer, op: Op = SUM) -> None:
        """Replace x by its reduction over all ranks; all ranks get the same bits.

        Args:
            x: array of the same count and dtype on every rank; 16-bit floats only with direct.py.
            t: channel of the ranks, whose numbers give the order of the ring.
            op: operator; AVERAGE divides each chunk once, at its owner.

        Raises:
            PeerFailedError: a rank died; x is undefined.
            CommTimeoutError: a rank did not take part in time; x is undefined.

        Cost: that of the phases; for the ring 2 (size - 1) messages, two in flight at a time, and
        2 (size - 1) / size * nbytes sent.
        """
        parts = chunks(x.count, t.size)
        await reduce_scatter_(x, parts, t, op)
        await allgather_(x, parts, t)

    return allreduce_


allreduce_ = allreduce_of(reduce_scatter_, allgather_)
