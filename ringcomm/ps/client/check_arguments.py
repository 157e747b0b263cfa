"""Checks arguments that dense tables and hash tables have in common."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from ringcomm.ps.optim import SGD, Updater

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray


def label_of(kind: str, name: object) -> str:
    """Return how errors name a table, "table[w]". Raises TypeError if the name is no text."""
    if not isinstance(name, str):
        raise TypeError(f"{kind}: name must be a str, not {name!r}")
    return f"{kind}[{name}]"


def dtype_of(label: str, dtype: DTypeLike) -> np.dtype[Any]:
    """Return a table's dtype. Raises TypeError, ValueError."""
    try:
        kind = np.dtype(dtype)
    except TypeError:
        raise TypeError(f"{label}: dtype is {dtype}; it must be float32 or float64") from None
    if kind not in (np.float32, np.float64):
        raise ValueError(f"{label}: dtype is {kind}; it must be float32 or float64")
    return kind


def array_of(label: str, what: str, x: Any, dtype: np.dtype[Any] | None = None) -> NDArray[Any]:
    """Return an argument as an array. Raises TypeError."""
    try:
        return np.asarray(x, dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{label}: numpy cannot read {what}, a {type(x).__name__} ({error}). Pass an array; "
            "for a tensor of torch, x.detach().float().numpy()"
        ) from error


def initial_of(
    label: str, init: Any, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> NDArray[Any] | float:
    """Return the first values of a dense table, or the one of all. Raises TypeError, ValueError."""
    if isinstance(init, bool | str | bytes) or init is None or hasattr(init, "to_json"):
        raise TypeError(f"{label}: init is {init!r}; it must be a number, or an array")
    values = array_of(label, "init", init, dtype)
    if values.ndim == 0:
        return float(init)
    if values.shape != shape:
        raise ValueError(f"{label}: init has shape {values.shape}, the table {shape}")
    return values


def updater_of(label: str, updater: Updater | None) -> Updater:
    """Return a table's updater; SGD(0.01) if not given. Raises TypeError."""
    if updater is not None and not isinstance(updater, Updater):
        raise TypeError(f"{label}: updater must be of ringcomm.ps.optim, not {updater!r}")
    return SGD(0.01) if updater is None else updater


def require_weight(label: str, weight: float, *, may_be_0: bool) -> None:
    """Raise ValueError if a contribution cannot have this weight, NaN among others."""
    if not 0 <= weight <= sys.float_info.max or (weight == 0 and not may_be_0):
        least = "at least 0" if may_be_0 else "more than 0"
        raise ValueError(f"{label}: weight is {weight}; it must be {least}, and finite")


def factor_of(label: str, factor: float | None, *, may_be_nan: bool = False) -> float:
    """Return the factor of a round's mean; 0 for None. Raises ValueError, TypeError."""
    if factor is None:
        return 0.0
    # Clipping in torch makes the factor NaN if the norm is NaN.
    is_nan = may_be_nan and isinstance(factor, float) and math.isnan(factor)
    if not (is_nan or 0 <= factor <= sys.float_info.max):  # servers that fail end no round
        raise ValueError(f"{label}: factor is {factor!r}; it must be at least 0, and finite")
    return float(factor)


def require_out(
    label: str, out: object, dtype: np.dtype[Any], shape: tuple[int, ...], *, may_be_flat: bool
) -> None:
    """Raise TypeError or ValueError if values cannot be written to `out`."""
    if not isinstance(out, np.ndarray):
        raise TypeError(f"{label}: out must be a numpy array, not {out!r}")
    is_shape = out.shape == shape or (may_be_flat and out.shape == (math.prod(shape),))
    is_fit = out.dtype == dtype and is_shape and out.flags.c_contiguous and out.flags.writeable
    if not is_fit:
        raise ValueError(
            f"{label}: out must be contiguous and writeable, of {dtype} and shape {shape}"
            f"{', or flat' if may_be_flat else ''}, not {out.dtype} {out.shape}"
        )
