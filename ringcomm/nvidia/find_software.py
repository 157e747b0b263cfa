"""Looks for NVIDIA's driver, cupy and NCCL; judge_software.py judges the facts that it finds."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, Final, TypeVar

from ringcomm.config import environment
from ringcomm.nvidia.judge_software import (
    CUPY_WHEELS,
    NCCL_WHEELS,
    OLDEST_CUDA,
    Cupy,
    Driver,
    Gpu,
    Nccl,
    Stack,
    nccl_paths,
)
from ringcomm.system_text import read_text

R = TypeVar("R")
_LIBRARY = "libcuda.so.1"
_KERNEL_MODULE = Path("/proc/driver/nvidia/version")
_MAPS = Path("/proc/self/maps")
_CAPABILITY: Final = (75, 76)  # cuda.h's numbers of the attributes: major, minor


def probe() -> Stack:
    """Return the GPU software of this machine; takes 0.5 s if cupy is installed.

    Imports cupy, loads NCCL and NVRTC, and starts the driver. To keep these libraries and their
    crashes out of a process, call this in a child process.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the result contains what cupy warns about
        cupy = _cupy()
        nccl = _nccl() if cupy.version else Nccl()
    return Stack(
        driver=_driver(),
        cupy=cupy,
        nccl=replace(nccl, paths=nccl_paths(loaded())),
        wheels=versions((*CUPY_WHEELS, *NCCL_WHEELS)),
    )


def _cupy() -> Cupy:
    try:
        import cupy

        runtime = cupy.cuda.runtime
        if runtime.is_hip:
            return Cupy(error=f"cupy {cupy.__version__} is built for ROCm")
        return Cupy(
            version=cupy.__version__,
            cuda=runtime.runtimeGetVersion(),
            nvrtc=_tried(lambda: ".".join(map(str, cupy.cuda.nvrtc.getVersion()))) or "",
            has_headers=_tried(_headers) is not None,
        )
    except ModuleNotFoundError as error:
        return Cupy() if error.name == "cupy" else Cupy(error=_reason(error))
    except Exception as error:  # noqa: BLE001 - a broken installation may raise anything
        return Cupy(error=_reason(error))


def _headers() -> str | None:
    """Return the folder of CUDA's headers, which cupy 14.2 needs to compile any RawModule."""
    pathfinder = importlib.import_module("cuda.pathfinder")
    folder: str | None = pathfinder.find_nvidia_header_directory("cudart")
    return folder


def _tried(call: Callable[[], R]) -> R | None:
    try:
        return call()
    except (ImportError, OSError, RuntimeError):  # RuntimeError: cupy 13 and cuda.pathfinder
        return None


def _nccl() -> Nccl:
    try:
        from cupy.cuda import nccl

        if not nccl.available:
            importlib.import_module("cupy_backends.cuda.libs.nccl")  # raises cupy's error
        return Nccl(version=nccl.get_version())
    except (AttributeError, ImportError, OSError, RuntimeError) as error:
        text = str(error)
        return Nccl(error="" if _is_absent("libnccl.so.2", text) else text)


def loaded() -> str:
    """Return the text of /proc/self/maps, which names all loaded libraries."""
    return read_text(_MAPS)


def _driver() -> Driver:
    release = _release()
    try:
        cuda = ctypes.CDLL(_LIBRARY)
        served = _asked(cuda.cuDriverGetVersion)  # works before cuInit(), but not in a stub
        code, name = cuda.cuInit(0), ctypes.c_char_p()
        gpus: tuple[Gpu, ...] = ()
        if code:
            cuda.cuGetErrorName(code, ctypes.byref(name))
        elif served >= OLDEST_CUDA:
            gpus = tuple(_gpu(cuda, index) for index in range(_asked(cuda.cuDeviceGetCount)))
    except OSError as error:
        text = str(error)
        return Driver(error="" if _is_absent(_LIBRARY, text) else text, release=release)
    except AttributeError as error:  # the driver lacks a function
        return Driver(error=str(error), release=release)
    return Driver(
        is_loaded=True,
        release=release,
        cuda=served,
        init_code=code,
        init_error=(name.value or b"").decode(),
        visible=environment().get("CUDA_VISIBLE_DEVICES"),
        gpus=gpus,
    )


def _gpu(cuda: ctypes.CDLL, index: int) -> Gpu:
    """Return a GPU; makes no context on it."""
    device = _asked(cuda.cuDeviceGet, index)
    name, its_uuid = ctypes.create_string_buffer(256), ctypes.create_string_buffer(16)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceGetUuid_v2(its_uuid, device)
    nbytes = _asked(cuda.cuDeviceTotalMem_v2, device, kind=ctypes.c_size_t)
    major, minor = (_asked(cuda.cuDeviceGetAttribute, number, device) for number in _CAPABILITY)
    import uuid  # all jobs look for software, most have no GPU

    text = str(uuid.UUID(bytes=its_uuid.raw))
    return Gpu(name.value.decode(errors="replace"), text, nbytes, 10 * major + minor)


def _asked(function: Callable[..., int], *args: int, kind: type[Any] = ctypes.c_int) -> int:
    """Return what a function of the driver writes to its first argument."""
    value = kind()
    function(ctypes.byref(value), *args)
    return int(value.value)


def _release() -> str:
    try:
        text = read_text(_KERNEL_MODULE)
    except OSError:
        return ""
    match = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", text)
    return match[1] if match else ""


def _is_absent(library: str, error: str) -> bool:
    return error.startswith(f"{library}:") and "No such file or directory" in error


def _reason(error: BaseException) -> str:
    """Return the first line of an error, or of its cause: cupy adds a page of advice."""
    cause = error.__cause__ or error
    first_line = str(cause).strip().partition("\n")[0]
    return f"{type(cause).__name__}: {first_line}"


def versions(names: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
