"""Compiles kernels for one GPU when they are first loaded, or takes them from the user's cache."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import cupy
from cupy.cuda import nvrtc

from ringcomm.config import kernel_folder
from ringcomm.errors import ConfigError
from ringcomm.gpu.device.driver import CudaDriver
from ringcomm.gpu.kernels.base import BLOCK, ENTRY, OPTIONS, Kernel, source
from ringcomm.gpu.kernels.kernel_cache import compiled_once

_CAPABILITY_MAJOR, _CAPABILITY_MINOR, _N_PROCESSORS = 75, 76, 16  # as cuda.h numbers them


class Kernels:
    """The compiled kernels of one GPU. Compiling one takes a fraction of a second, once per user.

    cupy.RawModule cannot compile them: it flushes denormal numbers to zero even if its options
    forbid that, and needs CUDA's headers, although kernels.cu includes none.
    """

    def __init__(self, index: int, driver: CudaDriver) -> None:
        self._driver = driver
        attribute = cupy.cuda.runtime.deviceGetAttribute
        self._capability = 10 * attribute(_CAPABILITY_MAJOR, index) + attribute(
            _CAPABILITY_MINOR, index
        )
        self._n_processors = attribute(_N_PROCESSORS, index)
        self._lock = threading.Lock()
        self._functions: dict[tuple[str, ...], int] = {}

    def launch(self, stream: int, kernel: Kernel) -> None:
        """Enqueue a kernel on a stream of the current GPU.

        Raises:
            ConfigError: the kernel cannot be compiled.
        """
        function = self._functions.get(kernel.defines) or self._compile(kernel.defines)
        grid, extra = kernel.grid(self._n_processors), kernel.parameters.extra
        self._driver.launch(function, grid, BLOCK, extra, stream)

    def load(self, kernel: Kernel) -> None:
        if not self.has_loaded(kernel):
            self._compile(kernel.defines)

    def has_loaded(self, kernel: Kernel) -> bool:
        return kernel.defines in self._functions

    def _compile(self, defines: tuple[str, ...]) -> int:
        with self._lock:
            if defines not in self._functions:
                code = compile_for(self._capability, defines)
                # With lazy loading, the default, the driver loads a function when it is asked for.
                self._functions[defines] = self._driver.load_function(code, ENTRY)
            return self._functions[defines]


def compile_for(capability: int, defines: Sequence[str]) -> bytes:
    """Return machine code for a GPU, or PTX if the GPU is newer than the compiler.

    Args:
        capability: compute capability of the GPU, 90 for 9.0.
        defines: compiler options of the kernel, Kernel.defines.

    Raises:
        ConfigError: the compiler reports an error.
    """
    known = nvrtc.getSupportedArchs()
    is_known = capability in known
    target = f"sm_{capability}" if is_known else f"compute_{max(known)}"
    options = (*OPTIONS, *defines, f"--gpu-architecture={target}")
    key = ("1", "NVRTC", *map(str, nvrtc.getVersion()), source(), *options)  # "1": of this format
    return compiled_once(kernel_folder(), key, lambda: _compile(options, is_known=is_known))


def _compile(options: Sequence[str], *, is_known: bool) -> bytes:
    program = nvrtc.createProgram(source(), "kernels.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        return bytes(nvrtc.getCUBIN(program) if is_known else nvrtc.getPTX(program))
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise ConfigError(
            f"a kernel cannot be compiled with {' '.join(options)}: {error}\n{log}"
        ) from error
    finally:
        nvrtc.destroyProgram(program)
