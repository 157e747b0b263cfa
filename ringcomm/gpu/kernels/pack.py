"""The kernel that copies many arrays into one buffer, or out of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ringcomm.arrays.dtypes import DType
from ringcomm.gpu.kernels.kernel import (
    TYPES,
    Arguments,
    Kernel,
    address_table,
    number,
    require_dtype,
)

TENSORS_PER_LAUNCH: Final = 480
CHUNK: Final = np.dtype([("tensor", "u4"), ("count", "u4"), ("start", "u8"), ("place", "u8")])
CHUNK_COUNT: Final = 8192  # of elements: 25 MiB of float32 are 800 chunks, more than a GPU's blocks
PACKED = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class PackKernel(Kernel):
    """Copies many tensors into one buffer, or out of it; scaled and cast on the way.

    Where a scale or a cast is asked for, elements are computed in float32, or in float64 if either
    dtype is float64, and rounded once; a NaN becomes the canonical one. Else the bits are copied.

    The addresses of the tensors are parameters of the kernel, at most TENSORS_PER_LAUNCH: other
    gradients at every step cost no copy to the GPU. What stays, chunk_table(), lies there.
    """

    source: DType  # float16, bfloat16, float32 or float64; of what is read
    target: DType  # likewise; of what is written
    unpacks: bool = False  # from the buffer to the tensors

    def __post_init__(self) -> None:
        require_dtype(self.source, PACKED)
        require_dtype(self.target, PACKED)

    def _values(self) -> dict[str, object]:
        return {
            "KERNEL": "UNPACK" if self.unpacks else "PACK",
            "SOURCE": TYPES[self.source.name],
            "TARGET": TYPES[self.target.name],
            "TENSORS": TENSORS_PER_LAUNCH,
        }

    def _elements_per_block(self) -> int:
        return 1

    def pack_arguments(
        self,
        tensors: Sequence[int],
        buffer: int,
        *,
        chunks: int,
        n_chunks: int,
        scale: float = 1.0,
    ) -> Arguments:
        """Return the arguments of a launch.

        Args:
            tensors: addresses, as many as for chunk_table(), at any multiple of the itemsize.
            buffer: address of its element 0; apart from the tensors.
            chunks: address of the table on the GPU.
            scale: rounded to float32.
        """
        if len(tensors) > TENSORS_PER_LAUNCH:
            raise ValueError(f"{len(tensors)} tensors; one launch takes {TENSORS_PER_LAUNCH}")
        padded = [*tensors, *[0] * (TENSORS_PER_LAUNCH - len(tensors))]
        table = address_table(padded, TENSORS_PER_LAUNCH)
        numbers = (number("u8", chunks), number("u4", n_chunks), number("u8", buffer))
        return (table, *numbers, number("f4", scale))


def chunk_table(counts: Sequence[int], places: Sequence[int]) -> NDArray[Any]:
    """Return what the blocks of a PackKernel move, of dtype CHUNK; the GPU needs a copy of it.

    Args:
        counts: elements of each tensor.
        places: of the buffer: where each tensor begins. Moved fastest from multiples of 8 on.
    """
    rows = [
        (tensor, min(CHUNK_COUNT, count - start), start, place + start)
        for tensor, (count, place) in enumerate(zip(counts, places, strict=True))
        for start in range(0, count, CHUNK_COUNT)
    ]
    return np.array(rows, CHUNK)
