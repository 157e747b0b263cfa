"""What a rank that has nothing to contribute does in an operation of the others."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ringcomm.arrays import DTYPES, adapter_of_kind
from ringcomm.arrays.dtypes import DType
from ringcomm.collectives.op import Op
from ringcomm.collectives.scaling import Scaling
from ringcomm.engine.core.call import Call
from ringcomm.engine.core.execution import Plan
from ringcomm.engine.core.group import Group
from ringcomm.engine.executors.device import device_executor
from ringcomm.engine.operations import adasum, plans

_Shape = tuple[int | None, ...]


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
    kind = call.kind.removesuffix("_")
    make = _MAKERS.get(kind)
    if make is None or (kind in _FROM_ROOT and call.root == group.rank):
        raise ValueError(f"this rank has called join(), so it has nothing to give to {call.kind}")
    plan: Plan[Any] = make(group, call)
    if call.is_once:
        plan = replace(plan, call=replace(plan.call, is_once=True))
    if plan.call.fingerprint != call.fingerprint:
        raise ValueError(f"this rank has called join() and cannot stand in for {call.kind}")
    return plan


def _reduction(plan: Callable[..., Plan[Any]]) -> Callable[[Group, Call], Plan[Any]]:
    def make(group: Group, call: Call) -> Plan[Any]:
        op, options = _how(call)
        x = _placed(group, call, _neutral(DTYPES[call.dtype or ""], call.shape or (), op))
        if call.kind.endswith("_"):
            options["in_place"] = True
        root = () if call.root is None else (call.root,)
        return plan(group, call.name, x, op, *root, **options)

    return make


def _grouped_reduction(plan: Callable[..., Plan[Any]]) -> Callable[[Group, Call], Plan[Any]]:
    def make(group: Group, call: Call) -> Plan[Any]:
        op, options = _how(call)
        members = call.members or ()
        xs = [_placed(group, call, _neutral(DTYPES[d], shape, op)) for d, shape in members]
        if call.kind.endswith("_"):
            options["in_place"] = True
        return plan(group, call.name, xs, op, **options)

    return make


def _adasum(group: Group, call: Call) -> Plan[Any]:
    _, *factors = (call.op or "").split(", ")
    scaling = _scaling(factors) if factors else None
    members = call.members or ()
    xs = [_placed(group, call, _neutral(DTYPES[d], shape, Op.SUM)) for d, shape in members]
    return adasum.plan(group, call.name, xs, in_place=call.kind.endswith("_"), scaling=scaling)


def _allgather(group: Group, call: Call) -> Plan[Any]:
    rows = _placed(group, call, _no_rows(call.dtype, call.shape))
    return plans.allgather(group, call.name, rows)


def _grouped_allgather(group: Group, call: Call) -> Plan[Any]:
    xs = [_placed(group, call, _no_rows(dtype, shape)) for dtype, shape in call.members or ()]
    return plans.grouped(call.kind, call.name, [plans.allgather(group, None, x) for x in xs])


def _gather(group: Group, call: Call) -> Plan[Any]:
    rows = _placed(group, call, _no_rows(call.dtype, call.shape))
    return plans.gather(group, call.name, rows, call.root or 0)


def _alltoall(group: Group, call: Call) -> Plan[Any]:
    rows = _placed(group, call, _no_rows(call.dtype, call.shape))
    none = [0] * group.size
    return plans.alltoall(group, call.name, rows, none, return_splits=False)


def _broadcast(group: Group, call: Call) -> Plan[Any]:
    x = _placed(group, call, _empty(DTYPES[call.dtype or ""], call.shape or ()))
    in_place = call.kind.endswith("_")
    return plans.broadcast(group, call.name, x, call.root or 0, in_place=in_place)


def _scatter(group: Group, call: Call) -> Plan[Any]:
    return plans.scatter(group, call.name, None, call.root or 0)


def _broadcast_object(group: Group, call: Call) -> Plan[Any]:
    return plans.broadcast_object(group, call.name, None, call.root or 0)


def _allgather_object(group: Group, call: Call) -> Plan[Any]:
    return plans.allgather_object(group, call.name, None)


def _barrier(group: Group, call: Call) -> Plan[Any]:
    return plans.barrier(group, call.name)


_FROM_ROOT = ("broadcast", "broadcast_object", "scatter")
_MAKERS: dict[str, Callable[[Group, Call], Plan[Any]]] = {
    "adasum": _adasum,
    "allgather": _allgather,
    "allgather_object": _allgather_object,
    "allreduce": _reduction(plans.allreduce),
    "alltoall": _alltoall,
    "barrier": _barrier,
    "broadcast": _broadcast,
    "broadcast_object": _broadcast_object,
    "gather": _gather,
    "grouped_allgather": _grouped_allgather,
    "grouped_allreduce": _grouped_reduction(plans.grouped_allreduce),
    "grouped_reduce_scatter": _grouped_reduction(plans.grouped_reduce_scatter),
    "reduce": _reduction(plans.reduce),
    "reduce_scatter": _reduction(plans.reduce_scatter),
    "scatter": _scatter,
    "sparse_allreduce": _grouped_allgather,
}


def _how(call: Call) -> tuple[Op, dict[str, Any]]:
    """Return the operator and the options of a reduction; see plans.reduction()."""
    name, *more = (call.op or Op.SUM.name).split(", ")
    options: dict[str, Any] = {}
    factors = [each for each in more if "=" in each]
    if "deterministic" in more:
        options["deterministic"] = True
    if factors:
        options["scaling"] = _scaling(factors)
    return Op[name], options


def _scaling(factors: list[str]) -> Scaling:
    """Read what Scaling prints."""
    values = dict(each.split("=") for each in factors)
    return Scaling(float(values["prescale"]), float(values["postscale"]))


def _neutral(dtype: DType, shape: _Shape, op: Op) -> Any:
    """Return an array that changes nothing when it is reduced with others."""
    x = _empty(dtype, shape)
    x[...] = _neutral_value(dtype, op)
    return x


def _neutral_value(dtype: DType, op: Op) -> Any:
    if op in (Op.MIN, Op.MAX):
        return _extreme(dtype, is_high=op is Op.MIN)
    if op is Op.BAND:
        return dtype.name == "bool" or (-1 if dtype.name.startswith("int") else _highest(dtype))
    return 1 if op is Op.PRODUCT else 0


def _extreme(dtype: DType, *, is_high: bool) -> Any:
    if dtype.name == "bool":
        return is_high
    if dtype.is_float:
        return np.inf if is_high else -np.inf
    return _highest(dtype) if is_high else int(np.iinfo(dtype.name).min)


def _highest(dtype: DType) -> int:
    return int(np.iinfo(dtype.name).max)


def _placed(group: Group, call: Call, x: Any) -> Any:
    """Return x where the others have theirs."""
    return x if call.place is None else device_executor().copied(group, x)


def _no_rows(dtype: str | None, shape: _Shape | None) -> Any:
    assert shape
    return _empty(DTYPES[dtype or ""], (0, *shape[1:]))


def _empty(dtype: DType, shape: _Shape) -> Any:
    lengths = tuple(n or 0 for n in shape)
    # numpy alone has no bfloat16, and torch is not to be loaded for the rest.
    kind = "torch" if dtype.name == "bfloat16" and "torch" in sys.modules else "numpy"
    return adapter_of_kind(kind).make(dtype, lengths)
