"""The reduction operators, and the dtypes they are defined for."""

from __future__ import annotations

from enum import Enum

from ringcomm.arrays.dtypes import DTYPES, DType


class Op(Enum):
    """How the values of the ranks become one."""

    SUM = "sum"
    AVERAGE = "average"

    def __str__(self) -> str:
        return self.name

    def require(self, dtype: DType) -> None:
        """Raise TypeError where this operator has no meaning, or no kernel, for `dtype`."""
        if dtype.kernel is None:
            known = ", ".join(d.name for d in DTYPES.values() if d.kernel is not None)
            raise TypeError(f"{self} of {dtype} is not available; known: {known}")


SUM, AVERAGE = Op.SUM, Op.AVERAGE
