"""The kernel that multiplies an array by a factor. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ringcomm.arrays.dtypes import DType
from ringcomm.gpu.kernels.base import BLOCK, Argument, Kernel, number

_POSITIONS = 4  # kInFlight / 2 in kernels.cu


@dataclass(frozen=True)
class ScaleKernel(Kernel):
    """x[i] *= factor, in place, with the bits of collectives/scale_factors.py."""

    x: int  # address
    count: int  # elements
    dtype: DType  # see can_scale()
    factor: float

    def _macros(self) -> dict[str, object]:
        return {"KERNEL": "SCALE", "TYPE": f"{self.dtype.name}_t"}

    def _arguments(self) -> tuple[Argument, ...]:
        return number("u8", self.x), number("u8", self.count), number("f8", self.factor)

    def _n_blocks(self) -> int:
        return -(-self.count * self.dtype.itemsize // (BLOCK * _POSITIONS * 16))


def can_scale(dtype: DType) -> bool:
    """Return True for real floats: of others, a GPU would give other results than a CPU."""
    return dtype.is_float
