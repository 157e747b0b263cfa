"""Split: every rank learns the color and the key of all ranks."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ringcomm.engine.core.call import Call
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.plan import Plan
from ringcomm.engine.operations.allgather_and_gather import plan_allgather
from ringcomm.engine.operations.base import int_of

_NO_COLOR: Final = -1
_INT64: Final = np.iinfo(np.int64)


def plan_split(group: Group, name: str | None, color: Any, key: Any) -> Plan[NDArray[np.int64]]:
    """Plan to get each rank's color and key, shape (size, 2); the color is -1 where it is None."""
    pair = (
        _NO_COLOR
        if color is None
        else _within("color", color, "an int >= 0, or None for no group", 0),
        0 if key is None else _within("key", key, "an int, or None", _INT64.min),
    )
    plan = plan_allgather(group, None, np.array([pair], np.int64))
    plan.call = Call("split", name)
    return plan


def members_of(color: int, pairs: NDArray[np.int64]) -> list[int]:
    """Return the ranks that have this color, ordered by key, and by rank where keys are equal."""
    ranks = np.flatnonzero(pairs[:, 0] == color)
    return [int(rank) for rank in ranks[np.argsort(pairs[ranks, 1], kind="stable")]]


def _within(what: str, number: Any, due: str, least: int) -> int:
    value = int_of(f"split: {what}", number, due)
    if not least <= value <= _INT64.max:
        raise ValueError(f"split: {what} is {value}; it must be {due}, {least} to {_INT64.max}")
    return value
