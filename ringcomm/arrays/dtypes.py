"""The element types that ringcomm reduces, in one table for all array libraries."""

from __future__ import annotations

from typing import NamedTuple


class DType(NamedTuple):
    name: str  # in numpy and torch
    itemsize: int
    kernel: int  # its number in csrc/kernels/dtype_and_op_codes.hpp

    @property
    def is_16bit_float(self) -> bool:
        """True for the types that are reduced in float32 and rounded once."""
        return self.name in ("float16", "bfloat16")

    @property
    def is_integer(self) -> bool:
        return "int" in self.name

    @property
    def is_complex(self) -> bool:
        return self.name.startswith("complex")

    @property
    def is_float(self) -> bool:
        return "float" in self.name

    def __str__(self) -> str:
        return self.name


_ITEMSIZES = {
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
    "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8,
    "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip

DTYPES: dict[str, DType] = {
    name: DType(name, itemsize, kernel)
    for kernel, (name, itemsize) in enumerate(_ITEMSIZES.items())
}
