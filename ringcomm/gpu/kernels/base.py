"""The base of the kernels of kernels.cu. Pure.

compiling.py compiles source() with OPTIONS and a kernel's defines. The compiled function is named
ENTRY. To launch it:

    kernel = ReduceKernel(sources, targets, count, DTYPES["float32"], SUM)
    driver.launch(function, kernel.grid(n_processors), BLOCK, kernel.parameters, stream)

The parameters are numbers and structs, which lie in one buffer as CUDA lays them out. Addresses are
ints, as the GPU sees them.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

# No product is fused with a sum, and quotients and roots are rounded as IEEE 754 says. Without the
# option on execution spaces, the NVRTC of CUDA 12 treats a kernel's lambdas as host functions.
OPTIONS: Final = (
    *("--std=c++17", "--device-as-default-execution-space"),
    *("--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"),
)
ENTRY: Final = "rc_entry"
BLOCK: Final = 256  # threads per block of a grid

Argument = NDArray[Any]

# Every driver and GPU allows 4 KiB of kernel parameters; 32 KiB need CUDA 12.1 and sm_70.
_MOST_PARAMETER_NBYTES = 4096
_BUFFER, _BUFFER_SIZE, _END = 1, 2, 0  # as cuda.h numbers them
_BLOCKS_PER_PROCESSOR = 4  # 1024 threads, each with 64 to 128 bytes in flight


def source() -> str:
    return (files("ringcomm.gpu.kernels") / "kernels.cu").read_text(encoding="utf-8")


class Parameters:
    """The parameters of one launch in one buffer, each at a multiple of its alignment.

    Attributes:
        packed: the buffer.
        extra: address of the list by which the driver finds the buffer; see cuLaunchKernel().
    """

    def __init__(self, each: Sequence[Argument]) -> None:
        end, places = 0, []
        for argument in each:
            alignment = _alignment_of(argument.dtype)
            places.append(-(-end // alignment) * alignment)
            end = places[-1] + argument.nbytes
        self.packed = np.zeros(end, np.uint8)
        for at, argument in zip(places, each, strict=True):
            self.packed[at : at + argument.nbytes] = argument.view(np.uint8)
        self._size = np.array([end], np.uint64)
        pointer, size = self.packed.ctypes.data, self._size.ctypes.data
        self._list = np.array([_BUFFER, pointer, _BUFFER_SIZE, size, _END], np.uint64)
        self.extra: int = self._list.ctypes.data


def _alignment_of(dtype: np.dtype[Any]) -> int:
    fields = dtype.fields
    if fields is None:
        return dtype.base.alignment
    return max(_alignment_of(field) for field, *_ in fields.values())


class Kernel(ABC):
    """A kernel with the arguments of one launch."""

    @functools.cached_property
    def defines(self) -> tuple[str, ...]:
        return tuple(f"-DRC_{name}={value}" for name, value in self._macros().items())

    @functools.cached_property
    def parameters(self) -> Parameters:
        return Parameters(self._arguments())

    def grid(self, n_processors: int) -> int:
        return max(1, min(self._most_blocks, n_processors * _BLOCKS_PER_PROCESSOR))

    @functools.cached_property
    def _most_blocks(self) -> int:
        return self._n_blocks()

    @abstractmethod
    def _macros(self) -> dict[str, object]:
        """Return the macros of kernels.cu, without the prefix RC_."""

    @abstractmethod
    def _arguments(self) -> tuple[Argument, ...]:
        """Return the parameters, each as an array of one element."""

    @abstractmethod
    def _n_blocks(self) -> int: ...


def number(dtype: str, value: float) -> Argument:
    return np.array([value], dtype)


def address_table(addresses: Sequence[int]) -> Argument:
    return np.array([(tuple(addresses),)], np.dtype([("at", "u8", (len(addresses),))]))


def require_counts(sources: Sequence[int], targets: Sequence[int]) -> None:
    n_sources, n_targets = len(sources), len(targets)
    nbytes = 8 * (n_sources + n_targets) + 128  # for the other parameters
    if min(n_sources, n_targets) < 1 or nbytes > _MOST_PARAMETER_NBYTES:
        raise ValueError(f"a kernel cannot have {n_sources} sources and {n_targets} targets")
