"""The reduction operators, and the dtypes they are defined for."""

from __future__ import annotations

from enum import Enum

from ringcomm import _core
from ringcomm.arrays.base import Flat
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

    def __str__(self) -> str:
        return self.name

    @property
    def kernel(self) -> int:
        """Code of the reduction kernels (csrc/kernels/dtype.hpp)."""
        return _KERNELS[self]

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


def combine(total: Flat, x: Flat, op: Op) -> None:
    """Set total to total op x, element by element. Not for 16-bit floats."""
    _core.combine(total.bytes, x.bytes, total.dtype.kernel, op.kernel)


def finish(total: Flat, op: Op, size: int) -> None:
    """Turn a sum into what `op` asks for, at the one owner of each element."""
    if op is AVERAGE:
        _core.divide(total.bytes, size, total.dtype.kernel)


def combine_all(out: Flat, sources: list[Flat], op: Op) -> None:
    """Set out to ((sources[0] op sources[1]) op ...), finished; out may be one of the sources.

    The order is that of the list: the same bits whatever the size of the buffers.
    """
    divisor = len(sources) if op is AVERAGE else 1
    raw = [source.bytes for source in sources]
    _core.reduce_many([out.bytes], raw, out.dtype.kernel, op.kernel, divisor)
