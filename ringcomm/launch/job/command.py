"""`ringcomm run`: starts a job, and returns the exit code that its ranks deserve."""

from __future__ import annotations

import contextlib
import math
import os
import re
import resource
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from ringcomm._version import __version__
from ringcomm.config import environment
from ringcomm.errors import ConfigError
from ringcomm.foreign_text import printable
from ringcomm.launch.check_install.gather_facts import gather
from ringcomm.launch.child import outside_of_a_job, run_child
from ringcomm.launch.job.arguments import Arguments, parse_arguments
from ringcomm.launch.job.limits import Limits
from ringcomm.launch.job.plan import plan
from ringcomm.launch.job.plan_types import RunPlan, RunRequest, Surroundings
from ringcomm.launch.job.restart import Ended, agent_of, decide
from ringcomm.launch.job.run_folder import RunFolder, near, time_text
from ringcomm.launch.job.run_words import lost_text, seconds_text
from ringcomm.launch.job.show import say, show
from ringcomm.launch.job.supervisor import Supervisor
from ringcomm.launch.job.verdict import STOPPED_IN_ORDER, JobEnding, Verdict, lost_ranks
from ringcomm.launched import rank_program
from ringcomm.launched.launcher import launching_variable
from ringcomm.regular_files import BrokenFileError, read_regular
from ringcomm.system_text import host_name, text_of

# --- what a run depends on ------------------------------------------------------------------------
_ANSWER_S = 30.0
_REFUSED, _INTERRUPTED = 2, 130
_HOST_ANSWER_S = 15.0
_AT_ONCE = 32
_NO_AGENT = 127  # of run_child()
_COMMIT: Final = re.compile(rb"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_GIT_MOST: Final = 1 << 20  # bytes of a file of git that are read


def gather_surroundings(
    request: RunRequest, environ: Mapping[str, str], folder: Path
) -> Surroundings:
    """Return what plan() is to know. Takes about 0.3 s.

    Raises ConfigError if $PBS_NODEFILE is to name the hosts, and cannot be read, or if there can be
    no further process.
    """
    limits = limits_here()
    limits.require(1)  # else the children that look for MPI fail first
    return Surroundings(
        facts=gather(environ, is_for_job=True),
        environ=environ,
        own_names=_own_names(),
        rank_of=launching_variable(environ) or "",
        node_file=None if request.hosts else _node_file(environ),
        srun_types=_srun_types(environ) if request.launcher == "srun" else None,
        free_port=_free_port(),
        folder=str(folder),
        starter=str(Path(rank_program.__file__).resolve()),
        limits=limits,
    )


def limits_here() -> Limits:
    """Return the limits of this process; root has none of threads."""
    files, threads = (
        math.inf if limit == resource.RLIM_INFINITY else limit
        for limit, _ in map(resource.getrlimit, (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    )
    uid = os.getuid()
    if uid == 0 or threads == math.inf:
        return Limits(files)
    used = 0
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            if os.stat(f"/proc/{pid}").st_uid == uid:
                used += len(os.listdir(f"/proc/{pid}/task"))
    return Limits(files, threads, used)


def _own_names() -> frozenset[str]:
    name = host_name()
    return frozenset({name, name.partition(".")[0], "localhost", "127.0.0.1", "::1"})


def _node_file(environ: Mapping[str, str]) -> str | None:
    path = environ.get("PBS_NODEFILE")
    if not path:
        return None
    try:
        return text_of(read_regular(path))
    except (OSError, BrokenFileError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"PBS_NODEFILE is {path}, which cannot be read ({why}). Name the hosts by -H"
        ) from error


def _srun_types(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    path = shutil.which("srun", path=environ.get("PATH", os.defpath))
    if path is None:
        return None
    outcome = run_child([path, "--mpi=list"], environ, deadline_s=_ANSWER_S)
    return tuple(outcome.output.split())


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
    return port


def main(argv: Sequence[str]) -> int:
    """Run the job of this command line; return its exit code, or 2 if it is refused."""
    try:
        args = parse_arguments(argv, sys.executable)
        _require_working_folder()
        folder = (
            RunFolder.named_by_time(args.runs, time.time())
            if args.run_folder is None
            else RunFolder(args.run_folder.absolute())
        )
        if not args.is_dry_run:
            return _run_and_restart(argv, args, folder)
        job = plan(args.request, _surroundings(args.request, folder))
        print(_shown(job))
        say(*args.notes, *job.notes)
    except ConfigError as error:
        say(str(error))
        return _REFUSED
    except KeyboardInterrupt:  # before the job began, or between two starts of it
        return _INTERRUPTED
    return 0


def _require_working_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError("the working folder has been removed; go to another") from error


def _run_and_restart(argv: Sequence[str], args: Arguments, folder: RunFolder) -> int:
    """Run the job, and start it again as long as that makes sense; return its last exit code."""
    request, first, n_restarts = args.request, None, 0
    while True:
        folder, here, job = _planned(args, request, folder)
        config = _config(argv, request, here, job, args.notes)
        folder.create(config, job.files, is_secret=_has_secrets(request))
        first = first or folder
        verdict, ending = _run(args, request, here, job, folder)
        if ending is None:
            return verdict.code
        decision = decide(
            Ended(
                request=request,
                hosts=job.hosts,
                verdict=verdict,
                was_asked_to_stop=ending.asked is not None or ending.is_stopped,
                silent=_silent(request, job, here) if verdict.code and request.elastic else (),
                n_restarts=n_restarts,
                limit=args.restarts,
            )
        )
        if decision.why:
            say(decision.why)
        if decision.request is None:
            return verdict.code
        n_restarts += 1
        request, folder = decision.request, first.after_restart(n_restarts)


def _planned(
    args: Arguments, request: RunRequest, folder: RunFolder
) -> tuple[RunFolder, Surroundings, RunPlan]:
    """Return a folder that is this run's own now, and how to run the job there.

    Raises ConfigError if the job is refused, or the folder that the user has named is not free.
    """
    here = _surroundings(request, folder)
    job = plan(request, here)
    if not job.hosts:  # others may have what this one lacks
        _require_program(request)
    while not folder.claim():
        if args.run_folder is not None:
            raise ConfigError(f"{folder.path} holds a run already; name another by --run-folder")
        folder = RunFolder.named_by_time(args.runs, time.time())  # a run of the same second has it
        here = replace(here, folder=str(folder.path))
        job = plan(request, here)
    return folder, here, job


def _require_program(request: RunRequest) -> None:
    """Raise ConfigError if there is no such script, or no such module."""
    python, what, *module = [*request.program, "", ""][:3]
    if python != sys.executable or "PYTHONPATH" in request.variables:
        return
    if what == "-m":
        top = module[0].partition(".")[0]
        if PathFinder.find_spec(top, [os.getcwd()]) is None and find_spec(top) is None:
            raise ConfigError(f"-m {module[0]}: there is no module {top}; nothing was started")
    elif what and not what.startswith("-") and not os.path.exists(what):
        raise ConfigError(f"{what}: no such file in {os.getcwd()}; nothing was started")


def _surroundings(request: RunRequest, folder: RunFolder) -> Surroundings:
    return gather_surroundings(request, environment(), folder.path)


def _silent(request: RunRequest, job: RunPlan, here: Surroundings) -> frozenset[str]:
    names = [host.name for host in job.hosts]
    return silent_hosts(names, agent_of(request), here.environ, own_names=here.own_names)


def _run(
    args: Arguments, request: RunRequest, here: Surroundings, job: RunPlan, folder: RunFolder
) -> tuple[Verdict, JobEnding | None]:
    say(f"{_described(job, here)}; {near(folder.path)}", *args.notes, *job.notes)
    if args.is_verbose:
        show(f"{_shown(job)}\n".encode(errors="backslashreplace"), sys.stderr)
    supervisor = Supervisor(
        job.argv,
        {**outside_of_a_job(here.environ), **job.variables},
        folder,
        size=job.size,
        grace_s=args.grace_s,
        least=None if request.elastic is None else request.elastic[0],
        silent_hosts=partial(_silent, request, job, here) if job.hosts else None,
        forks_ranks=forks_ranks(request),
        hosts=[host.name for host in job.hosts],
        tells_beginning=True,
    )
    began = time.monotonic()
    verdict, ending = supervisor.run_and_record()
    if verdict.code == 0:
        lost = lost_text({} if ending is None else lost_ranks(ending))
        completed = f"completed in {seconds_text(time.monotonic() - began)}"
        say(", ".join(filter(None, (completed, lost, str(near(folder.path))))))
    shown = (
        set() if request.elastic is None or ending is None else {f.rank for f in ending.failures}
    )
    _say_end(verdict, folder, shown)
    return verdict, ending


def forks_ranks(request: RunRequest) -> bool:
    """Return True if the launcher itself starts the ranks: no daemon of Slurm or PRRTE does."""
    return request.launcher == "mpirun" and not any("dvm" in each for each in request.options)


def _say_end(verdict: Verdict, folder: RunFolder, reported: Collection[int | None]) -> None:
    """Print the last lines of a run that did not complete.

    reported: the ranks whose failures were shown, as those of an elastic job are at once.
    """
    if verdict.code == 0:
        return
    if verdict.code == STOPPED_IN_ORDER and verdict.rank is None:
        say(f"{verdict.what} - exit {verdict.code}; start the job again to go on")
        return
    log = folder.path if verdict.rank is None else folder.log_of(verdict.rank)
    shown = log if log.exists() else folder.path
    if verdict.rank in reported:
        say(f"{verdict.what} - exit {verdict.code}; logs: {near(shown)}")
        return
    report = verdict.report or f"x {verdict.what} - exit {verdict.code}\n"
    text = printable(f"\n{report}  logs: {near(shown)}\n", keeps_lines=True)
    show(text.encode(), sys.stderr)


def _described(job: RunPlan, here: Surroundings) -> str:
    roles = ", ".join(f"{n} {role}{'s' if n > 1 else ''}" for role, n in job.roles.items())
    ranks = f"{job.size} rank{'s' if job.size > 1 else ''}"
    ranks += f" ({roles})" if len(job.roles) > 1 else ""
    place = ", ".join(map(str, job.hosts)) if job.hosts else "this host"
    return f"{ranks} on {place}, {here.facts.mpi.kind}"


def _shown(job: RunPlan) -> str:
    variables = [f"{name}={value}" for name, value in job.variables.items()]
    return shlex.join([*variables, *job.argv])


def _config(
    argv: Sequence[str], request: RunRequest, here: Surroundings, job: RunPlan, notes: Sequence[str]
) -> dict[str, Any]:
    """Return the content of run.json: enough to run the job again.

    It lacks the port of torch's store, which another user who knew it could take first.
    """
    return {
        "command": ["ringcomm", "run", *argv],
        "program": list(request.program),
        "working_folder": os.getcwd(),
        "commit": commit_of(Path.cwd()),
        "started": time_text(time.time()),
        "host": host_name(),
        "pid": os.getpid(),
        "ranks": job.size,
        "roles": dict(job.roles),
        "hosts": [str(host) for host in job.hosts],
        "launcher": list(job.argv),
        "variables": {name: job.variables[name] for name in job.variables if name != "MASTER_PORT"},
        "settings": _settings(here.environ),
        "notes": [*notes, *job.notes],
        "versions": {
            "ringcomm": __version__,
            "python": here.facts.python[0],
            "mpi": str(here.facts.mpi.kind),
            **here.facts.versions,
        },
    }


def commit_of(folder: Path) -> str:
    """Return the commit that is checked out in the folder or one above it; "" if none is.

    Git's own files say so: no program is started for it.
    """
    try:
        for parent in (folder, *folder.parents):
            if (parent / ".git").exists():
                return _head_of(parent / ".git")
    except (OSError, BrokenFileError, UnicodeDecodeError, ValueError):
        pass
    return ""


def _head_of(git: Path) -> str:
    if git.is_file():  # of a worktree, or a submodule
        git = git.parent / _read_of_git(git).decode().removeprefix("gitdir:").strip()
    head = _read_of_git(git / "HEAD").strip()
    if not head.startswith(b"ref:"):
        return _whole(head)
    ref = head[4:].strip().decode()
    shared = git / "commondir"
    common = git / _read_of_git(shared).decode().strip() if shared.exists() else git
    for path in (git / ref, common / ref):
        if path.exists():
            return _whole(_read_of_git(path).strip())
    for line in _read_of_git(common / "packed-refs").splitlines():
        commit, _, name = line.partition(b" ")
        if name == ref.encode():
            return _whole(commit)
    return ""


def _read_of_git(path: Path) -> bytes:
    return read_regular(path, _GIT_MOST)


def _whole(text: bytes) -> str:
    return text.decode() if _COMMIT.fullmatch(text) else ""


def _has_secrets(request: RunRequest) -> bool:
    """Return True if the command line has values of variables that may be passwords."""
    given = (name for name, value in request.variables.items() if value is not None)
    return not all(name.startswith("RINGCOMM_") for name in given)


def _settings(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith("RINGCOMM_")}


def silent_hosts(
    names: Sequence[str],
    agent: Sequence[str],
    environ: Mapping[str, str],
    *,
    own_names: Collection[str],
) -> frozenset[str]:
    """Return which hosts do not run a command within 15 s; this host does.

    If the agent, which is ssh most often, is not installed, all count as those that answer.
    """

    def answers(name: str) -> bool:
        code = run_child([*agent, name, "true"], environ, deadline_s=_HOST_ANSWER_S).code
        return code in (0, _NO_AGENT)

    others = [name for name in names if name not in own_names]
    if not others:
        return frozenset()
    from concurrent.futures import ThreadPoolExecutor  # most jobs start without it, 10 ms sooner

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = dict(zip(others, pool.map(answers, others), strict=True))
    return frozenset(name for name, is_there in found.items() if not is_there)
