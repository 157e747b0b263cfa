"""Broadcast down a binomial tree."""

from __future__ import annotations

from ringcomm.arrays.base import Flat
from ringcomm.collectives.message_patterns import binomial_tree
from ringcomm.transport.performer import Performer


async def broadcast_(x: Flat, root: int, t: Performer) -> None:
    """Replace x on every rank by root's x.

    Cost: ceil(log2 size) rounds; the root sends nbytes in each of them.
    """
    parent, children = binomial_tree(t.rank, t.size, root)
    if parent is not None:
        await t.wait(t.irecv(x.bytes, parent))
    await t.wait(*[t.isend(x.bytes, child) for child in children])
