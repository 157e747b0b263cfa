"""Allgather and gather: every rank, or root alone, gets the rows of all ranks in rank order.

Split is an allgather: every rank learns the color and the key of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ringcomm.arrays import Array, Flat, adapter_for, any_adapter_for, arrived
from ringcomm.collectives.algorithms import linear
from ringcomm.collectives.message_patterns import consecutive, from_own
from ringcomm.collectives.recording import perform
from ringcomm.engine.core.agreement import gather_alike, node_or
from ringcomm.engine.core.call import Call
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.plan import Plan
from ringcomm.engine.operations.base import (
    A,
    Operation,
    contiguous,
    int_of,
    plan,
    rank_of,
    rows_call,
)
from ringcomm.engine.operations.scalars import takes_scalars
from ringcomm.errors import MismatchError
from ringcomm.transport.channel import Channel
from ringcomm.transport.node.steps import NodeExchange, Pulls, ShownByAll

_NO_COLOR: Final = -1
_INT64: Final = np.iinfo(np.int64)


def plan_allgather(group: Group, name: str | None, x: A) -> Plan[A]:
    return _gathering("allgather", group, name, x, None)


@takes_scalars("gather")
def plan_gather(group: Group, name: str | None, x: A, root: int) -> Plan[A | None]:
    return _gathering("gather", group, name, x, rank_of("root", root, group))


def plan_gather_into(  # noqa: PLR0917 - the group and the name come first, as for all plans
    group: Group, name: str | None, out: A | None, x: Array, root: int, due: Sequence[int]
) -> Plan[A | None]:
    """Plan to fill root's `out` with the elements of all ranks' x. Arrays are in host memory.

    Args:
        out: on root, a contiguous array of x's dtype with as many elements as are due; else None.
        x: array of one dimension.
        due: on root, how many elements it expects of each rank, else as many zeros. If a rank sends
            another number, all ranks raise MismatchError.
    """
    adapter = adapter_for(x)
    call = rows_call("gather_into", name, x, adapter, root)
    return Gathering(group, call, adapter, x, root, out, tuple(due)).on_host()


def _gathering(kind: str, group: Group, name: str | None, x: Any, root: int | None) -> Plan[Any]:
    x = arrived(x)
    adapter = any_adapter_for(x)
    return plan(Gathering(group, rows_call(kind, name, x, adapter, root), adapter, x, root))


@dataclass(slots=True, eq=False)
class Gathering(Operation):
    """An allgather, or a gather at root."""

    root: int | None  # None: every rank gets the rows
    out: Any = None  # array of the caller that gets the rows
    due: tuple[int, ...] = ()  # by rank: how many rows root expects; empty: any number

    def on_host(self) -> Plan[Any]:
        """Return the plan; in a node it is one step."""
        x, adapter, root, group = self.x, self.adapter, self.root, self.group
        shape = adapter.shape(x)
        width = math.prod(shape[1:])
        mine = adapter.flat(contiguous(x, adapter))
        is_wanted = root in (None, group.index)
        choose = group.engine.selection.algorithm
        told = np.array([shape[0], *self.due], np.int64).tobytes()
        out, wrong = self.out, ""

        def make(rows: Sequence[int]) -> Flat:
            nonlocal out
            if self.out is None:
                out = adapter.empty(x, (sum(rows), *shape[1:]))
            flat: Flat = adapter.flat(out)
            return flat

        def rows_of(told_by_all: Sequence[bytes]) -> list[int]:
            """Return how many rows each rank has; note whether root expects others."""
            nonlocal wrong
            table = [np.frombuffer(each, np.int64).tolist() for each in told_by_all]
            rows = [row[0] for row in table]
            if self.due and root is not None:
                wrong = _disagreement(rows, table[root][1:], group.ranks, root)
            return rows

        def pulls_from(shown: ShownByAll) -> Pulls:
            rows = rows_of([header for header, _ in shown])
            step.goes_on = bool(wrong)
            if wrong or not is_wanted:
                return ()
            flat, parts = make(rows), consecutive([n * width for n in rows])
            return [(r, 0, flat[parts[r]].bytes) for r in from_own(group.index, group.size)]

        async def refuse(_: Channel) -> Any:
            raise MismatchError(wrong)

        def finish(_: Channel | None = None) -> Any:
            if self.out is not None:
                adapter.written(out)
            return out

        async def run(t: Channel) -> Any:
            told_by_all = [header for header, _ in step.shown_by_all]
            rows = rows_of(told_by_all or await gather_alike(told, t))
            parts = consecutive([n * width for n in rows])
            if wrong:
                return await refuse(t)
            if not is_wanted:
                await perform(node_or(linear, t).gather_, t, None, mine, parts, root)
                return None
            flat = make(rows)
            own = flat[parts[t.rank]]
            t.copy(own, mine)
            if root is None:
                await perform(choose("allgather", flat, t).allgather_, t, flat, parts)
            else:
                await perform(node_or(linear, t).gather_, t, flat, own, parts, root)
            return finish()

        step = NodeExchange(mine.bytes, told, pulls_from)
        nbytes = mine.bytes.nbytes
        return Plan(self.call, nbytes, run, step, finish, rest=refuse, acts_through_channel=True)


def _disagreement(sent: Sequence[int], due: Sequence[int], ranks: Sequence[int], root: int) -> str:
    """Return the text of the first rank of which root expects another number; empty if none."""
    for rank, n, expected in zip(ranks, sent, due, strict=True):
        if n != expected:
            return (
                f"gather: rank {rank} sends {n} elements, and gather_list[{ranks.index(rank)}] of "
                f"the root, rank {ranks[root]}, has {expected}. Pass tensors of one size."
            )
    return ""


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
