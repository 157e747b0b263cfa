"""Broadcast down a binomial tree."""

from __future__ import annotations

import numpy as np

from ringcomm.arrays.base import Flat
from ringcomm.arrays.dtypes import DTYPES
from ringcomm.collectives.schedule import binomial_tree
from ringcomm.transport.channel import Channel


async def broadcast_(x: Flat, root: int, t: Channel) -> None:
    """Replace x on every rank by root's x.

    Cost: ceil(log2 size) rounds; the root sends nbytes in each of them.
    """
    parent, children = binomial_tree(t.rank, t.size, root)
    if parent is not None:
        await t.wait(t.irecv(x.bytes, parent))
    await t.wait(*[t.isend(x.bytes, child) for child in children])


async def broadcast_bytes(packed: bytes, root: int, t: Channel) -> bytes:
    """Return root's bytes, of which the others need not know how many they are."""
    nbytes = np.array([len(packed)], np.int64)
    await broadcast_(Flat(nbytes.view(np.uint8), DTYPES["int64"]), root, t)
    is_root = t.rank == root
    data = np.frombuffer(packed, np.uint8) if is_root else np.empty(nbytes[0], np.uint8)
    await broadcast_(Flat(data, DTYPES["uint8"]), root, t)
    return data.tobytes()
