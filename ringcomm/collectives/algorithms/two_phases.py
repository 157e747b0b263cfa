"""An allreduce made of its two phases: a reduce-scatter, then an allgather."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from ringcomm.arrays.base import Flat
from ringcomm.collectives.op import SUM, Op
from ringcomm.collectives.schedule import chunks
from ringcomm.transport.performer import Performer


def allreduce_of(
    reduce_scatter_: Callable[..., Coroutine[Any, Any, Flat]],
    allgather_: Callable[..., Coroutine[Any, Any, None]],
) -> Callable[..., Coroutine[Any, Any, None]]:
    """Return the allreduce that these make; it has the contract of ring.allreduce_."""

    async def allreduce_(x: Flat, t: Performer, op: Op = SUM) -> None:
        parts = chunks(x.count, t.size)
        await reduce_scatter_(x, parts, t, op)
        await allgather_(x, parts, t)

    return allreduce_
