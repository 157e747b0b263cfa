"""The element types of the contract: one table for every array library."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DType:
    """An element type.

    Attributes:
        name: as numpy and torch call it.
        itemsize: bytes per element.
        kernel: code of the reduction kernels (csrc/kernels/dtype.hpp), None where there is none.
    """

    name: str
    itemsize: int
    kernel: int | None = None

    @property
    def is_16bit_float(self) -> bool:
        """True for the types that are summed in float32 and rounded once."""
        return self.name in ("float16", "bfloat16")

    def __str__(self) -> str:
        return self.name


DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType("float16", 2, 0),
        DType("bfloat16", 2, 1),
        DType("float32", 4, 2),
        DType("float64", 8, 3),
        DType("int32", 4, 4),
        DType("int64", 8, 5),
        DType("int8", 1),
        DType("int16", 2),
        DType("uint8", 1),
        DType("uint16", 2),
        DType("uint32", 4),
        DType("uint64", 8),
        DType("bool", 1),
        DType("complex64", 8),
        DType("complex128", 16),
    )
}
