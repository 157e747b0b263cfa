"""The reduction operators, their dtypes, and the options of a reduction. Pure."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from ringcomm.arrays.dtypes import DType


class Op(Enum):
    """How the values of the ranks become one.

    Integer SUM and PRODUCT wrap. AVERAGE is the sum divided by the number of ranks, of integers
    truncated toward zero. For bool SUM and MAX are "or", PRODUCT and MIN are "and". NaN wins in MIN
    and MAX. 16-bit floats are reduced in float32 and rounded once.
    """

    SUM = "sum"
    AVERAGE = "average"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"

    __hash__ = object.__hash__  # Enum's own is Python code that hashes the name each time

    def __str__(self) -> str:
        return self.name

    @property
    def kernel(self) -> int:
        """Code of the reduction kernels (csrc/kernels/dtype.hpp)."""
        return _KERNELS[self]

    def divisor(self, size: int) -> int:
        """Return what the combination of `size` ranks' values is divided by at the end."""
        return size if self is Op.AVERAGE else 1

    def require(self, dtype: DType) -> None:
        """Raise TypeError where this operator has no meaning for `dtype`."""
        if self is Op.AVERAGE and dtype.name == "bool":
            raise TypeError("AVERAGE of bool has no meaning: pass op=rc.SUM (or), or cast")
        if self in (Op.MIN, Op.MAX) and dtype.is_complex:
            raise TypeError(f"{self} of {dtype} has no meaning: complex numbers have no order")
        if self in (Op.BAND, Op.BOR, Op.BXOR) and (dtype.is_float or dtype.is_complex):
            raise TypeError(f"{self} of {dtype} has no meaning: it takes integers or bool")


SUM, AVERAGE, MIN, MAX = Op.SUM, Op.AVERAGE, Op.MIN, Op.MAX
PRODUCT, BAND, BOR, BXOR = Op.PRODUCT, Op.BAND, Op.BOR, Op.BXOR
_KERNELS = {SUM: 0, AVERAGE: 0, PRODUCT: 1, MIN: 2, MAX: 3, BAND: 4, BOR: 5, BXOR: 6}


class ReductionOptions(NamedTuple):
    """How values are reduced, the same on all ranks. A tuple: it is made in each call."""

    op: Op = SUM
    deterministic: bool = False  # in rank order: the bits do not depend on the buffer's size
    prescale: float = 1.0  # factor of each rank's values
    postscale: float = 1.0  # factor of the result

    def __str__(self) -> str:
        text = f"{self.op.name}, deterministic" if self.deterministic else self.op.name
        return f"{text}, {self.factors}" if self.is_scaled else text

    @property
    def is_scaled(self) -> bool:
        """True if there are factors."""
        return self.prescale != 1.0 or self.postscale != 1.0

    @property
    def factors(self) -> str:
        """The factors as text."""
        return f"prescale={self.prescale!r}, postscale={self.postscale!r}"

    def scaled(self, prescale: float, postscale: float) -> ReductionOptions:
        """Return them with these factors. Raises TypeError for what is not a number."""
        for each in (prescale, postscale):
            if isinstance(each, bool) or not hasattr(each, "__float__"):
                raise TypeError(f"prescale and postscale must be numbers, not {each!r}")
        return self._replace(prescale=float(prescale), postscale=float(postscale))

    def require(self, dtype: DType) -> None:
        """Raise TypeError where the operator or a factor has no meaning."""
        self.op.require(dtype)
        if self.is_scaled and dtype.name == "bool":
            raise TypeError(
                f"{self.factors} has no meaning for bool: cast, or leave the factors out"
            )

    def carried_out(self, dtype: DType, size: int) -> tuple[Op, float]:
        """Return how the ranks reduce, and the factor of what comes of it.

        The average of integers times a factor is rounded once: sum * (factor / size).
        """
        is_integer = not (dtype.is_float or dtype.is_complex)
        if self.op is AVERAGE and is_integer and self.postscale != 1.0:
            return SUM, self.postscale / size
        return self.op, self.postscale
