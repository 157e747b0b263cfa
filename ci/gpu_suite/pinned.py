"""A plugin of pytest: tests of the kernels run them on the GPU, in host memory that it reaches.

tests/gpu/test_kernels.py places its arrays by gpu_emulation.Memory and runs kernels by
gpu_emulation.launch(); here both are the GPU's. What a test has placed elsewhere is skipped.
"""

from __future__ import annotations

from functools import cache

import cupy
import gpu_emulation
import numpy as np
import pytest
from gpu_emulation import GUARD

from ringcomm.gpu.kernels.compiling import Kernels

_pinned: list[tuple[int, int]] = []  # begin and end


class Memory(gpu_emulation.Memory):
    """Arrays in pinned memory: by unified addressing they stand at the same place for the GPU."""

    def place(self, values, shift=0):
        nbytes = values.nbytes + 2 * GUARD + 512
        raw = np.frombuffer(cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)
        raw[:] = 0xA5
        _pinned.append((raw.ctypes.data, raw.ctypes.data + nbytes))
        start = -(raw.ctypes.data + GUARD) % 256 + GUARD + shift
        self._guarded.append((raw, start, start + values.nbytes))
        array = raw[start : start + values.nbytes].view(values.dtype)
        array[:] = values
        return array


def launch(kernel, arguments, *, grid=3, text=None):
    """Run a kernel on the GPU, to its end."""
    assert text is None, "faults are planted in the emulation alone"
    for address in _addresses(arguments):
        if not any(begin <= address <= end for begin, end in _pinned):
            pytest.skip("its arrays are where the GPU does not reach them")
    _kernels().launch(0, kernel, arguments, grid * kernel.per_block)
    cupy.cuda.runtime.deviceSynchronize()


def _addresses(arguments):
    tables = [a["at"].reshape(-1) for a in arguments if a.dtype.names == ("at",)]
    return [int(address) for table in tables for address in table if address]


@cache
def _kernels():
    return Kernels(0)


gpu_emulation.Memory, gpu_emulation.launch = Memory, launch
