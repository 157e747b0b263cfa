"""Scan and exscan: every rank gets the reduction of the ranks up to it, or before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ringcomm.arrays import Flat, any_adapter_for, arrived
from ringcomm.collectives.algorithms import chain, node
from ringcomm.collectives.operators import AVERAGE, Op, ReductionOptions
from ringcomm.collectives.scale_factors import to_bfloat16
from ringcomm.engine.core.agreement import node_or
from ringcomm.engine.core.call import reduction_call
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.plan import Plan
from ringcomm.engine.operations.base import A, Operation, contiguous, plan
from ringcomm.engine.operations.scalars import takes_scalars
from ringcomm.transport.channel import Channel
from ringcomm.transport.node.steps import NodeCopy


@takes_scalars("scan")
def plan_scan(
    group: Group, name: str | None, x: A, options: ReductionOptions, *, is_borrowed: bool = False
) -> Plan[A]:
    return _scanning("scan", group, name, x, options, is_borrowed)


@takes_scalars("exscan")
def plan_exscan(
    group: Group, name: str | None, x: A, options: ReductionOptions, *, is_borrowed: bool = False
) -> Plan[A]:
    return _scanning("exscan", group, name, x, options, is_borrowed)


def _scanning(  # noqa: PLR0917
    kind: str, group: Group, name: str | None, x: A, options: ReductionOptions, is_borrowed: bool
) -> Plan[A]:
    x = arrived(x)
    adapter = any_adapter_for(x)
    call = reduction_call(kind, name, options, x, adapter)
    if options.op is AVERAGE:
        n = "rc.rank() + 1" if kind == "scan" else "rc.rank()"
        raise ValueError(
            f"{kind}: AVERAGE has no meaning here, where each rank combines another number of "
            f"values. Pass op=rc.SUM, and divide by {n}, or by that of the group"
        )
    return plan(Scan(group, call, adapter, x, options.op, kind == "exscan", is_borrowed))


@dataclass(slots=True, eq=False)
class Scan(Operation):
    op: Op
    is_exclusive: bool  # without this rank's own values
    is_borrowed: bool  # the caller keeps x unchanged until the end, so no copy is needed
    mirrored: ClassVar[dict[str, Any]] = {"is_borrowed": True}

    def on_host(self) -> Plan[Any]:
        """Return the plan; of a short array it is one step in a node."""
        x, adapter, op, is_exclusive = self.x, self.adapter, self.op, self.is_exclusive
        rank = self.group.index
        mine = adapter.flat(contiguous(x, adapter) if self.is_borrowed else adapter.copy(x))
        out = adapter.empty(x, adapter.shape(x))
        target = adapter.flat(out)
        step, theirs = None, []
        if self.group.takes_steps and mine.bytes.nbytes <= node.SCAN_PIECE_NBYTES:
            theirs = [mine.like(mine.count) for _ in range(rank)]
            step = NodeCopy(mine.bytes, node.pulls_of_scan(theirs))

        def finish(_: Channel | None = None) -> Any:
            combine_scan(target, theirs, mine, op, is_exclusive=is_exclusive)
            return out

        async def run(t: Channel) -> Any:
            await node_or(chain, t).scan(mine, target, t, op, is_exclusive=is_exclusive)
            if is_exclusive and rank == 0:
                _fill(target, op)
            return out

        return Plan(self.call, mine.bytes.nbytes, run, step, finish)


def combine_scan(
    target: Flat, theirs: list[Flat], mine: Flat, op: Op, *, is_exclusive: bool
) -> None:
    """Set `target` to the result of a rank: of the values before it, and its own."""
    sources = theirs if is_exclusive else [*theirs, mine]
    if sources:
        node.combine_scanned(target, sources, op)
    else:
        _fill(target, op)


def _fill(target: Flat, op: Op) -> None:
    """Set all elements to the one that changes no other."""
    identity = op.identity(target.dtype)
    if target.dtype.name == "bfloat16":
        target.bytes.view(np.uint16)[:] = to_bfloat16(np.array([identity], np.float32))
    else:
        target.bytes.view(target.dtype.name)[:] = identity
