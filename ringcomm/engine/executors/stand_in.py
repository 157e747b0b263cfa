"""The part of a rank that has joined in an operation of the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from ringcomm.engine.core.call import Call
from ringcomm.engine.core.execution import Plan
from ringcomm.engine.core.group import Group
from ringcomm.engine.operations import (
    adasum,
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    grouped,
    objects,
    reduce,
    reduce_scatter,
    scatter,
)

_STAND_INS: Final[dict[str, Callable[[Group, Call], Plan[Any]]]] = {
    "adasum": adasum.stand_in,
    "allgather": allgather.stand_in,
    "allgather_object": objects.stand_in,
    "allreduce": allreduce.stand_in,
    "alltoall": alltoall.stand_in,
    "barrier": barrier.stand_in,
    "broadcast": broadcast.stand_in,
    "broadcast_object": objects.stand_in,
    "gather": allgather.stand_in,
    "grouped_allgather": grouped.stand_in,
    "grouped_allreduce": grouped.stand_in,
    "grouped_reduce_scatter": grouped.stand_in,
    "reduce": reduce.stand_in,
    "reduce_scatter": reduce_scatter.stand_in,
    "scatter": scatter.stand_in,
    "sparse_allreduce": grouped.stand_in,
}


def plan_stand_in(group: Group, call: Call) -> Plan[Any]:
    """Plan this rank's part of a call that it learnt of from another rank.

    It reduces what changes no result (0 for SUM, 1 for PRODUCT, infinity for MIN ...), gathers and
    sends no rows, and drops what it receives.

    Raises:
        Exception: what the other rank's arguments raised there, so that all agree on that.
        ValueError: it would have something to give: it is the root of a broadcast or scatter.
    """
    if call.error is not None:
        what, _, text = call.error.partition(": ")
        raise type(what, (Exception,), {})(text)
    stand_in = _STAND_INS.get(call.kind.removesuffix("_"))
    if stand_in is None:
        raise ValueError(f"this rank has called join(), so it has nothing to give to {call.kind}")
    plan = stand_in(group, call)
    if call.is_once:
        plan.call = replace(plan.call, is_once=True)
    if plan.call.fingerprint != call.fingerprint:
        raise ValueError(f"this rank has called join() and cannot stand in for {call.kind}")
    return plan
