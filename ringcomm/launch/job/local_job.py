"""A job on this host, for a caller that goes on: a process of its own supervises it.

The supervisor catches signals, forks, and ends what is left of its session. A caller such as a
notebook has threads, and signals of its own.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ringcomm.launch.child import outside_of_a_job, run_child
from ringcomm.launch.job.command import forks_ranks, gather_surroundings
from ringcomm.launch.job.hosts import Host
from ringcomm.launch.job.plan import plan
from ringcomm.launch.job.plan_types import RunRequest
from ringcomm.launch.job.run_folder import END, RunFolder
from ringcomm.launch.job.verdict import Verdict

_TO_END_S: Final = 30.0  # more than the supervisor needs to end a job


@dataclass(frozen=True)
class LocalEnding:
    verdict: Verdict | None  # None: the deadline passed
    output: str  # of the launcher, and of each rank; last that of the one that failed first
    seconds: float


def run_on_this_host(
    request: RunRequest, folder: Path, environ: Mapping[str, str], *, deadline_s: float | None
) -> LocalEnding:
    """Run a job to its end, as `ringcomm run` does, and after `deadline_s` end it.

    Args:
        request: the job; `np` is set. It has all its ranks here, also in a job of Slurm or PBS.
        folder: an empty folder of this user, for the records of the run.
        environ: the environment of the job; this process may be a rank of another one.
        deadline_s: seconds; None: no limit.

    Raises:
        ConfigError: the installation does not allow it, as `ringcomm check` says.
    """
    assert request.np is not None
    request = replace(request, hosts=(Host("localhost", request.np),))
    environ = outside_of_a_job(environ)
    here = gather_surroundings(request, environ, folder)
    job = plan(request, replace(here, rank_of=""))  # that of this process does not matter
    run_folder = RunFolder(folder)
    config = {"ranks": job.size, "hosts": [], "launcher": job.argv, "variables": job.variables}
    run_folder.create(config, job.files)
    call = f"supervise({str(folder)!r}, forks_ranks={forks_ranks(request)})"
    child = run_child(
        command(f"from ringcomm.launch.job.supervisor import supervise; {call}"),
        environ,
        deadline_s=deadline_s,
        patience_s=_TO_END_S,
    )
    verdict = None if child.code is None else _verdict(run_folder, child.code)
    blamed = verdict.rank if verdict else None
    ranks = sorted(range(job.size), key=lambda rank: rank == blamed)
    texts = [child.output, *(_log(run_folder, rank) for rank in ranks)]
    if verdict and not (folder / END).exists():
        texts.append(f"ringcomm: {verdict.what}")
    output = "".join(t if t.endswith("\n") else f"{t}\n" for t in texts if t)
    return LocalEnding(verdict, output, child.seconds)


def command(statement: str) -> tuple[str, ...]:
    """Return the command that executes a statement, and imports from where this process does."""
    return (sys.executable, "-P", "-c", f"import sys; sys.path[:] = {sys.path!r}\n{statement}")


def _verdict(folder: RunFolder, code: int) -> Verdict:
    end = folder.end()
    if end is None:
        how = f"exit {code}" if code >= 0 else f"signal {-code}"
        what = f"what supervised the job has left no record of its end ({how})"
        if END in folder.problems:
            what = f"{folder.path / END} {folder.problems[END]} ({how})"
        return Verdict(code or 1, what)
    return Verdict(end.code, end.what, end.rank, end.report)


def _log(folder: RunFolder, rank: int) -> str:
    with folder.open_log_of(rank) or contextlib.nullcontext() as file:
        return "" if file is None else file.read().decode(errors="replace")
