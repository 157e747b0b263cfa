"""The kernels that encode floats as a byte each, and decode them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from ringcomm.arrays.dtypes import DType
from ringcomm.gpu.kernels.kernel import (
    BLOCK,
    COMPUTED,
    TYPES,
    Arguments,
    Kernel,
    number,
    require_dtype,
)

Code = Literal["Int8", "E4M3"]
CODEC_BLOCKS: Final = (32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class QuantiseKernel(Kernel):
    """Encodes floats as a byte each and a scale per block; tests/gpu_codecs.py says how."""

    dtype: DType  # float16, bfloat16 or float32; of what is encoded
    code: Code  # of a byte
    block: int = 256  # elements that share a scale, one of CODEC_BLOCKS

    def __post_init__(self) -> None:
        require_dtype(self.dtype, COMPUTED)
        _require_block(self.block)

    def _values(self) -> dict[str, object]:
        dtype = TYPES[self.dtype.name]
        return {"KERNEL": "QUANTISE", "TYPE": dtype, "CODE": self.code, "BLOCK": self.block}

    def _elements_per_block(self) -> int:
        return BLOCK // 32 * max(256, self.block)

    def pack_arguments(
        self,
        x: int,
        *,
        residual: int,
        scales: int,
        codes: int,
        count: int,
        seed: int = 0,
        draw: int = 0,
    ) -> Arguments:
        """Return the arguments of a launch, with addresses of `count` elements.

        Args:
            x: is encoded, and only read.
            residual: float32, which are added to x, and get what was dropped; 0: there are none.
            scales: a float32 per block goes there; a multiple of 4.
            codes: a byte per element goes there.
            seed, draw: of the random numbers of "Int8", as for ringcomm.codec.Int8.
        """
        numbers = (x, residual, scales, codes, count, seed, draw)
        return tuple(number("u8", each) for each in numbers)


@dataclass(frozen=True)
class DequantiseKernel(Kernel):
    """Decodes what a QuantiseKernel wrote."""

    dtype: DType  # float16, bfloat16 or float32; of the result
    code: Code  # as it was encoded
    block: int = 256  # as it was encoded
    accumulates: bool = False  # adds to what is there, in float32, rounded once

    def __post_init__(self) -> None:
        require_dtype(self.dtype, COMPUTED)
        _require_block(self.block)

    def _values(self) -> dict[str, object]:
        return {
            "KERNEL": "DEQUANTISE",
            "TYPE": TYPES[self.dtype.name],
            "CODE": self.code,
            "BLOCK": self.block,
            "ACCUMULATE": int(self.accumulates),
        }

    def _elements_per_block(self) -> int:
        return BLOCK * 4

    def pack_arguments(self, *, scales: int, codes: int, out: int, count: int) -> Arguments:
        """Return the arguments of a launch; addresses and count as for QuantiseKernel."""
        return tuple(number("u8", each) for each in (scales, codes, out, count))


def _require_block(block: int) -> None:
    if block not in CODEC_BLOCKS:
        raise ValueError(f"a GPU encodes blocks of {CODEC_BLOCKS} elements, not {block}")
