"""Checks arguments that dense tables and hash tables have in common."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ringcomm.ps.optim import SGD, Updater
from ringcomm.ps.segments import MOST
from ringcomm.ps.table_spec import Part

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike, NDArray

    from ringcomm.ps.table_spec import Spec

_BLOCKS_MAX: Final = 1 << 20  # every rank has a list of them


def label_of(kind: str, name: object) -> str:
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
    if hasattr(x, "mask"):  # of numpy.ma, whose import takes 20 ms
        raise TypeError(f"{label}: {what} is a masked array, whose mask is lost. Use .filled()")
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


def require_numbers(label: str, values: NDArray[Any] | float) -> None:
    """Raise ValueError if first values are NaN, which no update changes into a number."""
    flat = np.ravel(values)
    if flat.size and math.isnan(flat.min()):  # one pass, without an array as large
        places = np.flatnonzero(np.isnan(flat))
        raise ValueError(
            f"{label}: init is NaN in {len(places)} of {flat.size} elements, first in element "
            f"{places[0]}, and no update makes a number of that. Was it read from a file, or not "
            "written yet, as np.empty()? Only a table with ps.optim.Assign() may begin so"
        )


def updater_of(label: str, updater: Updater | None) -> Updater:
    if updater is not None and not isinstance(updater, Updater):
        raise TypeError(f"{label}: updater must be of ringcomm.ps.optim, not {updater!r}")
    return SGD(0.01) if updater is None else updater


def require_weight(label: str, weight: float, *, may_be_0: bool) -> None:
    if not isinstance(weight, int | float | np.number):
        raise TypeError(f"{label}: weight is {weight!r}; it must be a number")
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
    if not isinstance(out, np.ndarray):
        raise TypeError(f"{label}: out must be a numpy array, not {out!r}")
    is_shape = out.shape == shape or (may_be_flat and out.shape == (math.prod(shape),))
    is_fit = out.dtype == dtype and is_shape and out.flags.c_contiguous and out.flags.writeable
    if not is_fit:
        raise ValueError(
            f"{label}: out must be contiguous and writeable, of {dtype} and shape {shape}"
            f"{', or flat' if may_be_flat else ''}, not {out.dtype} {out.shape}"
        )


def is_16bit(dtype: np.dtype[Any]) -> bool:
    """Return True for float16 and bfloat16, of this machine's byte order."""
    return dtype == np.float16 or dtype.name == "bfloat16"


def flat_of(x: ArrayLike, count: int, spec: Spec, dtype: np.dtype[Any]) -> NDArray[Any]:
    if type(x) is not np.ndarray:
        x = array_of(f"push[{spec.name}]", "x", x, dtype if isinstance(x, tuple) else None)
    is_whole = count == spec.count and x.shape == spec.shape
    if not is_whole and x.shape != (count,):
        raise ValueError(
            f"push[{spec.name}]: {x.size} elements, shape {x.shape}, for {count} of a table of "
            f"shape {spec.shape}: pass that shape, or flat"
        )
    if x.dtype != dtype and not is_16bit(x.dtype):
        raise TypeError(
            f"push[{spec.name}]: dtype {x.dtype}, and the table has {dtype}. Convert it"
        )
    return x.reshape(-1) if x.flags.c_contiguous else np.ascontiguousarray(x).reshape(-1)


def block_of(label: str, block_nbytes: int, itemsize: int, count: int) -> int:
    """Return the most elements of a block."""
    if operator.index(block_nbytes) < itemsize:
        raise ValueError(f"{label}: block_nbytes is {block_nbytes}, less than one element")
    block = operator.index(block_nbytes) // itemsize
    if count > block * _BLOCKS_MAX:
        raise ValueError(
            f"{label}: {count} elements are more than {_BLOCKS_MAX} blocks of block_nbytes="
            f"{block_nbytes}. Pass a larger block_nbytes, or a smaller shape"
        )
    return block


def require_segments(label: str, segments: Sequence[int], count: int) -> None:
    """Raise ValueError unless these are the first elements of parts of a table."""
    if len(segments) > MOST:
        raise ValueError(f"{label}: {len(segments)} segments; {MOST} are the most")
    bounds = [*segments, count] if len(segments) else [0]
    if bounds[0] != 0 or any(a > b for a, b in pairwise(bounds)):
        raise ValueError(
            f"{label}: segments are {list(segments)[:10]}; they must begin with 0, ascend, "
            f"and lie within {count} elements"
        )


def require_parts(label: str, parts: Sequence[Part]) -> None:
    if not (isinstance(parts, Sequence) and all(isinstance(each, Part) for each in parts)):
        raise TypeError(f"{label}: parts must be a list of {Part.__qualname__}, not {parts!r}")
