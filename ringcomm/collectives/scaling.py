"""Factors by which values are multiplied before and after they are reduced. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringcomm._core import StandardFloats
from ringcomm.arrays.base import Flat
from ringcomm.arrays.dtypes import DType
from ringcomm.collectives.op import AVERAGE, SUM, Op


@dataclass(frozen=True)
class Scaling:
    """Factors of a reduction.

    Attributes:
        before: factor of each rank's values.
        after: factor of the result.
    """

    before: float = 1.0
    after: float = 1.0

    def __bool__(self) -> bool:
        return (self.before, self.after) != (1.0, 1.0)

    def __str__(self) -> str:
        return f"prescale={self.before!r}, postscale={self.after!r}"

    @classmethod
    def of(cls, prescale: float, postscale: float) -> Scaling:
        """Return it. Raises TypeError for what is no number."""
        for each in (prescale, postscale):
            if isinstance(each, bool) or not hasattr(each, "__float__"):
                raise TypeError(f"prescale and postscale must be numbers, not {each!r}")
        return cls(float(prescale), float(postscale))

    def require(self, dtype: DType) -> None:
        """Raise TypeError where a factor has no meaning."""
        if self and dtype.name == "bool":
            raise TypeError(f"{self} has no meaning for bool: cast, or leave the factors out")

    def on_the_wire(self, op: Op, dtype: DType, size: int) -> tuple[Op, float]:
        """Return how to reduce, and the factor of what comes of it.

        The average of integers times a factor is rounded once: sum * (factor / size).
        """
        is_integer = not (dtype.is_float or dtype.is_complex)
        if op is AVERAGE and is_integer and self.after != 1.0:
            return SUM, self.after / size
        return op, self.after


def scale(x: Flat, factor: float) -> None:
    """Multiply each element in place.

    16-bit floats are multiplied in float32 and rounded once, integers in float64 and truncated
    toward zero.
    """
    if factor == 1.0 or x.count == 0:
        return
    with StandardFloats(), np.errstate(invalid="ignore", over="ignore"):  # NaN is a result, too
        _scale(x, factor)


def _scale(x: Flat, factor: float) -> None:
    if x.dtype.name == "bfloat16":
        _scale_bfloat16(x.bytes.view(np.uint16), factor)
        return
    values = x.bytes.view(x.dtype.name)
    if x.dtype.name == "float16":
        values[:] = values.astype(np.float32) * np.float32(factor)
    elif x.dtype.is_float or x.dtype.is_complex:
        values *= values.dtype.type(factor)
    else:
        values[:] = np.trunc(values.astype(np.float64) * factor).astype(values.dtype)


def _scale_bfloat16(bits: NDArray[np.uint16], factor: float) -> None:
    bits[:] = to_bfloat16(from_bfloat16(bits) * np.float32(factor))


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the values that stand in the upper halves of float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the nearest values of 16 bits, ties to even."""
    raw = values.view(np.uint32)
    rounded = (raw + 0x7FFF + ((raw >> 16) & 1)) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)
