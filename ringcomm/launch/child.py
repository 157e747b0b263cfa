"""run_child() ends its process at a deadline; outside_of_a_job() makes its environment."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_PATIENCE_S = 5.0  # between SIGTERM, on which mpirun ends its ranks, and SIGKILL
_CANNOT_START = 127


@dataclass(frozen=True)
class Outcome:
    """The end of a child."""

    code: int | None  # -N after signal N, 127: it could not be started, None: the deadline
    output: str  # stdout and stderr together
    seconds: float

    def last_lines(self, count: int) -> list[str]:
        """Return up to `count` lines from the end of the output, without empty ones."""
        lines = [line.rstrip() for line in self.output.splitlines()]
        return [line for line in lines if line][-count:]


def run_child(argv: Sequence[str], environ: Mapping[str, str], *, deadline_s: float) -> Outcome:
    """Return how `argv` ended, soon after `deadline_s` at the latest; its stdin is empty."""
    start = time.monotonic()
    # A file, not a pipe: a grandchild that keeps a pipe open would hold us past the deadline.
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
            return Outcome(_CANNOT_START, str(error), time.monotonic() - start)
        code = _wait(process, deadline_s)
        seconds = time.monotonic() - start
        output.seek(0)
        return Outcome(code, output.read().decode(errors="replace"), seconds)


def outside_of_a_job(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without what an MPI launcher or a rank has set for its children.

    MPI processes started with it belong to no job of ours. The user's own settings stay.
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
)
_OF_THE_USER = ("PMIX_MCA_",)


def _wait(process: subprocess.Popen[bytes], deadline_s: float) -> int | None:
    try:
        return process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.returncode is None:  # the deadline, or an interrupt from the keyboard
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(_PATIENCE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # also what the leader left behind
    process.wait()
