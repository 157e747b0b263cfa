"""Chooses the small reductions that share a message. Pure: all ranks make the same plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Item(NamedTuple):
    """An array to be reduced, or a barrier."""

    nbytes: int
    key: object  # the same for items that may share a message: dtype, operator, group
    is_barrier: bool = False  # items after it share no message with items before it


def plan_fusion(items: Sequence[Item], max_nbytes: float) -> list[list[int]]:
    """Return, for each message, the indices of its items in ascending order; barriers are left out.

    Messages are in the order of their first items. An item larger than max_nbytes has a message of
    its own.
    """
    batches: list[list[int]] = []
    open_by_key: dict[object, tuple[list[int], int]] = {}
    for index, item in enumerate(items):
        if item.is_barrier:
            open_by_key.clear()
            continue
        batch, filled = open_by_key.get(item.key, ([], 0))
        if not batch or filled + item.nbytes > max_nbytes:
            batch, filled = [], 0
            batches.append(batch)
        batch.append(index)
        open_by_key[item.key] = (batch, filled + item.nbytes)
    return batches
