"""A kernel of kernels.cu: how it is compiled, and how it is launched. Pure.

It is compiled from source() with OPTIONS and its defines, by compiling.py; its name is ENTRY. To
launch one:

    kernel = ReduceKernel(DTYPES["float32"], SUM, n_sources=4, n_targets=4)
    arguments = kernel.pack_arguments(sources, targets, hi=count)
    grid = kernel.grid(count, n_processors)
    module.get_function(ENTRY)((grid,), (BLOCK,), arguments)

Every argument is an array of one element, which CuPy passes by value, whatever its dtype is: a
number, or a struct. Addresses are those of the GPU, as int.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ringcomm.arrays.dtypes import DType

# No product is fused with a sum, and quotients and roots are rounded as IEEE 754 says. The NVRTC of
# CUDA 12 takes the lambdas of a kernel for host functions without the option on execution spaces.
OPTIONS: Final = (
    *("--std=c++17", "--device-as-default-execution-space"),
    *("--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"),
)
ENTRY: Final = "rc_entry"
BLOCK: Final = 256  # threads per block of a grid

Argument = NDArray[Any]
Arguments = tuple[Argument, ...]

# Kernel parameters take 4 KiB with every driver and GPU; 32 KiB need CUDA 12.1 and sm_70.
_MOST_PARAMETER_NBYTES = 4096

TYPES = {
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "uint64": "u64",
    "bool": "b1",
    "complex64": "c64",
    "complex128": "c128",
}
COMPUTED = ("float16", "bfloat16", "float32")  # in float32
_BLOCKS_PER_PROCESSOR = 4  # 1024 threads, each with 64 to 128 bytes in flight


def source() -> str:
    """Return the text of kernels.cu."""
    from importlib.resources import files

    return (files("ringcomm.gpu.kernels") / "kernels.cu").read_text(encoding="utf-8")


class Kernel(ABC):
    """One kernel, as it is compiled."""

    @property
    def defines(self) -> tuple[str, ...]:
        """Options of the compiler that select this kernel; kernels with the same are the same."""
        return tuple(f"-DRC_{name}={value}" for name, value in self._values().items())

    @abstractmethod
    def _values(self) -> dict[str, object]: ...  # of the macros of kernels.cu

    @property
    def per_block(self) -> int:
        """Elements (PackKernel: chunks) that one block handles at a time."""
        return self._elements_per_block()

    @abstractmethod
    def _elements_per_block(self) -> int: ...

    def grid(self, n_elements: int, n_processors: int) -> int:
        """Return how many blocks to launch for as many elements (PackKernel: chunks)."""
        needed = -(-n_elements // self.per_block)
        return max(1, min(needed, n_processors * _BLOCKS_PER_PROCESSOR))


def number(dtype: str, value: float) -> Argument:
    """Return one number as an argument."""
    return np.array([value], dtype)


def address_table(addresses: Sequence[int], n: int) -> Argument:
    """Return addresses as one argument."""
    if len(addresses) != n:
        raise ValueError(f"{len(addresses)} addresses for a kernel of {n}")
    return np.array([(tuple(addresses),)], np.dtype([("at", "u8", (n,))]))


def require_counts(n_sources: int, n_targets: int) -> None:
    """Raise ValueError unless their addresses fit among the parameters of a kernel."""
    nbytes = 8 * (n_sources + n_targets) + 128  # what else the kernels take
    if min(n_sources, n_targets) < 1 or nbytes > _MOST_PARAMETER_NBYTES:
        raise ValueError(f"no kernel has {n_sources} sources and {n_targets} targets")


def require_dtype(dtype: DType, known: Sequence[str]) -> None:
    """Raise TypeError unless a kernel knows this dtype."""
    if dtype.name not in known:
        raise TypeError(f"this kernel takes {', '.join(known)}, not {dtype}")
