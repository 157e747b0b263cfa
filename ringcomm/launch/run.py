"""run() calls a function on N new ranks, from a notebook or another program that is not a rank."""

from __future__ import annotations

import contextlib
import math
import operator
import pickle
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from ringcomm import config
from ringcomm.errors import CommTimeoutError, ConfigError, PeerFailedError, RingcommError
from ringcomm.launch.rank import CALL, Report, dumps, report_path

if TYPE_CHECKING:
    from ringcomm.launch.child import Outcome

R = TypeVar("R")
# The guardian names the first rank that failed; MPICH ends the others before they can (measured).
_GUARDIANS_LINE = re.compile(r"^x rank (\d+) \(host [^)]*\) (.+?)(?: - exit \d+)?$", re.MULTILINE)
_TAIL = 20  # lines of a failed job's output


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
    """Return what func(*args, **kwargs) returns on each of `np` new ranks, in rank order.

    Starts them with mpirun on this machine and waits until all have ended; this process becomes no
    rank. func calls init() itself. It and its arguments travel by cloudpickle if that is installed,
    so that functions of a notebook and lambdas work; else by pickle, and func must be in a module.

        def train(lr):
            hvd.init()
            ...
            return accuracy

        hvd.run(train, kwargs={"lr": 0.1}, np=4)

    Args:
        func: what each rank calls.
        args: its arguments.
        kwargs: its arguments by keyword.
        np: number of ranks; there may be more than cores.
        timeout_s: the job is ended after that; None: never, for its own waits have deadlines.
        env: environment variables on top of this process's.
        mpirun_options: as mpirun takes them, before the program.
        quiet: do not print what the ranks have printed; it is printed when the job has ended.

    Raises:
        PeerFailedError: a rank raised or died. `rank` and `reason` say which one was first, the
            text has its traceback, and what it raised is the cause (`__cause__`) if it could be
            sent.
        CommTimeoutError: timeout_s is over; `missing` are the ranks that had not returned.
        ConfigError: no mpirun, or one that does not fit: what `ringcomm check` says.
        TypeError: func or an argument, or what it returned, cannot be sent to another process.
        ValueError: np is less than 1, or timeout_s is not more than 0.
        RingcommError: the job could not be started, or failed after func had returned.
    """
    np = operator.index(np)
    if np < 1:
        raise ValueError(f"run: np is at least 1, not {np}")
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"run: timeout_s is more than 0, or None, not {timeout_s}")
    call = _packed(func, tuple(args), dict(kwargs or {}))
    environ = config.environment()
    mpirun, variables = _launcher(np, environ)
    from ringcomm.launch.child import outside_of_a_job, run_child

    with tempfile.TemporaryDirectory(prefix="ringcomm-run-") as name:
        folder = Path(name)
        (folder / CALL).write_bytes(call)
        outcome = run_child(
            [*mpirun, *mpirun_options, sys.executable, "-P", "-c", _start(folder)],
            {**outside_of_a_job(environ), **variables, **(env or {})},
            deadline_s=math.inf if timeout_s is None else timeout_s,
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
        raise TypeError(f"run: {name} is of __main__, where ranks do not find it: {cure}")
    try:
        return pack((func, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        cure = cure if is_plain else "make it within the function, on the rank"
        raise TypeError(f"run: cannot be sent to other processes: {error}. {cure}") from error


def _launcher(np: int, environ: Mapping[str, str]) -> tuple[list[str], Mapping[str, str]]:
    """Return the command that starts np ranks, up to its options, and the variables it needs."""
    from ringcomm.launch.findings import judge
    from ringcomm.launch.gather import gather
    from ringcomm.launch.trial import plan_trial, problem_of

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
    """Return the program of a rank; it imports what this process could."""
    return (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        f"from ringcomm.launch.rank import main; main({str(folder)!r})"
    )


def _read(folder: Path, rank: int) -> Report | None:
    try:
        report: Report = pickle.loads(report_path(folder, rank).read_bytes())
    except FileNotFoundError:
        return None
    return report


def _raise_late(
    reports: list[Report | None], timeout_s: float | None, outcome: Outcome
) -> NoReturn:
    missing = [rank for rank, report in enumerate(reports) if report is None]
    raise CommTimeoutError(
        f"run: the job was ended after timeout_s={timeout_s:g}; ranks that had not returned: "
        f"{', '.join(map(str, missing)) or 'none'}.{_tail(outcome)}",
        missing=missing,
    )


def _raise_failure(reports: list[Report | None], outcome: Outcome) -> NoReturn:
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


def _cause(report: Report) -> BaseException | None:
    with contextlib.suppress(Exception):  # it is of a class that cannot be made here
        error = pickle.loads(report.exception) if report.exception else None
        return error if isinstance(error, BaseException) else None
    return None


def _tail(outcome: Outcome) -> str:
    lines = outcome.last_lines(_TAIL)
    return "\n".join([" It printed at last:", *lines]) if lines else " It printed nothing"
