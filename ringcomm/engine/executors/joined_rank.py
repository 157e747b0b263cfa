"""Plans by which a rank that has called join() takes part in operations of the others."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from ringcomm.arrays import DTYPES, adapter_of_kind
from ringcomm.arrays.dtypes import DType
from ringcomm.collectives.operators import StandInOptions
from ringcomm.engine.core.call import Call
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.plan import Plan
from ringcomm.engine.operations.adasum import plan_adasum
from ringcomm.engine.operations.allgather_and_gather import plan_allgather, plan_gather
from ringcomm.engine.operations.allreduce import plan_allreduce
from ringcomm.engine.operations.alltoall import plan_alltoall
from ringcomm.engine.operations.barrier import plan_barrier
from ringcomm.engine.operations.base import device_executor
from ringcomm.engine.operations.broadcast import plan_broadcast
from ringcomm.engine.operations.grouped import (
    plan_grouped,
    plan_grouped_allreduce,
    plan_grouped_reduce_scatter,
)
from ringcomm.engine.operations.objects import (
    plan_allgather_object,
    plan_broadcast_object,
    plan_gather_object,
    plan_scatter_object,
)
from ringcomm.engine.operations.reduce import plan_reduce
from ringcomm.engine.operations.reduce_scatter import plan_reduce_scatter
from ringcomm.engine.operations.scan import plan_exscan, plan_scan
from ringcomm.engine.operations.scatter import plan_scatter

_Shape = tuple[int | None, ...]
_StandIn = Callable[[Group, Call], Plan[Any]]


def plan_stand_in(group: Group, call: Call) -> Plan[Any]:
    """Plan this rank's part in the call of another rank.

    This rank adds identity elements to reductions, no rows to other calls, and drops results.

    Raises:
        Exception: with name and text of the error that the arguments raised on the other rank.
        ValueError: this rank is the root of a broadcast or scatter, so others wait for its data.
    """
    if call.error is not None:
        error_class, _, text = call.error.partition(": ")
        raise type(error_class, (Exception,), {})(text)
    stand_in = _STAND_INS.get(call.kind.removesuffix("_"))
    if stand_in is None:
        raise _nothing_to_give(call)
    plan = stand_in(group, call)
    if call.is_once:
        plan.call = replace(plan.call, is_once=True)
    if plan.call.fingerprint != call.fingerprint:
        raise ValueError(f"this rank has called join() and cannot stand in for {call.kind}")
    return plan


def _reduction(plan: Callable[..., Plan[Any]]) -> _StandIn:
    """Return a function that plans a reduction to which this rank gives identity elements."""

    def stand_in(group: Group, call: Call) -> Plan[Any]:
        if call.reduction is None:  # a grouped one without arrays
            return _grouped_gather(group, call)
        options = StandInOptions(*call.reduction)
        xs: list[Any] = []
        for dtype, shape in _arrays_of(call):
            x = _empty(dtype, shape)
            x[...] = options.op.identity(dtype)
            xs.append(_placed(group, call, x))
        arrays = xs if call.members is None else [xs]
        root = [] if call.root is None else [call.root]
        form = {"in_place": True} if call.kind.endswith("_") else {}
        return plan(group, call.name, *arrays, options, *root, **form)

    return stand_in


def _no_rows(group: Group, call: Call) -> list[Any]:
    return [_placed(group, call, _empty(of, (0, *shape[1:]))) for of, shape in _arrays_of(call)]


def _grouped_gather(group: Group, call: Call) -> Plan[Any]:
    plans = [plan_allgather(group, None, x) for x in _no_rows(group, call)]
    return plan_grouped(call.kind, call.name, plans)


def _broadcast(group: Group, call: Call) -> Plan[Any]:
    x = _placed(group, call, _empty(*_arrays_of(call)[0]))
    in_place = call.kind.endswith("_")
    return plan_broadcast(group, call.name, x, _other_root(group, call), in_place=in_place)


def _other_root(group: Group, call: Call) -> int:
    if call.root == group.rank:
        raise _nothing_to_give(call)
    return call.root or 0


def _nothing_to_give(call: Call) -> ValueError:
    return ValueError(f"this rank has called join(), so it has nothing to give to {call.kind}")


def _arrays_of(call: Call) -> list[tuple[DType, _Shape]]:
    members = [(call.dtype or "", call.shape or ())] if call.members is None else call.members
    return [(DTYPES[dtype], shape) for dtype, shape in members]


def _empty(dtype: DType, shape: _Shape) -> Any:
    lengths = tuple(n or 0 for n in shape)
    # numpy has no bfloat16; torch has, and is used if it is loaded already.
    kind = "torch" if dtype.name == "bfloat16" and "torch" in sys.modules else "numpy"
    return adapter_of_kind(kind).make(dtype, lengths)


def _placed(group: Group, call: Call, x: Any) -> Any:
    return x if call.place is None else device_executor().copied(group, x)


_STAND_INS: Final[dict[str, _StandIn]] = {
    "adasum": _reduction(plan_adasum),
    "allgather": lambda g, call: plan_allgather(g, call.name, _no_rows(g, call)[0]),
    "allgather_object": lambda g, call: plan_allgather_object(g, call.name, None),
    "allreduce": _reduction(plan_allreduce),
    "alltoall": lambda g, call: plan_alltoall(
        g, call.name, _no_rows(g, call)[0], [0] * g.size, False
    ),
    "barrier": lambda g, call: plan_barrier(g, call.name),
    "broadcast": _broadcast,
    "broadcast_object": lambda g, call: plan_broadcast_object(
        g, call.name, None, _other_root(g, call)
    ),
    "exscan": _reduction(plan_exscan),
    "gather": lambda g, call: plan_gather(g, call.name, _no_rows(g, call)[0], call.root or 0),
    "gather_object": lambda g, call: plan_gather_object(g, call.name, None, call.root or 0),
    "grouped_allgather": _grouped_gather,
    "grouped_allreduce": _reduction(plan_grouped_allreduce),
    "grouped_reduce_scatter": _reduction(plan_grouped_reduce_scatter),
    "reduce": _reduction(plan_reduce),
    "reduce_scatter": _reduction(plan_reduce_scatter),
    "scan": _reduction(plan_scan),
    "scatter": lambda g, call: plan_scatter(
        g, call.name, None, _other_root(g, call), (call.dtype, call.shape)
    ),
    "scatter_object": lambda g, call: plan_scatter_object(g, call.name, None, _other_root(g, call)),
    "sparse_allreduce": _grouped_gather,
}
