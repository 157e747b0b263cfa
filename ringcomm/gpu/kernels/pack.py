"""The kernel that copies many arrays into one buffer, or out of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ringcomm.gpu.kernels.base import Argument, Kernel, address_table, number

TENSORS_PER_LAUNCH: Final = 480
CHUNK: Final = np.dtype([("tensor", "u4"), ("count", "u4"), ("start", "u8"), ("place", "u8")])
CHUNK_COUNT: Final = 8192  # elements; 25 MiB of float32 are 800 chunks, more than a GPU's blocks
_TYPES: Final = {2: "uint16_t", 4: "uint32_t", 8: "uint64_t", 16: "complex128_t"}  # by itemsize
PACKED_ITEMSIZES: Final = tuple(_TYPES)


@dataclass(frozen=True)
class PackKernel(Kernel):
    """Copies the elements of many tensors into one buffer, or out of it.

    The addresses of the tensors are parameters of the kernel, so new addresses of gradients in
    every step cost nothing. The chunk_table() stays on the GPU while the sizes stay the same.

    Attributes:
        tensors: addresses of the arrays that chunk_table() got, each a multiple of the itemsize.
        buffer: address of element 0. The buffer does not overlap the tensors.
        itemsize: bytes of an element, one of PACKED_ITEMSIZES.
        unpacks: copy from the buffer to the tensors; False: to the buffer.
        chunks: address of the table on the GPU.
        n_chunks: rows of the table.
    """

    tensors: tuple[int, ...]
    buffer: int
    itemsize: int
    unpacks: bool
    chunks: int
    n_chunks: int

    def __post_init__(self) -> None:
        n = len(self.tensors)
        if n > TENSORS_PER_LAUNCH:
            raise ValueError(f"{n} tensors; one launch packs at most {TENSORS_PER_LAUNCH}")

    def _macros(self) -> dict[str, object]:
        return {
            "KERNEL": "UNPACK" if self.unpacks else "PACK",
            "TYPE": _TYPES[self.itemsize],
            "TENSORS": TENSORS_PER_LAUNCH,
        }

    def _arguments(self) -> tuple[Argument, ...]:
        padding = (0,) * (TENSORS_PER_LAUNCH - len(self.tensors))
        numbers = (number("u8", self.chunks), number("u4", self.n_chunks))
        return (address_table(self.tensors + padding), *numbers, number("u8", self.buffer))

    def _n_blocks(self) -> int:
        return self.n_chunks


def chunk_table(counts: Sequence[int], places: Sequence[int]) -> NDArray[Any]:
    """Return the chunks that the blocks of a PackKernel copy, of dtype CHUNK.

    Args:
        counts: elements of each tensor.
        places: for each tensor, the element of the buffer at which it begins. Copies are fastest if
            tensors and places begin at multiples of 16 bytes.
    """
    rows = [
        (tensor, min(CHUNK_COUNT, count - start), start, place + start)
        for tensor, (count, place) in enumerate(zip(counts, places, strict=True))
        for start in range(0, count, CHUNK_COUNT)
    ]
    return np.array(rows, CHUNK)
