"""A pytest plugin with which the tests of the kernels launch them on the GPU.

tests/gpu/test_kernels.py places its arrays with gpu_emulation.Memory and launches kernels with
gpu_emulation.launch(). The plugin replaces both: arrays are in pinned host memory, which the GPU
can access. A test with arrays in other memory is skipped.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import cupy
import gpu_emulation
import numpy as np
import pytest
from gpu_emulation import GUARD

from ringcomm.gpu.device.driver import CudaDriver
from ringcomm.gpu.kernels.compiling import Kernels

_pinned: list[tuple[int, int]] = []  # begin and end


class Memory(gpu_emulation.Memory):
    """Arrays in pinned memory, which have the same addresses on the GPU."""

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


def launch(kernel, *, grid=3, text=None):
    """Run a kernel on the GPU, and wait for its end."""
    assert text is None, "faults are planted in the emulation alone"
    for address in _addresses(kernel._arguments()):
        if not any(begin <= address <= end for begin, end in _pinned):
            pytest.skip("its arrays are where the GPU does not reach them")
    on_grid = SimpleNamespace(
        defines=kernel.defines, parameters=kernel.parameters, grid=lambda _: grid
    )
    _kernels().launch(0, on_grid)
    cupy.cuda.runtime.deviceSynchronize()


def _addresses(arguments):
    tables = [a["at"].reshape(-1) for a in arguments if a.dtype.names == ("at",)]
    return [int(address) for table in tables for address in table if address]


@cache
def _kernels():
    return Kernels(0, CudaDriver())


gpu_emulation.Memory, gpu_emulation.launch = Memory, launch
