"""Kernels of ringcomm/gpu/kernels/kernels.cu on the CPU: compiled by g++, run over a whole grid.

What stands there is executed as it is, but for the conversions of float16, which are the CPU's
(csrc/kernels/half.hpp). Threads run one after the other, so what would race is not seen here.
"""

import atexit
import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from ringcomm.gpu.kernels.base import BLOCK, source

HERE = Path(__file__).parent
FLAGS = [
    *("-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
    *(f"-I{HERE}", f"-I{HERE.parent / 'csrc' / 'kernels'}"),
]
LAUNCHER = """
extern "C" bool launch(unsigned grid, unsigned block, char* parameters, std::size_t nbytes) {
  return emulated::run(ringcomm::rc_entry, grid, block, parameters, nbytes);
}
"""
SHARED = "GPU_EMULATION_FOLDER"  # names where the processes of a run keep what is compiled
GUARD = 64  # bytes before and after an array


@cache
def folder():
    """Return where libraries are built: for this run of the tests, or for this process alone."""
    if SHARED in os.environ:
        return Path(os.environ[SHARED])
    own = Path(tempfile.mkdtemp(prefix="gpu-emulation-"))
    atexit.register(shutil.rmtree, own)
    return own


@cache
def build(defines, text):
    """Return the library of one kernel, which one process compiles for all."""
    compiler = shutil.which("g++")
    if compiler is None:
        import pytest  # which ranks of a job do without

        pytest.skip("no g++ here: kernels.cu is compiled for the CPU by the tests")
    name = hashlib.sha256("\0".join([text, *defines]).encode()).hexdigest()
    library, unit = folder() / f"{name}.so", folder() / f"{name}.cpp"
    with unit.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            unit.write_text(f'#include "gpu_emulation.hpp"\n{text}\n{LAUNCHER}')
            compile_library(compiler, defines, unit, library)
    return ctypes.CDLL(str(library))


def compile_library(compiler, defines, unit, library):
    unfinished = library.with_suffix(".new")
    command = [compiler, *FLAGS, *defines, unit, "-o", unfinished]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    unfinished.rename(library)


def launch(kernel, *, grid=3, text=None):
    """Run a kernel, which finds its parameters where C++ would lay them out.

    Args:
        kernel: of ringcomm.gpu.kernels.
        grid: number of blocks.
        text: of the source, if it is not that of the package.
    """
    library = build(kernel.defines, source() if text is None else text)
    packed = kernel.parameters.packed
    at, nbytes = ctypes.c_void_p(packed.ctypes.data), ctypes.c_size_t(packed.nbytes)
    library.launch.restype = ctypes.c_bool
    assert library.launch(grid, BLOCK, at, nbytes), f"{kernel} has parameters of another size"


class Memory:
    """Memory of a GPU: arrays at any distance from multiples of 16 bytes, with guards around them.

    Whoever writes to a guard is told of by check().
    """

    def __init__(self):
        self._guarded = []

    def place(self, values, shift=0):
        """Return a copy of an array that begins `shift` bytes after a multiple of 256.

        Views of arrays of bytes: their addresses need not suit their dtype to numpy.
        """
        raw = np.full(values.nbytes + 2 * GUARD + 512, 0xA5, np.uint8)
        start = -(raw.ctypes.data + GUARD) % 256 + GUARD + shift
        self._guarded.append((raw, start, start + values.nbytes))
        array = raw[start : start + values.nbytes].view(values.dtype)
        array[:] = values
        return array

    def check(self):
        """Fail if anything around the arrays has changed."""
        for raw, start, stop in self._guarded:
            assert (raw[:start] == 0xA5).all(), "written before an array"
            assert (raw[stop:] == 0xA5).all(), "written behind an array"


def addresses(arrays):
    """Return where arrays stand."""
    return tuple(array.ctypes.data for array in arrays)
