"""Choice of the small reductions that share a message. Pure: all ranks make the same plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Item:
    """Something to be reduced."""

    nbytes: int
    key: object  # alike for items that may share a message: dtype, operator, group
    is_barrier: bool = False  # nothing after it may share a message with anything before it


def plan_fusion(items: Sequence[Item], max_nbytes: float) -> list[list[int]]:
    """Return the indices of the items that share a message, without those of barriers.

    They ascend within a message; messages are in the order of their first items. A larger item than
    max_nbytes has a message of its own.
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
