"""Alltoall: each rank sends some of its rows to each rank."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ringcomm.arrays import Flat, any_adapter_for, arrived
from ringcomm.collectives.algorithms import linear
from ringcomm.collectives.message_patterns import consecutive, from_own
from ringcomm.collectives.recording import perform
from ringcomm.engine.core.agreement import node_or
from ringcomm.engine.core.call import require_flag
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.plan import Plan
from ringcomm.engine.operations.base import A, Operation, contiguous, plan, rows_call
from ringcomm.transport.channel import Channel
from ringcomm.transport.node.steps import NodeExchange, Pulls, ShownByAll


def plan_alltoall(
    group: Group, name: str | None, x: A, splits: Sequence[int] | None, return_splits: bool
) -> Plan[A | tuple[A, list[int]]]:
    require_flag("return_splits", return_splits)
    x = arrived(x)
    adapter = any_adapter_for(x)
    call = rows_call("alltoall", name, x, adapter)
    sent = _splits_of(splits, adapter.shape(x)[0], group.size)
    return plan(Alltoall(group, call, adapter, x, sent, return_splits))


@dataclass(slots=True, eq=False)
class Alltoall(Operation):
    sent: list[int]  # number of rows for each rank
    return_splits: bool  # the result is (rows, number of rows from each rank)
    mirrored: ClassVar[dict[str, Any]] = {"return_splits": False}

    def on_host(self) -> Plan[Any]:
        """Return the plan; in a node it is one step."""
        x, adapter, sent, group = self.x, self.adapter, self.sent, self.group
        shape = adapter.shape(x)
        width = math.prod(shape[1:])
        mine = adapter.flat(contiguous(x, adapter))
        row_nbytes = width * mine.dtype.itemsize
        received: list[int] = []
        out: Any = None

        def make(rows: Sequence[int]) -> tuple[Flat, list[slice]]:
            """Make the result; return its memory, and the part of each rank."""
            nonlocal out
            received[:] = rows
            out = adapter.empty(x, (sum(rows), *shape[1:]))
            return adapter.flat(out), consecutive([n * width for n in rows])

        def splits_of(shown: ShownByAll) -> list[NDArray[np.int64]]:
            return [np.frombuffer(header, np.int64) for header, _ in shown]

        def rows_of(shown: ShownByAll) -> list[int]:
            return [int(splits[group.index]) for splits in splits_of(shown)]

        def pulls_from(shown: ShownByAll) -> Pulls:
            me, splits = group.index, splits_of(shown)
            flat, parts = make(rows_of(shown))
            return [
                (r, int(splits[r][:me].sum()) * row_nbytes, flat[parts[r]].bytes)
                for r in from_own(me, group.size)
            ]

        def finish(_: Channel | None = None) -> Any:
            return (out, received) if self.return_splits else out

        async def run(t: Channel) -> Any:
            algorithm = node_or(linear, t)
            rows = rows_of(step.shown_by_all) or await algorithm.alltoall_counts(sent, t)
            flat, incoming = make(rows)
            outgoing = consecutive([n * width for n in sent])
            await perform(algorithm.alltoall_, t, mine, outgoing, flat, incoming)
            return finish()

        step = NodeExchange(mine.bytes, np.array(sent, np.int64).tobytes(), pulls_from)
        nbytes = mine.bytes.nbytes
        return Plan(self.call, nbytes, run, step, finish, acts_through_channel=True)


def _splits_of(splits: Sequence[int] | None, n_rows: int, size: int) -> list[int]:
    """Return how many rows go to each rank. Raises TypeError, ValueError."""
    if splits is None:
        if n_rows % size:
            raise ValueError(
                f"alltoall: {n_rows} rows cannot be shared evenly by {size} ranks: pass splits="
            )
        return [n_rows // size] * size
    try:
        # splits may be endless, so at most size + 1 are read. index() refuses 1.5; int() cuts it.
        rows = [operator.index(n) for n in itertools.islice(splits, size + 1)]
    except TypeError as error:
        raise TypeError(
            f"alltoall: splits={splits!r} must be {size} integers, one per rank: how many rows go "
            "to each"
        ) from error
    if len(rows) != size or sum(rows) != n_rows or min(rows) < 0:
        raise ValueError(
            f"alltoall: splits={rows} must be {size} numbers >= 0, one per rank, with the sum "
            f"{n_rows}, the rows of x"
        )
    return rows
