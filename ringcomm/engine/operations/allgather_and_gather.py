"""Allgather and gather: every rank, or root alone, gets the rows of all ranks in rank order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ringcomm.arrays import Flat, any_adapter_for, arrived
from ringcomm.collectives.algorithms import linear
from ringcomm.collectives.message_patterns import consecutive, from_own
from ringcomm.collectives.recording import perform
from ringcomm.engine.core.agreement import gather_counts, node_or
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.plan import Plan
from ringcomm.engine.executors.gpu_loader import plan
from ringcomm.engine.operations.base import A, Operation, contiguous, rank_of, rows_call
from ringcomm.engine.operations.scalars import takes_scalars
from ringcomm.transport.channel import Channel
from ringcomm.transport.node.steps import NodeExchange, Pulls, ShownByAll


def plan_allgather(group: Group, name: str | None, x: A) -> Plan[A]:
    return _gathering("allgather", group, name, x, None)


@takes_scalars("gather")
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
        """Return the plan; in a node it is one step."""
        x, adapter, root, group = self.x, self.adapter, self.root, self.group
        shape = adapter.shape(x)
        width = math.prod(shape[1:])
        mine = adapter.flat(contiguous(x, adapter))
        is_wanted = root in (None, group.index)
        choose = group.engine.selection.algorithm
        out: Any = None

        def make(rows: Sequence[int]) -> Flat:
            nonlocal out
            out = adapter.empty(x, (sum(rows), *shape[1:]))
            flat: Flat = adapter.flat(out)
            return flat

        def rows_of(shown: ShownByAll) -> list[int]:
            return [int.from_bytes(header, "little") for header, _ in shown]

        def pulls_from(shown: ShownByAll) -> Pulls:
            if not is_wanted:
                return ()
            rows = rows_of(shown)
            flat, parts = make(rows), consecutive([n * width for n in rows])
            return [(r, 0, flat[parts[r]].bytes) for r in from_own(group.index, group.size)]

        async def run(t: Channel) -> Any:
            rows = rows_of(step.shown_by_all) or await gather_counts(shape[0], t)
            parts = consecutive([n * width for n in rows])
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
            return out

        header = shape[0].to_bytes(8, "little")
        step = NodeExchange(mine.bytes, header, pulls_from)
        nbytes = mine.bytes.nbytes
        return Plan(self.call, nbytes, run, step, lambda _: out, acts_through_channel=True)
