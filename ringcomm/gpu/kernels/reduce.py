"""The kernel that combines arrays of several ranks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringcomm.arrays.dtypes import DType
from ringcomm.collectives.op import AVERAGE, BAND, BOR, BXOR, MAX, MIN, PRODUCT, SUM, Op
from ringcomm.gpu.kernels.kernel import (
    BLOCK,
    TYPES,
    Arguments,
    Kernel,
    address_table,
    number,
    require_counts,
)

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
    """Combines elements of some arrays in their order, and stores the result in others.

    The arithmetic is that of csrc/kernels, bit for bit. With one source it copies; but a NaN of 16
    bits becomes the canonical one, as on the CPU.
    """

    dtype: DType  # of all arrays
    op: Op  # AVERAGE is SUM here, with a divisor
    n_sources: int  # 1 or more
    n_targets: int  # 1 or more; together at most 496

    def __post_init__(self) -> None:
        self.op.require(self.dtype)
        require_counts(self.n_sources, self.n_targets)

    def _values(self) -> dict[str, object]:
        operators = OPERATORS_OF_BOOL if self.dtype.name == "bool" else _OPERATORS
        return {
            "KERNEL": "REDUCE",
            "TYPE": TYPES[self.dtype.name],
            "OP": operators[self.op],
            "SOURCES": self.n_sources,
            "TARGETS": self.n_targets,
        }

    def _elements_per_block(self) -> int:
        positions = min(4, _IN_FLIGHT // min(_IN_FLIGHT, self.n_sources))
        return BLOCK * positions * 16 // self.dtype.itemsize

    def pack_arguments(
        self,
        sources: Sequence[int],
        targets: Sequence[int],
        *,
        hi: int,
        lo: int = 0,
        divisor: int = 1,
    ) -> Arguments:
        """Return the arguments of a launch for elements [lo, hi).

        Args:
            sources: addresses of element 0 of each, in the order in which they are combined.
            targets: likewise. One may be a source; else they do not overlap.
            divisor: of the combination; 1 where op gives bits, and for bool.
        """
        if divisor < 1 or (divisor != 1 and not self._gives_numbers):
            raise ValueError(f"{self.op} of {self.dtype} cannot be divided by {divisor}")
        addresses = (address_table(sources, self.n_sources), address_table(targets, self.n_targets))
        return (*addresses, number("u8", lo), number("u8", hi), number("i8", divisor))

    @property
    def _gives_numbers(self) -> bool:
        return self.dtype.name != "bool" and self.op not in (BAND, BOR, BXOR)
