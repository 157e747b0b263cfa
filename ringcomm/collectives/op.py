"""The reduction operators, and the dtypes they are defined for."""

from __future__ import annotations

from enum import Enum

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
