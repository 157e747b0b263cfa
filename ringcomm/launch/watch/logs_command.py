"""`ringcomm logs`: the output of a run's ranks, while it runs and later."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import resource
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

from ringcomm._core import monotonic_ns
from ringcomm.launch.command_line import RUN_HELP, CommandParser, add_runs, refuse, say
from ringcomm.launch.job.output_lines import prefix_of
from ringcomm.launch.job.run_folder import LAUNCHER_LOG, RunFolder
from ringcomm.launch.watch.find_ranks import Ranks
from ringcomm.launch.watch.find_runs import facts_of, find
from ringcomm.launch.watch.log_order import in_order, shown_line
from ringcomm.launch.watch.run_rows import over_text
from ringcomm.launch.watch.which_run import LATEST, KnownRun
from ringcomm.ranks_as_text import ranks_text

_PIECE: Final = 1 << 16
_LINE_MAX: Final = 1 << 20  # bytes; a longer line is shown in parts
_TICK_S: Final = 0.2
_LOOK_S: Final = 1.0  # between two looks whether the run is over


def main(argv: Sequence[str]) -> int:
    """Print the logs; return 1 if there is no such run or rank, 2 if the pattern is none."""
    args = _parser().parse_args(argv)
    try:
        run = _find(args.run, args.runs)
    except LookupError as error:
        return refuse("logs", str(error))
    if not run.folder:
        return refuse(
            "logs",
            f"job {run.jobs[0]} in {run.place} is one of mpirun's, which keeps no logs: its output "
            "is where mpirun's is. `ringcomm run` keeps them",
        )
    folder, facts = RunFolder(Path(run.folder)), facts_of(run)
    size = facts.config.ranks
    if size is not None and (missing := [rank for rank in args.ranks if rank >= size]):
        what = "1 rank, 0," if size == 1 else f"ranks 0-{size - 1},"
        return refuse("logs", f"{run.place} has {what} and no rank {missing[0]}")
    over = facts.end is not None or facts.is_live is False
    say("logs", over_text(facts) if over else run.title)
    _allow_many_files()
    show = _Printer(args.grep, has_prefix=len(args.ranks) != 1 and size != 1)
    with contextlib.closing(Logs(folder, args.ranks, size)) as logs:
        with contextlib.suppress(KeyboardInterrupt):
            for rank, line in in_order(logs.until_now()):
                show(rank, line)
            if args.follow and not over:
                _follow(run, logs, show)
            for rank, line in logs.rest():
                show(rank, line)
        return 0 if logs.found else _without_logs(folder, run, args.ranks)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="ringcomm logs",
        description="Print what the ranks of a run have written, with the number of the rank "
        "before each line. Lines that begin with a date and a time are in the order of time over "
        "all ranks; else rank follows rank.",
    )
    parser.add_argument("run", nargs="?", default=LATEST, metavar="RUN", help=f"{RUN_HELP} "
                        "(default: latest)")  # fmt: skip
    parser.add_argument(
        "--rank", dest="ranks", type=_rank, action="append", default=[], metavar="N",
        help="this rank alone; several times for several",
    )  # fmt: skip
    parser.add_argument(
        "-f", "--follow", action="store_true", help="go on as lines come, until the run is over"
    )
    parser.add_argument(
        "--grep", type=_pattern, metavar="PATTERN",
        help="the lines alone in which this regular expression of Python is found",
    )  # fmt: skip
    add_runs(parser)
    return parser


def _rank(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a rank: a number >= 0")
    return int(text)


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error


def _find(word: str, runs: Path) -> KnownRun:
    ranks = Ranks()
    ranks.search()
    return find(word, runs, ranks.sample(monotonic_ns()))


class Logs:
    """The logs of some ranks of a run, read once.

    Args:
        folder: of the run.
        ranks: those that are wanted; (): all.
        size: number of ranks; None: that is not known.

    Attributes:
        found: the ranks that have a log so far.
    """

    def __init__(self, folder: RunFolder, ranks: Collection[int], size: int | None) -> None:
        self.found: dict[int, _Log] = {}
        self._folder = folder
        self._wanted = sorted(set(ranks)) or (None if size is None else list(range(size)))

    def until_now(self) -> dict[int, Iterator[str]]:
        """Return the whole lines of each rank until the present end of its log."""
        self._open_new()
        return {rank: log.lines() for rank, log in self.found.items()}

    def rest(self) -> Iterator[tuple[int, str]]:
        """Yield lines that have no end."""
        for rank, log in self.found.items():
            if line := log.take_rest():
                yield rank, line

    def close(self) -> None:
        for log in self.found.values():
            log.close()

    def _open_new(self) -> None:
        wanted = self._folder.ranks_with_log() if self._wanted is None else self._wanted
        for rank in wanted:
            if rank not in self.found and (file := self._folder.open_log_of(rank)) is not None:
                self.found[rank] = _Log(file)


class _Log:
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file  # without a buffer
        self._rest = b""

    def lines(self) -> Iterator[str]:
        """Yield the lines until the present end; a rank may write faster than they are shown."""
        left = os.fstat(self._file.fileno()).st_size - self._file.tell()
        while left > 0 and (data := self._file.read(min(left, _PIECE))):
            left -= len(data)
            *whole, self._rest = (self._rest + data).split(b"\n")
            yield from (line.decode(errors="replace") for line in whole)
            if len(self._rest) >= _LINE_MAX:
                yield self.take_rest()

    def close(self) -> None:
        self._file.close()

    def take_rest(self) -> str:
        rest, self._rest = self._rest, b""
        return rest.decode(errors="replace")


class _Printer:
    def __init__(self, pattern: re.Pattern[str] | None, *, has_prefix: bool) -> None:
        self._pattern, self._has_prefix = pattern, has_prefix

    def __call__(self, rank: int, line: str) -> None:
        text = shown_line(line)
        if self._pattern is None or self._pattern.search(text):
            prefix = prefix_of([rank]).decode() if self._has_prefix and text.strip() else ""
            print(prefix + text)


def _follow(run: KnownRun, logs: Logs, show: _Printer) -> None:
    """Print what comes until the run is over, and how it ended."""
    sys.stdout.flush()
    look_at = time.monotonic() + _LOOK_S
    facts = facts_of(run)
    while True:
        is_over = facts.end is not None or facts.is_live is False
        for rank, line in _new_lines(logs.until_now()):
            show(rank, line)
        sys.stdout.flush()
        if is_over:
            say("logs", over_text(facts))
            return
        time.sleep(_TICK_S)  # a file tells nobody that it grows
        if time.monotonic() > look_at:
            look_at, facts = time.monotonic() + _LOOK_S, facts_of(run)


def _new_lines(logs: Mapping[int, Iterator[str]]) -> Iterator[tuple[int, str]]:
    for rank, lines in logs.items():
        for line in lines:
            yield rank, line


def _without_logs(folder: RunFolder, run: KnownRun, ranks: Sequence[int]) -> int:
    """Say that no rank has a log; return the exit code."""
    who = f"rank {ranks_text(sorted(set(ranks)))}" if ranks else "no rank"
    text = f"{who} of {run.place} has {'no' if ranks else 'a'} log"
    try:
        if os.stat(LAUNCHER_LOG, dir_fd=folder.fileno()).st_size:
            text += f"; what mpirun has said is in {folder.path / LAUNCHER_LOG}"
    except OSError:  # there is none
        pass
    return refuse("logs", text)


def _allow_many_files() -> None:
    """Let this process open a file for each rank; 1024 are allowed most often."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
