"""gather() finds what is installed, without starting MPI and without importing torch.

What may crash or hang runs in a child process with a deadline.
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
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from ringcomm import config
from ringcomm.errors import ConfigError
from ringcomm.launch.child import Outcome, outside_of_a_job, run_child
from ringcomm.launch.cores import cgroup_limit, own_cpus
from ringcomm.launch.facts import ROOT_VARIABLES, Facts, Launcher, Library
from ringcomm.launch.kind import FAMILIES, kind_of_launcher, kind_of_library
from ringcomm.nvidia.presence import Stack

_PACKAGES: Final = ("numpy", "mpi4py", "torch", *FAMILIES)
_ANSWER_S = 30.0
_MARK = "ringcomm-check: "


def gather(environ: Mapping[str, str]) -> Facts:
    """Return the facts about this interpreter, this machine and `environ`.

    Takes about 0.3 s, where cupy is installed 1 s.
    """
    core, core_error = _core()
    settings_error, lacks_nccl4py = _settings(environ)
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
        settings_error=settings_error,
        lacks_nccl4py=lacks_nccl4py,
        gpu=gpu,
        gpu_error=gpu_error,
    )


def _versions(names: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
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
from ringcomm.nvidia.probing import probe
print({_MARK!r} + probe().pack(), flush=True)
"""


def _gpu(environ: Mapping[str, str]) -> tuple[Stack | None, str]:
    answer, error = _ask(_ASK_GPU, environ)
    return (None, error) if answer is None else (Stack.unpack(answer), "")


def _ask(script: str, environ: Mapping[str, str]) -> tuple[str | None, str]:
    """Return the answer of a child that runs `script`, else None and why."""
    outcome = run_child(
        [sys.executable, "-P", "-c", script], outside_of_a_job(environ), deadline_s=_ANSWER_S
    )
    for line in outcome.output.splitlines():  # an MPI library may have printed others
        if _MARK in line:
            return line.partition(_MARK)[2], ""
    return None, _why(outcome)


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


def _why(outcome: Outcome) -> str:
    if outcome.code is None:
        return f"no answer in {_ANSWER_S:.0f} s"
    how = f"signal {-outcome.code}" if outcome.code < 0 else f"exit {outcome.code}"
    return f"{how}: {''.join(outcome.last_lines(1)).strip() or 'no output'}"


def _core() -> tuple[str | None, str]:
    try:
        from ringcomm import _core
    except ImportError as error:
        return None, str(error)
    return _core.__file__, ""


def _sources() -> str:
    folder = Path(config.__file__).resolve().parents[1]
    return str(folder) if (folder / "pyproject.toml").exists() else ""


def _origin() -> str:
    try:
        return origin(metadata.distribution("ringcomm").read_text("direct_url.json"))
    except metadata.PackageNotFoundError:
        return origin(None)


def origin(direct_url: str | None) -> str:
    """Return the argument with which pip installs ringcomm again.

    Args:
        direct_url: pip's note beside the installed package (PEP 610); None if it came from a
            package index.
    """
    note = json.loads(direct_url or "{}")
    url = urlsplit(note.get("url", ""))
    if url.scheme != "file":
        return "ringcomm"
    path = shlex.quote(unquote(url.path))
    return f"-e {path}" if note.get("dir_info", {}).get("editable") else path


def _settings(environ: Mapping[str, str]) -> tuple[str, bool]:
    """Return what is wrong with the settings, and whether they want nccl4py where it lacks."""
    try:
        settings = config.settings(environ)
    except ConfigError as error:
        return str(error), False
    return "", settings.nccl == "nccl4py" and find_spec("nccl") is None


def _cores(cpus: Iterable[int]) -> int:
    """Return the number of cores that have these logical CPUs; mpirun counts in cores, too."""
    return len({_siblings(cpu) for cpu in cpus})


def _siblings(cpu: int) -> str:
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return topology.read_text()
    except OSError:
        return str(cpu)
