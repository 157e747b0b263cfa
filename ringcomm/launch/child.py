"""Runs a child process with a deadline, outside of any MPI job."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_CANNOT_START = 127


@dataclass(frozen=True)
class ChildOutcome:
    code: int | None  # -N: signal N; 127: it could not be started; None: the deadline passed
    output: str  # stdout and stderr together
    seconds: float


def last_lines(output: str, count: int) -> list[str]:
    lines = [line.rstrip() for line in output.splitlines()]
    return [line for line in lines if line][-count:]


def run_child(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    deadline_s: float | None,
    patience_s: float = 5.0,
) -> ChildOutcome:
    """Run `argv` with an empty stdin; after `deadline_s`, end it and its children.

    It gets SIGTERM, and SIGKILL if it has not ended `patience_s` later.
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
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(deadline_s)
        finally:
            if process.returncode is None:  # after the deadline, or at a KeyboardInterrupt
                _end(process, patience_s)
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
    "RINGCOMM_RUN_FOLDER_ID",
)
_OF_THE_USER = ("PMIX_MCA_",)


def _end(process: subprocess.Popen[bytes], patience_s: float) -> None:
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(patience_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # also ends children that are left
    process.wait()
