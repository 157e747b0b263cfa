"""Allgather and gather: every rank, or root alone, gets the rows of all ranks in rank order."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ringcomm.arrays import any_adapter_for, arrived
from ringcomm.collectives.algorithms import linear
from ringcomm.collectives.message_patterns import consecutive
from ringcomm.collectives.recording import perform
from ringcomm.engine.core.agreement import gather_counts, node_or
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.plan import Plan
from ringcomm.engine.executors.gpu_loader import plan
from ringcomm.engine.operations.base import A, Operation, contiguous, rank_of, rows_call
from ringcomm.transport.channel import Channel


def plan_allgather(group: Group, name: str | None, x: A) -> Plan[A]:
    return _gathering("allgather", group, name, x, None)


def plan_gather(group: Group, name: str | None, x: A, root: int) -> Plan[A | None]:
    return _gathering("gather", group, name, x, rank_of("root", root, group))


def _gathering(kind: str, group: Group, name: str | None, x: Any, root: int | None) -> Plan[Any]:
    x = arrived(x)
    adapter = any_adapter_for(x)
    return plan(Gathering(group, rows_call(kind, name, x, adapter, root), adapter, x, root))


@dataclass(slots=True, eq=False)
class Gathering(Operation):
    """An allgather, or a gather at root."""

    root: int | None  # None: every rank gets the rows

    def on_host(self) -> Plan[Any]:
        """Return the plan; the ranks exchange their numbers of rows first."""
        x, adapter, root = self.x, self.adapter, self.root
        shape = adapter.shape(x)
        width = math.prod(shape[1:])
        mine = adapter.flat(contiguous(x, adapter))
        choose = self.group.engine.selection.algorithm

        async def run(t: Channel) -> Any:
            rows = await gather_counts(shape[0], t)
            parts = consecutive([n * width for n in rows])
            if root not in (None, t.rank):
                await perform(node_or(linear, t).gather_, t, None, mine, parts, root)
                return None
            out = adapter.empty(x, (sum(rows), *shape[1:]))
            flat = adapter.flat(out)
            own = flat[parts[t.rank]]
            with t.phase("copy"):
                own.bytes[:] = mine.bytes
            if root is None:
                await perform(choose("allgather", flat, t).allgather_, t, flat, parts)
            else:
                await perform(node_or(linear, t).gather_, t, flat, own, parts, root)
            return out

        return Plan(self.call, mine.bytes.nbytes, run)
