"""run(): calls a function on N new ranks, from a notebook or another program outside of a job."""

from __future__ import annotations

import contextlib
import math
import operator
import pickle
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from ringcomm.atomic_files import BrokenFileError, replacing
from ringcomm.config import environment
from ringcomm.errors import CommTimeoutError, ConfigError, PeerFailedError, RingcommError
from ringcomm.launch.run_rank import CALL, FAILED_BEFORE_MPI, RankReport, dumps, report_path
from ringcomm.trusted_files import read_trusted

if TYPE_CHECKING:
    from ringcomm.launch.run_child_with_deadline import ChildOutcome

R = TypeVar("R")
# The guardian names the first rank that failed. MPICH ends the other ranks before they can name it.
_GUARDIANS_LINE = re.compile(r"^x rank (\d+) \(host [^)]*\) (.+?)(?: - exit \d+)?$", re.MULTILINE)
_TAIL = 20  # lines of a failed job's output
_PATIENCE_S = 3.0


def run(
    func: Callable[..., R],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int = 1,
    *,
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
    mpirun_options: Sequence[str] = (),
    quiet: bool = False,
) -> list[R]:
    """Return the results of func(*args, **kwargs) on each of `np` new ranks, in rank order.

    Starts the ranks with mpirun on this machine, and waits until all have ended. This process does
    not become a rank. `func` must call init() itself. With cloudpickle installed, `func` may be a
    lambda or a function of a notebook; without it, `func` must be in a module.

        def train(lr):
            hvd.init()
            ...
            return accuracy

        hvd.run(train, kwargs={"lr": 0.1}, np=4)

    Args:
        func: the function that each rank calls.
        args: its positional arguments.
        kwargs: its keyword arguments.
        np: number of ranks, which may exceed the number of cores.
        timeout_s: seconds after which the job is ended; None: no limit. The operations of the ranks
            have their own timeouts.
        env: environment variables for the ranks, in addition to those of this process.
        mpirun_options: options of mpirun, which precede the program.
        quiet: discard the output of the ranks; otherwise it is printed after the job has ended.

    Raises:
        PeerFailedError: a rank raised or died. `rank` and `reason` name the first such rank, the
            text has its traceback, and `__cause__` is its exception if that could be sent.
        CommTimeoutError: the job was ended after timeout_s; `missing` are the ranks that had not
            returned.
        ConfigError: mpirun is missing or does not fit, as `ringcomm check` says.
        TypeError: func, an argument or a result cannot be sent to another process.
        ValueError: np is less than 1, or timeout_s is not more than 0.
        RingcommError: the job could not be started, or failed after func had returned.
    """
    np = operator.index(np)
    if np < 1:
        raise ValueError(f"run: np is at least 1, not {np}")
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"run: timeout_s is more than 0, or None, not {timeout_s}")
    call = _packed(func, tuple(args), dict(kwargs or {}))
    environ = environment()
    mpirun, variables = _launcher(np, environ)
    from ringcomm.launch.run_child_with_deadline import outside_of_a_job, run_child

    with tempfile.TemporaryDirectory(prefix="ringcomm-run-") as name:
        folder = Path(name)
        with replacing(folder / CALL, mode=0o600) as file:
            file.write(call)
        outcome = run_child(
            [*mpirun, *mpirun_options, sys.executable, "-P", "-c", _start(folder)],
            {**outside_of_a_job(environ), **variables, **(env or {})},
            deadline_s=math.inf if timeout_s is None else timeout_s,
            is_in_vain=_Start(folder).is_in_vain,
        )
        reports = [_read(folder, rank) for rank in range(np)]
    if not quiet:
        sys.stdout.write(outcome.output)
    if outcome.code is None:
        _raise_late(reports, timeout_s, outcome)
    if outcome.code != 0 or any(report is None or report.error for report in reports):
        _raise_failure(reports, outcome)
    return [pickle.loads(report.result) for report in reports if report is not None]


def _packed(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    pack, is_plain = dumps()
    home = getattr(func, "__module__", None)
    cure = "pip install cloudpickle, or define it in a module that the ranks can import"
    if is_plain and home == "__main__":
        name = getattr(func, "__qualname__", repr(func))
        raise TypeError(f"run: {name} is defined in __main__, where ranks cannot find it: {cure}")
    try:
        return pack((func, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        cure = cure if is_plain else "make it within the function, on the rank"
        raise TypeError(f"run: cannot be sent to other processes: {error}. {cure}") from error


def _launcher(np: int, environ: Mapping[str, str]) -> tuple[list[str], Mapping[str, str]]:
    """Return the mpirun command for np ranks, without a program, and its environment variables."""
    from ringcomm.launch.check_install.gather_facts import gather
    from ringcomm.launch.check_install.judge_facts import judge, problem_of
    from ringcomm.launch.check_install.trial_job import plan_trial

    facts = gather(environ)
    problem = problem_of(judge(facts))
    plan = plan_trial(facts, np)
    if problem is not None or plan is None:
        found, fix = (
            ("no working mpirun", None) if problem is None else (problem.found, problem.fix)
        )
        raise ConfigError(f"run: {found}. {fix or 'Run `ringcomm check`'}")
    return list(plan.mpirun), plan.variables


def _start(folder: Path) -> str:
    """Return the program of a rank, which imports from the same folders as this process."""
    return (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        f"from ringcomm.launch.run_rank import main; main({str(folder)!r})"
    )


class _Start:
    """Looks whether a rank has raised before it started MPI, where others may wait for it.

    MPICH's mpiexec does not end such a job. The others are left some time for errors of their own.
    """

    def __init__(self, folder: Path) -> None:
        self._mark = folder / FAILED_BEFORE_MPI
        self._patient_until = math.inf

    def is_in_vain(self) -> bool:
        if self._patient_until == math.inf and self._mark.exists():
            self._patient_until = time.monotonic() + _PATIENCE_S
        return time.monotonic() > self._patient_until


def _read(folder: Path, rank: int) -> RankReport | None:
    path = report_path(folder, rank)
    try:
        report: RankReport = pickle.loads(read_trusted(path))
    except FileNotFoundError:
        return None
    except BrokenFileError as error:
        raise RingcommError(
            f"run: {path}, in which rank {rank} reports, {error}. Set TMPDIR to a folder that is "
            "yours alone"
        ) from error
    return report


def _raise_late(
    reports: list[RankReport | None], timeout_s: float | None, outcome: ChildOutcome
) -> NoReturn:
    missing = [rank for rank, report in enumerate(reports) if report is None]
    raise CommTimeoutError(
        f"run: the job was ended after timeout_s={timeout_s:g}; ranks that had not returned: "
        f"{', '.join(map(str, missing)) or 'none'}.{_tail(outcome)}",
        missing=missing,
    )


def _raise_failure(reports: list[RankReport | None], outcome: ChildOutcome) -> NoReturn:
    failed = [(r, report) for r, report in enumerate(reports) if report and report.error]
    first = [(r, report) for r, report in failed if report.blames is None]
    if first:
        rank, report = min(first, key=lambda each: each[1].time_s)
        if report.is_about_sending:
            raise TypeError(f"run: rank {rank}: {report.reason}")
        raise PeerFailedError(
            f"run: rank {rank} {report.reason}\n\n{report.error}", rank=rank, reason=report.reason
        ) from _cause(report)
    missing = [rank for rank, report in enumerate(reports) if report is None]
    blames = [report.blames for _, report in failed if report.blames is not None]
    if line := _GUARDIANS_LINE.search(outcome.output):
        blames.insert(0, (int(line[1]), line[2]))
    if missing and not blames and len(missing) < len(reports):
        blames = [(missing[0], f"ended without a result, exit {outcome.code}")]
    if not blames:
        when = "before any rank had returned" if missing else "after the function had returned"
        raise RingcommError(f"run: the job failed {when}, exit {outcome.code}.{_tail(outcome)}")
    rank, reason = blames[0]
    raise PeerFailedError(f"run: rank {rank} {reason}.{_tail(outcome)}", rank=rank, reason=reason)


def _cause(report: RankReport) -> BaseException | None:
    with contextlib.suppress(Exception):  # this process may lack the class of the exception
        error = pickle.loads(report.exception) if report.exception else None
        return error if isinstance(error, BaseException) else None
    return None


def _tail(outcome: ChildOutcome) -> str:
    lines = outcome.last_lines(_TAIL)
    return "\n".join([" Its last lines of output:", *lines]) if lines else " It printed nothing"
