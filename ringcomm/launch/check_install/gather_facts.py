"""Gathers the facts about an installation, without starting MPI and without importing torch.

A child process with a deadline runs the code that may crash or hang.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from ringcomm.config import read_settings
from ringcomm.errors import ConfigError
from ringcomm.launch.check_install.facts import ROOT_VARIABLES, Facts, Launcher, Library, Reading
from ringcomm.launch.child import (
    ChildOutcome,
    last_lines,
    outside_of_a_job,
    run_child,
)
from ringcomm.launch.mpi_kind import FAMILIES, kind_of
from ringcomm.launch.usable_cores import cgroup_limit
from ringcomm.nvidia.find_software import versions
from ringcomm.nvidia.judge_software import Stack
from ringcomm.system_text import read_text

_PACKAGES: Final = ("numpy", "mpi4py", "torch", *FAMILIES, "impi-rt")
_ANSWER_S = 30.0
_TCP: Final = ("tcp", "tcp6") if os.path.exists("/proc/net/tcp6") else ("tcp",)
_LISTENS: Final = "0A"  # the state of a socket in /proc/net/tcp
_MARK = "ringcomm-check: "


def gather(environ: Mapping[str, str], *, is_for_job: bool = False) -> Facts:
    """Return the facts about this interpreter, this machine and `environ`.

    is_for_job: leave out GPUs and reads of other processes' memory: all jobs start without them.

    Takes about 0.5 s, or 1.2 s if cupy is installed.
    """
    package = next(iter(metadata.distributions(name="ringcomm")), None)  # None: a source tree
    core, core_error = _core()
    gpu, gpu_error = (None, "not asked for") if is_for_job else _gpu(environ)
    guardian = None if core is None else Path(core).with_name("ringcomm-guardian")
    return Facts(
        python=(platform.python_version(), sys.executable),
        versions=versions(_PACKAGES),
        floors=floors(package.requires or () if package else ()),
        mpi=_library(environ),
        launcher=_launcher(environ),
        core=core,
        core_error=core_error,
        sources=_sources(),
        origin=origin(package.read_text("direct_url.json") if package else None),
        guardian=str(guardian) if guardian is not None and guardian.is_file() else None,
        is_guardian_executable=guardian is not None and os.access(guardian, os.X_OK),
        cores=min(_cores(os.sched_getaffinity(0)), cgroup_limit()),
        is_root=os.geteuid() == 0,
        has_home="HOME" in environ,
        allows_root=all(environ.get(name) == "1" for name in ROOT_VARIABLES),
        settings_error=_settings_error(environ),
        gpu=gpu,
        gpu_error=gpu_error,
        reading=_reading(environ) if core and not is_for_job else Reading(None, "not tried"),
    )


def floors(requirements: Iterable[str]) -> dict[str, str]:
    """Return name -> lowest version of requirements such as 'torch>=2.6; extra == "torch"'."""
    matches = (re.match(r"([\w.-]+)\s*>=\s*([\d.]+)", each) for each in requirements)
    return {match[1]: match[2] for match in matches if match}


_ASK_LIBRARY = f"""
import json, re, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
maps = open("/proc/self/maps", errors="replace").read()
paths = re.findall(r"/.*/libmpi(?:ch|_\\w+)?\\.so.*", maps)
print({_MARK!r} + json.dumps([MPI.Get_library_version(), paths[0] if paths else ""]), flush=True)
"""


def _library(environ: Mapping[str, str]) -> Library:
    answer, error = _ask(_ASK_LIBRARY, environ)
    if answer is None:
        return Library(None, error=error)
    version_text, path = json.loads(answer)
    return Library(kind_of(version_text), path)


_ASK_GPU = f"""
from ringcomm.nvidia.find_software import probe
print({_MARK!r} + probe().pack(), flush=True)
"""


def _gpu(environ: Mapping[str, str]) -> tuple[Stack | None, str]:
    answer, error = _ask(_ASK_GPU, environ)
    return (None, error) if answer is None else (Stack.unpack(answer), "")


_ASK_READING = f"""
import json
from ringcomm.transport.node.private_memory import ptrace_scope, try_between_children
print({_MARK!r} + json.dumps([try_between_children() or "", ptrace_scope()]), flush=True)
"""


def _reading(environ: Mapping[str, str]) -> Reading:
    if environ.get("RINGCOMM_READ_MEMORY") == "0":
        return Reading(None, is_off=True)
    answer, error = _ask(_ASK_READING, environ)
    if answer is None:
        return Reading(None, error)
    number, scope = json.loads(answer)
    return Reading(number and errno.errorcode.get(number, str(number)), ptrace_scope=scope)


def _ask(script: str, environ: Mapping[str, str]) -> tuple[str | None, str]:
    """Return the answer of a child that runs `script`, or None and why there is no answer."""
    outcome = run_child(
        [sys.executable, "-P", "-c", script], outside_of_a_job(environ), deadline_s=_ANSWER_S
    )
    for line in outcome.output.splitlines():  # an MPI library may print other lines
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
    return launcher_at(path, environ)


def launcher_at(path: str, environ: Mapping[str, str]) -> Launcher:
    """Return what is known of this mpirun.

    Intel MPI's is a shell script that finds the other programs by PATH, where they are not if the
    environment of this Python is not activated.
    """
    folders = os.pathsep.join([str(Path(path).parent), environ.get("PATH", os.defpath)])
    variables: Mapping[str, str]
    for variables in ({}, {"PATH": folders}):
        outcome = run_child(
            [path, "--version"], {**outside_of_a_job(environ), **variables}, deadline_s=_ANSWER_S
        )
        if outcome.code == 0:
            return Launcher(path, kind_of(outcome.output), variables=variables)
        if outcome.code is None:  # it hangs
            break
    return Launcher(path, None, _why(outcome))


def _why(outcome: ChildOutcome) -> str:
    if outcome.code is None:
        return f"no answer in {_ANSWER_S:.0f} s"
    how = f"signal {-outcome.code}" if outcome.code < 0 else f"exit {outcome.code}"
    return f"{how}: {''.join(last_lines(outcome.output, 1)).strip() or 'no output'}"


def _core() -> tuple[str | None, str]:
    try:
        import ringcomm._core
    except ImportError as error:
        return None, str(error)
    return ringcomm._core.__file__, ""


def _sources() -> str:
    folder = Path(__file__).resolve().parents[3]
    return str(folder) if (folder / "pyproject.toml").exists() else ""


def origin(direct_url: str | None) -> str:
    """Return the argument with which pip installs ringcomm again.

    Args:
        direct_url: text of direct_url.json in the installed package (PEP 610); None if there is no
            such file, as for a package from an index.
    """
    note = json.loads(direct_url or "{}")
    url = urlsplit(note.get("url", ""))
    if url.scheme != "file":
        return "ringcomm"
    path = shlex.quote(unquote(url.path))
    return f"-e {path}" if note.get("dir_info", {}).get("editable") else path


def _settings_error(environ: Mapping[str, str]) -> str:
    try:
        read_settings(environ)
    except ConfigError as error:
        return str(error)
    return ""


def _cores(cpus: Iterable[int]) -> int:
    """Return how many cores these logical CPUs belong to; mpirun counts cores, too."""
    return len({_siblings(cpu) for cpu in cpus})


def _siblings(cpu: int) -> str:
    try:
        return read_text(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    except OSError:
        return str(cpu)


def listening_ports() -> list[int]:
    own = set()
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this listing
            own.add(os.readlink(each))
    lines = [read_text(f"/proc/self/net/{family}").splitlines()[1:] for family in _TCP]
    sockets = [line.split() for line in itertools.chain(*lines)]
    listening = [s for s in sockets if s[3] == _LISTENS and f"socket:[{s[9]}]" in own]
    return sorted({int(s[1].rpartition(":")[2], 16) for s in listening})
