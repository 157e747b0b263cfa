"""Multiplies values by a factor, before or after they are reduced. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ringcomm._core import DefaultFpEnvironment
from ringcomm.arrays.base import Flat


def scale(x: Flat, factor: float) -> None:
    """Multiply each element by a factor, in place.

    16-bit floats are multiplied in float32 and rounded once. Integers are multiplied in float64 and
    truncated toward zero.
    """
    if factor == 1.0 or x.count == 0:
        return
    with DefaultFpEnvironment(), np.errstate(invalid="ignore", over="ignore"):  # NaN is valid
        _scale(x, factor)


def _scale(x: Flat, factor: float) -> None:
    if x.dtype.name == "bfloat16":
        bits = x.bytes.view(np.uint16)
        bits[:] = to_bfloat16(from_bfloat16(bits) * np.float32(factor))
        return
    values = x.bytes.view(x.dtype.name)
    if x.dtype.name == "float16":
        values[:] = values.astype(np.float32) * np.float32(factor)
    elif x.dtype.is_float or x.dtype.is_complex:
        values *= values.dtype.type(factor)
    else:
        values[:] = np.trunc(values.astype(np.float64) * factor).astype(values.dtype)


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the bits of the nearest bfloat16 values, ties to even."""
    raw = values.view(np.uint32)
    rounded = (raw + 0x7FFF + ((raw >> 16) & 1)) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)
