"""Values that change no result: what a rank without work contributes."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ringcomm.arrays import DTYPES, adapter_of_kind
from ringcomm.arrays.dtypes import DType
from ringcomm.collectives.op import Op, ReductionOptions
from ringcomm.engine.core.call import Call
from ringcomm.engine.core.group import Group
from ringcomm.engine.executors.device import device_executor

_Shape = tuple[int | None, ...]


def neutral_arrays(group: Group, call: Call) -> list[Any]:
    """Return an array for each that `call` reduces: of 0 for SUM, of 1 for PRODUCT, ..."""
    made = []
    for dtype, shape in _arrays_of(call):
        x = _empty(dtype, shape)
        x[...] = _neutral_value(dtype, options_of(call).op)
        made.append(_placed(group, call, x))
    return made


def no_rows(group: Group, call: Call) -> list[Any]:
    """Return an array without rows for each that `call` gathers."""
    return [_placed(group, call, _empty(of, (0, *shape[1:]))) for of, shape in _arrays_of(call)]


def undefined(group: Group, call: Call) -> Any:
    """Return an array for what is received and dropped."""
    return _placed(group, call, _empty(*_arrays_of(call)[0]))


def options_of(call: Call) -> ReductionOptions:
    """Return the options of a reduction."""
    assert call.reduction is not None
    return call.reduction


def is_in_place(call: Call) -> bool:
    """Return True for the form that overwrites its arguments."""
    return call.kind.endswith("_")


def require_other_root(group: Group, call: Call) -> int:
    """Return the root. Raises ValueError if it is this rank, which has nothing to give."""
    if call.root == group.rank:
        raise ValueError(f"this rank has called join(), so it has nothing to give to {call.kind}")
    return call.root or 0


def _arrays_of(call: Call) -> list[tuple[DType, _Shape]]:
    """Return dtype and shape of each array of a call."""
    members = [(call.dtype or "", call.shape or ())] if call.members is None else call.members
    return [(DTYPES[dtype], shape) for dtype, shape in members]


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


def _empty(dtype: DType, shape: _Shape) -> Any:
    lengths = tuple(n or 0 for n in shape)
    # numpy alone has no bfloat16, and torch is not to be loaded for the rest.
    kind = "torch" if dtype.name == "bfloat16" and "torch" in sys.modules else "numpy"
    return adapter_of_kind(kind).make(dtype, lengths)


def _placed(group: Group, call: Call, x: Any) -> Any:
    """Return x where the others have theirs."""
    return x if call.place is None else device_executor().copied(group, x)
