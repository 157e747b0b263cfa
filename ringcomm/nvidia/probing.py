"""Looks for NVIDIA's driver, cupy and NCCL; presence.py says what that comes to."""

from __future__ import annotations

import ctypes
import importlib
import re
import uuid
import warnings
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Final

from ringcomm import config
from ringcomm.nvidia.presence import (
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

_LIBRARY = "libcuda.so.1"
_KERNEL_MODULE = Path("/proc/driver/nvidia/version")
_MAPS = Path("/proc/self/maps")
# As cuda.h numbers them.
_CAPABILITY_MAJOR: Final = 75
_CAPABILITY_MINOR: Final = 76


def probe() -> Stack:
    """Return what of the GPU stack is here; takes 0.5 s where cupy is installed.

    Imports cupy, loads NCCL and NVRTC and starts the driver. A process that is to stay without
    them asks a child, which also survives what they may do.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what cupy warns of is in the result
        cupy = _cupy()
        nccl = _nccl() if cupy.version else Nccl()
    return Stack(
        driver=_driver(),
        cupy=cupy,
        nccl=replace(nccl, paths=nccl_paths(loaded())),
        wheels=_wheels(),
    )


def _cupy() -> Cupy:
    try:
        import cupy

        return _look_at(cupy)
    except ModuleNotFoundError as error:
        return Cupy() if error.name == "cupy" else Cupy(error=_reason(error))
    except Exception as error:  # noqa: BLE001 - of an installation that is broken somehow
        return Cupy(error=_reason(error))


def _look_at(cupy: ModuleType) -> Cupy:
    runtime = cupy.cuda.runtime
    if runtime.is_hip:
        return Cupy(error=f"cupy {cupy.__version__} is built for ROCm")
    return Cupy(
        version=cupy.__version__,
        cuda=runtime.runtimeGetVersion(),
        nvrtc=_nvrtc(cupy),
        has_headers=_has_headers(),
    )


def _nvrtc(cupy: ModuleType) -> str:
    try:
        major, minor = cupy.cuda.nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError):  # the latter of cupy 13 and of cuda.pathfinder
        return ""
    return f"{major}.{minor}"


def _has_headers() -> bool:
    """Ask as cupy 14.2 does before it compiles a RawModule, even one that includes nothing."""
    try:
        pathfinder = importlib.import_module("cuda.pathfinder")
        return pathfinder.find_nvidia_header_directory("cudart") is not None
    except (ImportError, OSError, RuntimeError):
        return False


def _nccl() -> Nccl:
    try:
        from cupy.cuda import nccl

        if not nccl.available:
            importlib.import_module("cupy_backends.cuda.libs.nccl")  # what that caught, and why
        return Nccl(version=nccl.get_version())
    except (AttributeError, ImportError, OSError, RuntimeError) as error:
        text = str(error)
        return Nccl(error="" if _is_absent("libnccl.so.2", text) else text)


def loaded() -> str:
    """Return what this process has mapped, in the form of /proc/self/maps."""
    return _MAPS.read_text(errors="replace")


def _driver() -> Driver:
    release = _release()
    visible = config.environment().get("CUDA_VISIBLE_DEVICES")
    try:
        cuda = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        text = str(error)
        return Driver(error="" if _is_absent(_LIBRARY, text) else text, release=release)
    try:
        return _start(cuda, release, visible)
    except AttributeError as error:  # a function that it does not have
        return Driver(error=str(error), release=release)


def _start(cuda: ctypes.CDLL, release: str, visible: str | None) -> Driver:
    served = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(served))  # answers before cuInit; a stub does not
    code = cuda.cuInit(0)
    return Driver(
        is_loaded=True,
        release=release,
        cuda=served.value,
        init_code=code,
        init_error=_name_of(cuda, code) if code else "",
        visible=visible,
        gpus=_gpus(cuda) if code == 0 and served.value >= OLDEST_CUDA else (),
    )


def _name_of(cuda: ctypes.CDLL, code: int) -> str:
    name = ctypes.c_char_p()
    cuda.cuGetErrorName(code, ctypes.byref(name))
    return (name.value or b"").decode()


def _gpus(cuda: ctypes.CDLL) -> tuple[Gpu, ...]:
    count = ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    return tuple(_gpu(cuda, index) for index in range(count.value))


def _gpu(cuda: ctypes.CDLL, index: int) -> Gpu:
    """Ask for what needs no context, so none is made on any GPU."""
    device, nbytes = ctypes.c_int(), ctypes.c_size_t()
    name, its_uuid = ctypes.create_string_buffer(256), ctypes.create_string_buffer(16)
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceGetUuid_v2(its_uuid, device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(nbytes), device)
    capability = (
        _attribute(cuda, _CAPABILITY_MAJOR, device),
        _attribute(cuda, _CAPABILITY_MINOR, device),
    )
    text = str(uuid.UUID(bytes=its_uuid.raw))
    return Gpu(name.value.decode(errors="replace"), text, nbytes.value, capability)


def _attribute(cuda: ctypes.CDLL, number: int, device: ctypes.c_int) -> int:
    value = ctypes.c_int()
    cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device)
    return value.value


def _release() -> str:
    try:
        text = _KERNEL_MODULE.read_text()
    except OSError:
        return ""
    match = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", text)
    return match[1] if match else ""


def _is_absent(library: str, error: str) -> bool:
    """Tell a library that is not there from one that cannot be loaded, by what dlopen says."""
    return error.startswith(f"{library}:") and "No such file or directory" in error


def _reason(error: BaseException) -> str:
    """Return one line; cupy wraps what happened in a page of advice."""
    cause = error.__cause__ or error
    first_line = str(cause).strip().partition("\n")[0]
    return f"{type(cause).__name__}: {first_line}"


def _wheels() -> dict[str, str]:
    found = {}
    for name in (*CUPY_WHEELS, *NCCL_WHEELS):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
