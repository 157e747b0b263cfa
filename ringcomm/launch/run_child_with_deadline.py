"""Runs a child process with a deadline, outside of any MPI job."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ringcomm.launched.process_stat import all_processes
from ringcomm.system_text import read_text

_PATIENCE_S = 5.0  # between SIGTERM, on which mpirun ends its ranks, and SIGKILL
_CANNOT_START = 127
_LOOK_S = 0.5
_MPI_FILE = r" (/dev/shm/(?:mpich_shm_|sm_segment\.|vader_segment\.|Intel_MPI_)\S+)$"


@dataclass(frozen=True)
class ChildOutcome:
    code: int | None  # -N: signal N; 127: it could not be started; None: the deadline passed
    output: str  # stdout and stderr together
    seconds: float

    def last_lines(self, count: int) -> list[str]:
        lines = [line.rstrip() for line in self.output.splitlines()]
        return [line for line in lines if line][-count:]


def run_child(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    deadline_s: float,
    is_in_vain: Callable[[], bool] = lambda: False,
) -> ChildOutcome:
    """Run `argv` with an empty stdin; after `deadline_s`, end it and its children.

    So it does once is_in_vain() is true, which is asked twice a second. The code is not None then.
    """
    start = time.monotonic()
    # Not a pipe: a grandchild could keep it open after the deadline.
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environ),
                start_new_session=True,
            )
        except OSError as error:
            return ChildOutcome(_CANNOT_START, str(error), time.monotonic() - start)
        code = _wait(process, deadline_s, is_in_vain)
        seconds = time.monotonic() - start
        output.seek(0)
        return ChildOutcome(code, output.read().decode(errors="replace"), seconds)


def outside_of_a_job(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without the variables that a launcher or a rank sets for its children.

    So an MPI process with this environment does not join the caller's job. The settings of the user
    are kept.
    """
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(_OF_A_JOB) or name.startswith(_OF_THE_USER)
    }


_OF_A_JOB = (
    "PMI_",
    "PMIX_",
    "OMPI_COMM_WORLD_",
    "OMPI_FILE_LOCATION",
    "PRTE_LAUNCHED",
    "HYDI_CONTROL_FD",
    "MPI_LOCAL",
    "RINGCOMM_RANK_PROCESS",
    "RINGCOMM_RUN_FOLDER",
)
_OF_THE_USER = ("PMIX_MCA_",)


def _wait(
    process: subprocess.Popen[bytes], deadline_s: float, is_in_vain: Callable[[], bool]
) -> int | None:
    deadline = time.monotonic() + deadline_s
    try:
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(min(left, _LOOK_S))
            if is_in_vain():
                _end(process)
                return process.returncode
        return None
    finally:
        if process.returncode is None:  # after the deadline, or at a KeyboardInterrupt
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    files = mpi_files_below([process.pid])
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(_PATIENCE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # also ends children that are left
    process.wait()
    remove_files(files)


def mpi_files_below(ancestors: Collection[int]) -> set[str]:
    pids = _descendants(ancestors) if ancestors else []
    return {path for pid in pids for path in _mpi_files(pid)}


def remove_files(paths: Iterable[str]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _descendants(ancestors: Iterable[int]) -> list[int]:
    """Return the pids of the processes from these down; MPICH gives each a session of its own."""
    children: dict[int, list[int]] = {}
    for process in all_processes():
        children.setdefault(process.parent, []).append(process.pid)
    found = [*ancestors]
    for pid in found:
        found += children.get(pid, [])
    return found


def _mpi_files(pid: int) -> list[str]:
    """Return the files of MPI's shared memory in a process, which it leaves if it is killed."""
    try:
        maps = read_text(f"/proc/{pid}/maps")
    except OSError:  # it has ended
        return []
    return re.findall(_MPI_FILE, maps, re.MULTILINE)
