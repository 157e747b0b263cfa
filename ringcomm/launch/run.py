"""run(): calls a function on N new ranks, from a notebook or another program outside of a job."""

from __future__ import annotations

import contextlib
import operator
import os
import pickle
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from ringcomm.atomic_files import replacing
from ringcomm.config import environment
from ringcomm.errors import CommTimeoutError, ConfigError, PeerFailedError, RingcommError
from ringcomm.launch.run_rank import CALL, RankReport, dumps, report_path
from ringcomm.regular_files import BrokenFileError, with_checksum, without_checksum
from ringcomm.trusted_files import read_trusted

if TYPE_CHECKING:
    from ringcomm.launch.job.verdict import Verdict

R = TypeVar("R")
_REPORT = re.compile(
    r"x rank (\d+) \(host [^)]*\)(?:, [^,]+,)? (.+?)(?: - exit \d+)?$", re.MULTILINE
)
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
    from ringcomm.launch.job.local_job import command, run_on_this_host
    from ringcomm.launch.job.plan_types import RunRequest

    with tempfile.TemporaryDirectory(prefix="ringcomm-run-") as name:
        folder = Path(name)
        with replacing(folder / CALL, mode=0o600) as file:
            file.write(with_checksum(call))
        request = RunRequest(
            program=command(f"from ringcomm.launch.run_rank import main; main({name!r})"),
            np=np,
            options=tuple(mpirun_options),
            variables={variable: os.fsdecode(value) for variable, value in (env or {}).items()},
        )
        try:
            ending = run_on_this_host(request, folder, environment(), deadline_s=timeout_s)
        except ConfigError as error:
            raise ConfigError(f"run: {error}") from error
        reports = [_read(folder, rank) for rank in range(np)]
    if not quiet:
        sys.stdout.write(ending.output)
    if ending.verdict is None:
        _raise_late(reports, timeout_s, _tail(ending.output))
    if ending.verdict.code != 0 or any(report is None or report.error for report in reports):
        _raise_failure(reports, ending.verdict, _tail(ending.output))
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


def _read(folder: Path, rank: int) -> RankReport | None:
    path = report_path(folder, rank)
    try:
        report: RankReport = pickle.loads(without_checksum(read_trusted(path)))
    except FileNotFoundError:
        return None
    except BrokenFileError as error:
        raise RingcommError(
            f"run: {path}, in which rank {rank} reports, {error}. Set TMPDIR to a folder that is "
            "yours alone, on a good disk"
        ) from error
    return report


def _raise_late(reports: list[RankReport | None], timeout_s: float | None, tail: str) -> NoReturn:
    missing = [rank for rank, report in enumerate(reports) if report is None]
    raise CommTimeoutError(
        f"run: the job was ended after timeout_s={timeout_s:g}; ranks that had not returned: "
        f"{', '.join(map(str, missing)) or 'none'}.{tail}",
        missing=missing,
    )


def _raise_failure(reports: list[RankReport | None], verdict: Verdict, tail: str) -> NoReturn:
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
    if line := _REPORT.match(verdict.report):
        blames.insert(0, (int(line[1]), line[2]))
    if missing and not blames and len(missing) < len(reports):
        blames = [(missing[0], f"ended without a result, exit {verdict.code}")]
    if not blames:
        when = "before any rank had returned" if missing else "after the function had returned"
        raise RingcommError(f"run: the job failed {when}, exit {verdict.code}.{tail}")
    rank, reason = blames[0]
    raise PeerFailedError(f"run: rank {rank} {reason}.{tail}", rank=rank, reason=reason)


def _cause(report: RankReport) -> BaseException | None:
    with contextlib.suppress(Exception):  # this process may lack the class of the exception
        error = pickle.loads(report.exception) if report.exception else None
        return error if isinstance(error, BaseException) else None
    return None


def _tail(output: str) -> str:
    from ringcomm.launch.child import last_lines

    lines = last_lines(output, _TAIL)
    return "\n".join([" Its last lines of output:", *lines]) if lines else " It printed nothing"
