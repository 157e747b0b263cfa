"""The reduction operators, their dtypes, and the options of a reduction. Pure."""

from __future__ import annotations

import math
from enum import Enum
from typing import NamedTuple

from ringcomm.arrays.dtypes import DType


class Op(Enum):
    """A reduction operator: combines the values of all ranks into one.

    SUM and PRODUCT of integers wrap. AVERAGE is the sum divided by the number of ranks; that of
    integers does not wrap, and is truncated toward zero. For bool, SUM and MAX are "or", PRODUCT
    and MIN are "and". MIN and MAX return NaN if a value is NaN. 16-bit floats are reduced in
    float32 and rounded once.
    """

    SUM = "sum"
    AVERAGE = "average"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"

    __hash__ = object.__hash__  # Enum.__hash__ is Python code that hashes the name each time

    def __str__(self) -> str:
        return self.name

    @property
    def kernel(self) -> int:
        """The number of this operator in kernels (csrc/kernels/dtype_and_op_codes.hpp)."""
        return _KERNELS[self]

    def divisor(self, size: int) -> int:
        """Return the number by which the sum of `size` ranks' values is divided."""
        return size if self is Op.AVERAGE else 1

    def is_at_once(self, dtype: DType) -> bool:
        """Return True if all ranks' values of an element must be combined in one step.

        A partial result has more bits than the dtype: 16-bit floats would be rounded at each step,
        and the sum of an average of integers would wrap.
        """
        return dtype.is_16bit_float or (self is Op.AVERAGE and dtype.is_integer)

    def identity(self, dtype: DType) -> int | float | bool:
        """Return the value that changes no other; 0 for AVERAGE."""
        if self in (Op.MIN, Op.MAX):
            return _largest(dtype) if self is Op.MIN else _smallest(dtype)
        if self is Op.BAND:  # all bits are 1
            return _largest(dtype) if dtype.name[0] in "bu" else -1
        return 1 if self is Op.PRODUCT else 0

    def require(self, dtype: DType) -> None:
        """Raise TypeError if this operator has no meaning for `dtype`."""
        if self is Op.AVERAGE and dtype.name == "bool":
            raise TypeError("AVERAGE of bool has no meaning: cast, or pass op=rc.SUM (logical or)")
        if self in (Op.MIN, Op.MAX) and dtype.is_complex:
            raise TypeError(f"{self} of {dtype} has no meaning: complex numbers have no order")
        if self in (Op.BAND, Op.BOR, Op.BXOR) and (dtype.is_float or dtype.is_complex):
            raise TypeError(f"{self} of {dtype} has no meaning: it takes integers or bool")


def _largest(dtype: DType) -> int | float | bool:
    if dtype.name == "bool":
        return True
    is_signed = not dtype.name.startswith("u")
    return math.inf if dtype.is_float else (1 << (8 * dtype.itemsize - is_signed)) - 1


def _smallest(dtype: DType) -> int | float | bool:
    if dtype.is_float:
        return -math.inf
    return 0 if dtype.name[0] in "bu" else -(1 << (8 * dtype.itemsize - 1))


SUM, AVERAGE, MIN, MAX = Op.SUM, Op.AVERAGE, Op.MIN, Op.MAX
PRODUCT, BAND, BOR, BXOR = Op.PRODUCT, Op.BAND, Op.BOR, Op.BXOR
_KERNELS = {SUM: 0, AVERAGE: 0, PRODUCT: 1, MIN: 2, MAX: 3, BAND: 4, BOR: 5, BXOR: 6}


class ReductionOptions(NamedTuple):
    """The options of a reduction, the same on all ranks. A tuple: cheap to make for each call."""

    op: Op = SUM
    deterministic: bool = False  # reduce in rank order: the bits do not depend on the buffer size
    prescale: float = 1.0  # factor of each rank's values
    postscale: float = 1.0  # factor of the result

    def __str__(self) -> str:
        text = f"{self.op.name}, deterministic" if self.deterministic else self.op.name
        return f"{text}, {self.factors}" if self.is_scaled else text

    @property
    def is_scaled(self) -> bool:
        return self.prescale != 1.0 or self.postscale != 1.0

    @property
    def own_prescale(self) -> float:
        return self.prescale

    @property
    def factors(self) -> str:
        return f"prescale={self.prescale!r}, postscale={self.postscale!r}"

    def scaled(self, prescale: float, postscale: float) -> ReductionOptions:
        for each in (prescale, postscale):
            if isinstance(each, bool) or not hasattr(each, "__float__"):
                raise TypeError(f"prescale and postscale must be numbers, not {each!r}")
        return self._replace(prescale=float(prescale), postscale=float(postscale))

    def require(self, dtype: DType) -> None:
        self.op.require(dtype)
        if self.is_scaled and dtype.name == "bool":
            raise TypeError(
                f"{self.factors} has no meaning for bool: cast, or leave the factors out"
            )


class StandInOptions(ReductionOptions):
    """The options of a rank that gives identity elements, which no factor may change.

    They equal those of the other ranks, so that all agree, and load the same kernels on a GPU.
    """

    __slots__ = ()

    @property
    def own_prescale(self) -> float:
        return 1.0
