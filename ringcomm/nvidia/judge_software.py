"""Judges the GPU software of a machine: returns its problems, given facts about it. Pure.

The stack consists of NVIDIA's driver with its GPUs, cupy, the compiler that cupy uses, and NCCL.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

from ringcomm.errors import ConfigError

CUPY_WHEELS: Final = ("cupy", "cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x")
NCCL_WHEELS: Final = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
# 14.0 is the first cupy that finds NVRTC and CUDA's headers among pip's packages, and the first
# whose ids of NCCL communicators are bytes.
OLDEST_CUPY: Final = "14.0"
OLDEST_NCCL: Final = 22100
OLDEST_CUDA: Final = 12000


@dataclass(frozen=True)
class Gpu:
    name: str  # "NVIDIA H200"
    uuid: str  # the same in every process; if the GPU is divided (MIG), the instance's uuid
    nbytes: int
    capability: int  # 90 for 9.0


@dataclass(frozen=True, kw_only=True)
class Driver:
    is_loaded: bool = False  # libcuda.so.1 is loaded
    error: str = ""  # why libcuda.so.1 cannot be loaded; "" if there is none
    release: str = ""  # release of the kernel module, "580.65.06"; "" if it is not known
    cuda: int = 0  # the newest CUDA that the driver supports, 13000
    init_code: int = 0  # result of cuInit(); 0 if the driver started
    init_error: str = ""  # the name of init_code, "CUDA_ERROR_NO_DEVICE"
    visible: str | None = None  # CUDA_VISIBLE_DEVICES
    gpus: tuple[Gpu, ...] = ()  # the visible ones


@dataclass(frozen=True, kw_only=True)
class Cupy:
    """The package that `import cupy` imports."""

    version: str = ""  # "" if cupy cannot be imported
    error: str = ""  # why it cannot be imported; "" if it is not installed
    cuda: int = 0  # the CUDA with which it was built, 13020
    nvrtc: str = ""  # version of the compiler that it finds, "13.0"; "" if it finds none
    has_headers: bool = False  # it finds CUDA's headers, which the compiler needs


@dataclass(frozen=True, kw_only=True)
class Nccl:
    """The NCCL that cupy uses."""

    version: int = 0  # 22703; 0 if cupy cannot use NCCL
    error: str = ""  # why cupy cannot use it; "" if there is none
    paths: tuple[str, ...] = ()  # paths of all NCCL libraries in this process


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The GPU software of a machine, from find_software.probe(). Stack() means: none at all."""

    driver: Driver = field(default_factory=Driver)
    cupy: Cupy = field(default_factory=Cupy)
    nccl: Nccl = field(default_factory=Nccl)
    wheels: Mapping[str, str] = field(default_factory=dict)  # installed wheel -> version

    @property
    def is_absent(self) -> bool:
        driver, cupy = self.driver, self.cupy
        has_cupy = cupy.version or cupy.error or _wheels(self, CUPY_WHEELS)
        return not (driver.is_loaded or driver.error or has_cupy)

    def pack(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def unpack(cls, packed: str) -> Stack:
        facts = json.loads(packed)
        gpus = tuple(Gpu(**gpu) for gpu in facts["driver"]["gpus"])
        return cls(
            driver=Driver(**facts["driver"] | {"gpus": gpus}),
            cupy=Cupy(**facts["cupy"]),
            nccl=Nccl(**facts["nccl"] | {"paths": tuple(facts["nccl"]["paths"])}),
            wheels=facts["wheels"],
        )


@dataclass(frozen=True)
class Problem:
    what: str
    remedy: str  # a command, or advice

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"


def problems(stack: Stack) -> list[Problem]:
    """Return all problems, the most important one first."""
    return [*_of_arrays(stack), *_of_nccl(stack), *_of_wheels(stack)]


def require(stack: Stack) -> None:
    """Raise ConfigError, in one line, if arrays on a GPU cannot be used; they do without NCCL."""
    for problem in _of_arrays(stack):
        raise ConfigError(str(problem))


def require_nccl(stack: Stack) -> None:
    """Raise ConfigError, in one line, if NCCL cannot be used."""
    for problem in _of_nccl(stack):
        raise ConfigError(str(problem))


def nccl_paths(maps: str) -> tuple[str, ...]:
    """Return the paths of all NCCL libraries in the text of /proc/PID/maps, one per file."""
    files: dict[tuple[str, str], str] = {}
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and (match := re.fullmatch(_LIBNCCL, fields[5])):
            device, inode = fields[3:5]
            files.setdefault((device, inode), match[1])
    return tuple(files.values())


# Does not match libnccl-net.so and other plugins. The path of a replaced file ends in " (deleted)".
_LIBNCCL = r"(/.*/libnccl\.so[.\d]*)(?: \(deleted\))?"


def cuda_text(version: int) -> str:  # "13.2" for 13020
    return f"{version // 1000}.{version % 1000 // 10}"


def version_text(version: int) -> str:  # of NCCL: "2.27.3" for 22703
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


_Row = tuple[object, str, str]  # a fact, which is a problem if it is true; what it is; a remedy


def _first(*rows: _Row) -> list[Problem]:
    """Return the first problem of one part of the stack, if there is one."""
    return [Problem(what, remedy) for is_so, what, remedy in rows if is_so][:1]


def _of_arrays(stack: Stack) -> list[Problem]:
    cupy, driver, install = stack.cupy, stack.driver, _install(stack)
    served = f"NVIDIA's driver serves CUDA {cuda_text(driver.cuda)}"
    for_cuda = f" for CUDA {cuda_text(driver.cuda)}" if driver.cuda else ""
    kernel = f"NVIDIA's kernel module {driver.release} is here"
    visible = f"CUDA_VISIBLE_DEVICES={driver.visible!r}"
    # fmt: off
    return [
        *_first(
            (cupy.error, f"cupy cannot be imported ({cupy.error})", install),
            (not cupy.version, "a GPU array needs cupy", install),
            (version_numbers(cupy.version) < version_numbers(OLDEST_CUPY),
             f"cupy {cupy.version} is too old, ringcomm needs {OLDEST_CUPY} or later", install),
        ),
        *_first(
            (driver.error, f"NVIDIA's driver cannot be loaded ({driver.error})", "reinstall it"),
            (not driver.is_loaded and driver.release,
             f"{kernel}, but libcuda.so.1 is not", _GPUS_ALL),
            (not driver.is_loaded, "no NVIDIA driver (libcuda.so.1) is here",
             f"install one, or {_GPUS_ALL}"),
            (driver.init_code not in (0, _NO_DEVICE), *_why_it_does_not_start(driver)),
            (driver.cuda < OLDEST_CUDA, f"{served}, ringcomm needs 12 or later",
             "install a driver of release 525 or later"),
            (not driver.gpus and driver.visible is not None, f"{visible} leaves no GPU",
             "unset CUDA_VISIBLE_DEVICES"),
            (not driver.gpus, f"NVIDIA's driver{for_cuda} finds no GPU", _GPUS_ALL),
            (cupy.cuda // 1000 > driver.cuda // 1000,
             f"{served}, cupy {cupy.version} needs CUDA {cupy.cuda // 1000}", install),
        ),
        *_first(
            (cupy.version and not cupy.nvrtc,
             "cupy finds no NVRTC, with which it compiles kernels", install),
            (cupy.version and not cupy.has_headers,
             "cupy finds no CUDA headers, which kernels need", install),
        ),
    ]
    # fmt: on


def _of_nccl(stack: Stack) -> list[Problem]:
    nccl, has_cupy, install = stack.nccl, bool(stack.cupy.version), _install(stack)
    why = f" ({nccl.error})" if nccl.error else ""
    where = f" ({nccl.paths[0]})" if nccl.paths else ""
    version, needed = version_text(nccl.version), version_text(OLDEST_NCCL)
    # fmt: off
    return _first(
        (len(nccl.paths) > 1,
         f"{len(nccl.paths)} NCCL libraries are in one process, {' and '.join(nccl.paths)}",
         "keep one, or put the folder of torch's into LD_LIBRARY_PATH"),
        (has_cupy and not nccl.version, f"cupy finds no NCCL that it can use{why}", install),
        (has_cupy and nccl.version < OLDEST_NCCL,
         f"NCCL {version}{where} is too old, ringcomm needs {needed} or later", install),
    )
    # fmt: on


def _of_wheels(stack: Stack) -> list[Problem]:
    sets = (_wheels(stack, CUPY_WHEELS), _wheels(stack, NCCL_WHEELS))
    overwrite = "are installed together and overwrite each other"
    rows = [(len(s) > 1, f"{' and '.join(s)} {overwrite}", _anew(s, _extra(stack))) for s in sets]
    return _first(*rows)


def _why_it_does_not_start(driver: Driver) -> tuple[str, str]:
    meaning, remedy = _INIT_ERRORS.get(driver.init_code, ("", "see what nvidia-smi says"))
    name = f"{driver.init_code} {driver.init_error}".rstrip()
    release = f", kernel module {driver.release}" if driver.release else ""
    because = f": {meaning}" if meaning else ""
    return f"NVIDIA's driver does not start (cuInit: {name}{release}){because}", remedy


_GPUS_ALL = "start the container with --gpus all"
_NO_DEVICE = 100
_NO_MPS = (
    "the MPS server does not answer",
    "start it with nvidia-cuda-mps-control -d, or unset CUDA_MPS_PIPE_DIRECTORY",
)
# The usual cause of each error, which explains more than the error's name in cuda.h.
# fmt: off
_INIT_ERRORS: Final = {
    34: ("libcuda.so.1 is the stub that programs are linked with",
         "take the folder stubs out of LD_LIBRARY_PATH"),
    304: ("the operating system refuses, mostly because /dev/nvidia* is missing or forbidden",
          "ls -l /dev/nvidia*"),
    802: ("the fabric manager of its NVSwitches is not ready",
          "systemctl start nvidia-fabricmanager"),
    803: ("libcuda.so.1 and the kernel module are of different releases",
          "reboot, or load the module nvidia again"),
    804: ("libcuda.so.1 is of cuda-compat, which this GPU or its kernel module does not allow",
          "take the folder compat out of LD_LIBRARY_PATH"),
    **dict.fromkeys((805, 806, 807), _NO_MPS),
    999: ("no reason is given; mostly, a kernel module is not loaded", "modprobe nvidia-uvm"),
}
# fmt: on


def _install(stack: Stack) -> str:
    """Return the command that installs the cupy that fits the driver, and its dependencies."""
    extra, wheels = _extra(stack), _wheels(stack, CUPY_WHEELS)
    return _anew([] if wheels == [f"cupy-{extra}x"] else wheels, extra)


def _anew(wheels: Sequence[str], extra: str) -> str:
    install = f"pip install 'ringcomm[{extra}]'"
    return f"pip uninstall -y {' '.join(wheels)} && {install}" if wheels else install


def _extra(stack: Stack) -> str:
    """Return "cuda12" or "cuda13": the extra that is installed, if the driver supports it."""
    served = stack.driver.cuda // 1000
    if 0 < served < 13:
        return "cuda12"
    is_for_12 = _wheels(stack, CUPY_WHEELS) == ["cupy-cuda12x"]
    return "cuda12" if is_for_12 else "cuda13"


def _wheels(stack: Stack, names: Iterable[str]) -> list[str]:
    return [name for name in names if name in stack.wheels]


def version_numbers(version: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", version)[:3]]
