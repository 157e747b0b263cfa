"""What is installed here, gathered without starting MPI and without importing torch.

Every question that may crash or hang is asked in a child process with a deadline.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import ringcomm
from ringcomm import config
from ringcomm.errors import ConfigError
from ringcomm.gpu.presence import Stack
from ringcomm.launch.child import Outcome, outside_of_a_job, run_child
from ringcomm.launch.cores import cgroup_limit, own_cpus
from ringcomm.launch.kind import FAMILIES, Kind, kind_of_launcher, kind_of_library

ROOT_VARIABLES: Final = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
_PACKAGES: Final = ("numpy", "mpi4py", "torch", *FAMILIES)
_ANSWER_S = 30.0
_MARK = "ringcomm-check: "


@dataclass(frozen=True)
class Library:
    """The MPI library that mpi4py loads.

    Attributes:
        kind: None if none could be loaded.
        path: the file, empty if it is not known.
        error: why none could be loaded.
    """

    kind: Kind | None
    path: str = ""
    error: str = ""


@dataclass(frozen=True)
class Launcher:
    """The mpirun beside Python, else the one on PATH.

    Attributes:
        path: the file.
        kind: None if it does not run.
        error: why it does not run.
    """

    path: str
    kind: Kind | None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What check judges.

    Attributes:
        python: version and path of this interpreter.
        versions: distribution name -> version, of those that are installed.
        floors: distribution name -> lowest version that ringcomm asks for.
        mpi: the MPI library.
        launcher: None if there is no mpirun.
        core: path of the compiled part, None if it cannot be loaded.
        core_error: why it cannot be loaded.
        sources: the folder of ringcomm's sources, if it is imported from there; else empty.
        origin: what pip needs to be told to install it again: "-e /home/me/ringcomm".
        guardian: path of the guardian program, None if it is not there.
        is_guardian_executable: this user may run it.
        cores: number of processor cores that this process may use.
        is_root: this process runs as root.
        allows_root: the variables are set by which Open MPI's mpirun lets root in.
        settings_error: what is wrong with a RINGCOMM_ variable, empty if nothing is.
        lacks_nccl4py: RINGCOMM_NCCL asks for nccl4py, which is not installed.
        gpu: NVIDIA's driver, cupy and NCCL, None if the child that looks for them failed.
        gpu_error: how it failed.
    """

    python: tuple[str, str]
    versions: Mapping[str, str]
    floors: Mapping[str, str]
    mpi: Library
    launcher: Launcher | None
    core: str | None
    core_error: str = ""
    sources: str = ""
    origin: str = "ringcomm"
    guardian: str | None
    is_guardian_executable: bool
    cores: int
    is_root: bool
    allows_root: bool
    settings_error: str = ""
    lacks_nccl4py: bool = False
    gpu: Stack | None = field(default_factory=Stack)
    gpu_error: str = ""


def gather(environ: Mapping[str, str]) -> Facts:
    """Return the facts about this interpreter, this machine and `environ`.

    Takes about 0.3 s, where cupy is installed 1 s.
    """
    core, core_error = _core()
    gpu, gpu_error = _gpu(environ)
    guardian = None if core is None else Path(core).with_name("ringcomm-guardian")
    return Facts(
        python=(platform.python_version(), sys.executable),
        versions=_versions(_PACKAGES),
        floors=floors(_requirements()),
        mpi=_library(environ),
        launcher=_launcher(environ),
        core=core,
        core_error=core_error,
        sources=_sources(),
        origin=_origin(),
        guardian=str(guardian) if guardian is not None and guardian.is_file() else None,
        is_guardian_executable=guardian is not None and os.access(guardian, os.X_OK),
        cores=min(_cores(own_cpus()), cgroup_limit()),
        is_root=os.geteuid() == 0,
        allows_root=all(environ.get(name) == "1" for name in ROOT_VARIABLES),
        settings_error=_settings_error(environ),
        lacks_nccl4py=_lacks_nccl4py(environ),
        gpu=gpu,
        gpu_error=gpu_error,
    )


def _versions(names: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _requirements() -> list[str]:
    try:
        return metadata.requires("ringcomm") or []
    except metadata.PackageNotFoundError:
        return []  # run from a source tree


def floors(requirements: Iterable[str]) -> dict[str, str]:
    """Return name -> lowest version for requirements such as 'torch>=2.6; extra == "torch"'."""
    matches = (re.match(r"([\w.-]+)\s*>=\s*([\d.]+)", each) for each in requirements)
    return {match[1]: match[2] for match in matches if match}


_ASK_LIBRARY = f"""
import json, re, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
paths = re.findall(r"/.*/libmpi(?:ch|_\\w+)?\\.so.*", open("/proc/self/maps").read())
print({_MARK!r} + json.dumps([MPI.Get_library_version(), paths[0] if paths else ""]), flush=True)
"""


def _library(environ: Mapping[str, str]) -> Library:
    answer, error = _ask(_ASK_LIBRARY, environ)
    if answer is None:
        return Library(None, error=error)
    version_text, path = json.loads(answer)
    return Library(kind_of_library(version_text), path)


_ASK_GPU = f"""
from ringcomm.gpu.probing import probe
print({_MARK!r} + probe().pack(), flush=True)
"""


def _gpu(environ: Mapping[str, str]) -> tuple[Stack | None, str]:
    answer, error = _ask(_ASK_GPU, environ)
    return (None, error) if answer is None else (Stack.unpack(answer), "")


def _ask(script: str, environ: Mapping[str, str]) -> tuple[str | None, str]:
    """Return what a child that runs `script` answers, else None and why."""
    outcome = run_child(
        [sys.executable, "-P", "-c", script], outside_of_a_job(environ), deadline_s=_ANSWER_S
    )
    answer = _marked(outcome.output)
    return answer, "" if answer is not None else _why(outcome)


def _launcher(environ: Mapping[str, str]) -> Launcher | None:
    beside_python = str(Path(sys.executable).parent)
    path = shutil.which("mpirun", path=beside_python) or shutil.which(
        "mpirun", path=environ.get("PATH", os.defpath)
    )
    if path is None:
        return None
    outcome = run_child([path, "--version"], outside_of_a_job(environ), deadline_s=_ANSWER_S)
    if outcome.code != 0:
        return Launcher(path, None, _why(outcome))
    return Launcher(path, kind_of_launcher(outcome.output))


def _marked(output: str) -> str | None:
    """Return the answer among whatever else an MPI library has to say."""
    for line in output.splitlines():
        if _MARK in line:
            return line.partition(_MARK)[2]
    return None


def _why(outcome: Outcome) -> str:
    if outcome.code is None:
        return f"no answer in {_ANSWER_S:.0f} s"
    lines = outcome.output.split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
    how = f"signal {-outcome.code}" if outcome.code < 0 else f"exit {outcome.code}"
    return f"{how}: {last}"


def _core() -> tuple[str | None, str]:
    try:
        from ringcomm import _core
    except ImportError as error:
        return None, str(error)
    return _core.__file__, ""


def _sources() -> str:
    folder = Path(ringcomm.__file__).resolve().parents[1]
    return str(folder) if (folder / "pyproject.toml").exists() else ""


def _origin() -> str:
    try:
        told = metadata.distribution("ringcomm").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        told = None
    return origin(told)


def origin(direct_url: str | None) -> str:
    """Return what to tell pip to install ringcomm again.

    Args:
        direct_url: what pip has noted beside the installed package (PEP 610); None: nothing, for
            it came from a package index.
    """
    told = json.loads(direct_url or "{}")
    url = urlsplit(told.get("url", ""))
    if url.scheme != "file":
        return "ringcomm"
    path = shlex.quote(unquote(url.path))
    return f"-e {path}" if told.get("dir_info", {}).get("editable") else path


def _settings_error(environ: Mapping[str, str]) -> str:
    try:
        config.settings(environ)
    except ConfigError as error:
        return str(error)
    return ""


def _lacks_nccl4py(environ: Mapping[str, str]) -> bool:
    with contextlib.suppress(ConfigError):
        return config.settings(environ).nccl == "nccl4py" and find_spec("nccl") is None
    return False


def _cores(cpus: Iterable[int]) -> int:
    """Return the number of cores that have these logical CPUs; mpirun counts in cores, too."""
    return len({_siblings(cpu) for cpu in cpus})


def _siblings(cpu: int) -> str:
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return topology.read_text()
    except OSError:
        return str(cpu)
