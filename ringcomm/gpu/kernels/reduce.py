"""The kernel that combines arrays of several ranks. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ringcomm.arrays.dtypes import DType
from ringcomm.collectives.operators import AVERAGE, BAND, BOR, BXOR, MAX, MIN, PRODUCT, SUM, Op
from ringcomm.gpu.kernels.base import BLOCK, Argument, Kernel, address_table, number, require_counts

_OPERATORS = {
    SUM: "Sum",
    AVERAGE: "Sum",
    PRODUCT: "Product",
    MIN: "Min",
    MAX: "Max",
    BAND: "BitAnd",
    BOR: "BitOr",
    BXOR: "BitXor",
}
OPERATORS_OF_BOOL = {
    SUM: "Either",
    MAX: "Either",
    PRODUCT: "Both",
    MIN: "Both",
    BAND: "Both",
    BOR: "Either",
    BXOR: "One",
}

_IN_FLIGHT = 8  # kInFlight in kernels.cu


@dataclass(frozen=True)
class ReduceKernel(Kernel):
    """targets[*][i] = round((sources[0][i] op sources[1][i] op ...) / divisor), for all i.

    16-bit floats are combined in float32 and rounded once; an average of integers, by as many as
    there are sources or more, does not wrap. The results have the bits of
    csrc/kernels. A single source is copied, but a 16-bit NaN becomes the canonical NaN, as on the
    CPU. There are at most 496 sources and targets.
    """

    sources: tuple[int, ...]  # addresses, in the order in which the sources are combined
    targets: tuple[int, ...]  # addresses; a target may be a source, but not overlap it in part
    count: int  # elements of each array
    dtype: DType
    op: Op  # AVERAGE means SUM, with a divisor
    divisor: int = 1  # below 2^32; 1 for bitwise operators and for bool
    result: DType | None = None  # of the targets, if not `dtype`: float32 of 16-bit floats, or back

    def __post_init__(self) -> None:
        self.op.require(self.dtype)
        if self.result is not None:
            pair = self.dtype, self.result
            if not any(a.is_16bit_float and b.name == "float32" for a, b in (pair, pair[::-1])):
                raise ValueError(f"{self.op} of {self.dtype} cannot be {self.result}")
        require_counts(self.sources, self.targets)
        if not 1 <= self.divisor < 1 << 32 or (self.divisor != 1 and not self._gives_numbers):
            raise ValueError(f"{self.op} of {self.dtype} cannot be divided by {self.divisor}")

    def _macros(self) -> dict[str, object]:
        operators = OPERATORS_OF_BOOL if self.dtype.name == "bool" else _OPERATORS
        return {
            "KERNEL": "REDUCE",
            "TYPE": self._type,
            "RESULT": f"{self.result.name}_t" if self.result else self._type,
            "OP": operators[self.op],
            "SOURCES": len(self.sources),
            "TARGETS": len(self.targets),
        }

    def _arguments(self) -> tuple[Argument, ...]:
        tables = address_table(self.sources), address_table(self.targets)
        return (*tables, number("u8", self.count), number("i8", self.divisor))

    def _n_blocks(self) -> int:
        positions = min(4, _IN_FLIGHT // min(_IN_FLIGHT, len(self.sources)))
        item = min(self.dtype.itemsize, (self.result or self.dtype).itemsize)
        return -(-self.count * item // (BLOCK * positions * 16))

    @property
    def _type(self) -> str:
        name = f"{self.dtype.name}_t"
        return f"Averaged<{name}>" if self._is_average_of_integers else name

    @property
    def _is_average_of_integers(self) -> bool:
        is_sum = self.op in (SUM, AVERAGE) and len(self.sources) > 1
        return is_sum and self.divisor >= len(self.sources) and self.dtype.is_integer

    @property
    def _gives_numbers(self) -> bool:
        return self.dtype.name != "bool" and self.op not in (BAND, BOR, BXOR)
