"""Encodes the arguments and results of functions, plain values and arrays, without pickling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ringcomm.ps.partition_state import PartitionState

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes

_ARRAY: Final = "\0array"  # replaces the array of that number
_SCALAR: Final = "\0scalar"  # replaces a scalar


def packed(label: str, value: Any) -> Bytes:
    """Return a value as unpacked() reads it.

    Args:
        label: for errors: "call[w]: argument limit".
        value: None, bool, int, float, str, arrays and scalars of numpy, and lists, tuples and dicts
            of these, with names as keys.

    Raises:
        TypeError: it is, or has in it, something else.
    """
    arrays: dict[str, Any] = {}
    outline = _without_arrays(label, value, arrays)
    return np.concatenate(PartitionState({"value": outline}, arrays).packed())


def unpacked(data: Bytes) -> Any:
    """Return the value; its arrays are copies, tuples have become lists.

    Raises:
        ValueError: the bytes are none.
    """
    state = PartitionState.unpacked(data)
    return _with_arrays(state.meta["value"], state.arrays)


def _without_arrays(label: str, value: Any, arrays: dict[str, Any]) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind not in "biufc":
            raise TypeError(f"{label}: an array of {value.dtype}; it must be of numbers")
        name = str(len(arrays))
        arrays[name] = np.asarray(value)
        return {_ARRAY if isinstance(value, np.ndarray) else _SCALAR: name}
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_without_arrays(label, each, arrays) for each in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _without_arrays(label, each, arrays) for key, each in value.items()}
    raise TypeError(
        f"{label}: {type(value).__name__} cannot be sent: it must be None, a bool, number or str, "
        "an array of numpy, or a list or dict of these whose keys are names"
    )


def _with_arrays(outline: Any, arrays: dict[str, Any]) -> Any:
    if isinstance(outline, list):
        return [_with_arrays(each, arrays) for each in outline]
    if not isinstance(outline, dict):
        return outline
    if _ARRAY in outline:
        return arrays[outline[_ARRAY]].copy()
    if _SCALAR in outline:
        return arrays[outline[_SCALAR]][()]
    return {key: _with_arrays(each, arrays) for key, each in outline.items()}
