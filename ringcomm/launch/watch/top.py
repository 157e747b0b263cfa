"""`ringcomm top`: the ranks of all live jobs of this user on this host, also of jobs that hang."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ringcomm._core import monotonic_ns
from ringcomm.config import read_settings
from ringcomm.errors import ConfigError
from ringcomm.foreign_text import printable
from ringcomm.launch.command_line import RUN_HELP, CommandParser, add_runs, refuse, say
from ringcomm.launch.job.run_folder import near
from ringcomm.launch.option_types import port, seconds
from ringcomm.launch.watch.diagnosis import Verdicts
from ringcomm.launch.watch.find_ranks import Ranks
from ringcomm.launch.watch.find_runs import find, why_not_live
from ringcomm.launch.watch.other_hosts import RunFolders, of_run, run_folder_named
from ringcomm.launch.watch.rank_rows import (
    AS_RANK,
    COLUMNS,
    RankRow,
    RankSample,
    as_json,
    latest_events,
    row_of,
    title_of,
)
from ringcomm.launch.watch.which_run import KnownRun

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

_EVENTS: Final = 5
_SEARCH_S: Final = 2.0
_LOOKS: Final = 3  # of --once, in the interval
_INTERVAL_S: Final = 1.0
_ONCE_S: Final = 2.4  # diagnosis needs some intervals, which are not shorter than 0.7 s
_SHRINKING: Final = ("state", "operation", "scalars")  # of the live table on a narrow terminal
_Samples = dict[tuple[str, int], RankSample]


def main(argv: Sequence[str]) -> int:
    """Show the jobs until Ctrl-C, or once; return 1 if there is none, or no such one."""
    args = _parser().parse_args(argv)
    try:
        run = _chosen(args.job, args.runs) if args.job else None
    except LookupError as error:
        return refuse("top", str(error))
    what = "" if run is None else run.folder or run.jobs[0]
    if args.prometheus_port is not None:
        return _serve(args.prometheus_port, what)
    jobs = Jobs(what)
    samples = jobs.look()
    for problem in sorted(jobs.problems):
        say("top", problem)
    if not samples:
        nothing = "there is no live job of this user on this host"
        return refuse("top", nothing if run is None or not run.folder else why_not_live(run))
    if args.json:
        print(json.dumps([as_json(each) for each in samples], indent=2))
        return 0
    if args.once:
        before = _by_rank(samples)
        for _ in range(_LOOKS):
            time.sleep((args.interval or _ONCE_S) / _LOOKS)
            samples = jobs.look()
        print(_plain(jobs, samples, before))
        return 0
    return _watch(jobs, args.interval or _INTERVAL_S)


def _chosen(word: str, runs: Path) -> KnownRun:
    ranks = Ranks()
    ranks.search()
    return find(word, runs, ranks.sample(monotonic_ns()))


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="ringcomm top",
        description="Show what each rank of the live jobs of this user on this host does. The jobs "
        "need not help, so it works while they hang.",
    )
    parser.add_argument(
        "job",
        nargs="?",
        default="",
        metavar="RUN",
        help=f"{RUN_HELP}; default: all jobs that have a rank on this host",
    )
    add_runs(parser)
    parser.add_argument("--once", action="store_true", help="print one table as plain text")
    parser.add_argument("--json", action="store_true", help="print one JSON list instead")
    parser.add_argument(
        "--prometheus-port",
        type=port,
        metavar="PORT",
        help="serve the same numbers to Prometheus, at 127.0.0.1:PORT, until Ctrl-C; only to those "
        "that send the token in the file RINGCOMM_PROMETHEUS_TOKEN_FILE, if that is set",
    )
    parser.add_argument(
        "--interval",
        type=seconds,
        metavar="S",
        help="seconds between looks (default: 1), or, with --once, from the first to the last one "
        "(default: 2.4)",
    )
    return parser


class Jobs:
    """The live jobs whose names begin so, or those of a run's folder.

    Attributes:
        problems: pages and files that cannot be read.
    """

    def __init__(self, what: str) -> None:
        self._folder = run_folder_named(what)
        self._name = "" if self._folder else what
        self._ranks = Ranks()
        self._folders = RunFolders(self._folder)
        self._verdicts = Verdicts()
        self._slow: dict[str, list[str]] = {}
        self._searched = float("-inf")

    @property
    def problems(self) -> set[str]:  # see above
        return self._ranks.problems | self._folders.problems

    def look(self) -> list[RankSample]:
        """Return the ranks of the jobs that have a live one."""
        if time.monotonic() > self._searched + _SEARCH_S:
            self._ranks.search()
            self._searched = time.monotonic()
        samples = self._folders.with_other_hosts(self._ranks.sample(monotonic_ns()))
        if self._folder is not None:
            samples = of_run(samples, self._folder, self._folders.problems)
        live = {s.job for s in samples if not s.is_over and s.job.startswith(self._name)}
        chosen = [each for each in samples if each.job in live]
        self._slow = self._verdicts.look(chosen, self._folders.traffic)
        return chosen

    def place_of(self, members: Sequence[RankSample]) -> str:
        """Return the folder of the run of a job; "" if it has none."""
        path = self._folder or self._folders.folder_of(members)
        return "" if path is None else str(near(path))

    def verdicts(self, members: Sequence[RankSample]) -> list[str]:
        return self._slow.get(members[0].job, [])


def _watch(jobs: Jobs, interval_s: float) -> int:
    """Show the jobs until all are over."""
    try:
        if sys.stdout.isatty() and _has_screen():
            _on_terminal(jobs, interval_s)
        else:
            for samples, before in _looks(jobs, interval_s):
                print(_plain(jobs, samples, before), flush=True)
    except KeyboardInterrupt:
        return 0
    except ModuleNotFoundError:
        return refuse("top", "a live table needs rich: pip install 'ringcomm[cli]'; or --once")
    print("ringcomm top: all jobs are over")
    return 0


def _serve(at: int, job: str) -> int:
    try:
        from ringcomm.launch.watch.prometheus import serve
    except ModuleNotFoundError as error:
        how = "pip install 'ringcomm[prometheus]'"
        return refuse("top", f"--prometheus-port needs {error.name}: {how}")
    try:
        serve(at, job, read_settings().prometheus_token_file)
    except ConfigError as error:
        return refuse("top", str(error))
    except OSError as error:
        return refuse("top", f"port {at}: {error.strerror}")
    return 0


def _has_screen() -> bool:
    """Return whether the terminal can draw a table anew: rich shows nothing on one that cannot."""
    from rich.console import Console

    console = Console()
    return console.is_terminal and not console.is_dumb_terminal


def _on_terminal(jobs: Jobs, interval_s: float) -> None:
    from rich.live import Live

    with Live(auto_refresh=False, screen=True) as live:
        for samples, before in _looks(jobs, interval_s):
            live.update(_rich(jobs, samples, before), refresh=True)


def _looks(jobs: Jobs, interval_s: float) -> Iterator[tuple[list[RankSample], _Samples]]:
    before: _Samples = {}
    while samples := jobs.look():
        yield samples, before
        before = _by_rank(samples)
        time.sleep(interval_s)


def _by_rank(samples: Sequence[RankSample]) -> _Samples:
    return {(each.job, each.rank): each for each in samples}


def _tables(
    jobs: Jobs, samples: Sequence[RankSample], before: _Samples
) -> list[tuple[str, list[RankRow], list[str]]]:
    """Return title, rows and further lines of each job."""
    found = []
    for _, group in groupby(samples, key=lambda each: each.job):
        members = list(group)
        rows = [row_of(each, before.get((each.job, each.rank))) for each in members]
        lines = [*latest_events(members, _EVENTS), *map(printable, jobs.verdicts(members))]
        found.append((title_of(members, jobs.place_of(members)), rows, lines))
    return found


def _plain(jobs: Jobs, samples: Sequence[RankSample], before: _Samples) -> str:
    lines = []
    for title, rows, events in _tables(jobs, samples, before):
        shown = _shown_columns(rows)
        texts = [[each[i] for i in shown] for each in (COLUMNS, *(row.texts for row in rows))]
        widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
        lines.append(title)
        lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in texts]
        lines += events
    return "\n".join(lines)


def _rich(jobs: Jobs, samples: Sequence[RankSample], before: _Samples) -> Group:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[Any] = []
    for title, rows, events in _tables(jobs, samples, before):
        table = Table(
            title=Text(title, "table.title"), title_justify="left", box=None, padding=(0, 1, 0, 0)
        )
        shown = _shown_columns(rows, hides_gpu=not _has_values(rows, COLUMNS.index("GPU")))
        for name in (COLUMNS[i] for i in shown):
            is_text = name in _SHRINKING
            table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text)
        for row in rows:
            cells = [_cell(COLUMNS[i], row.texts[i]) for i in shown]
            table.add_row(*cells, style="bold red" if row.is_bad else None)
        parts += [table, *map(Text, events)]
    return Group(*parts)


def _shown_columns(rows: Sequence[RankRow], *, hides_gpu: bool = False) -> list[int]:
    """Return which columns are shown: ranks as they are now only if a process has moved."""
    hidden = set() if any(row.has_moved for row in rows) else {AS_RANK}
    hidden |= {"GPU"} if hides_gpu else set()
    return [i for i, name in enumerate(COLUMNS) if name not in hidden]


def _has_values(rows: Sequence[RankRow], column: int) -> bool:
    return any(row.texts[column] for row in rows)


def _cell(column: str, text: str) -> Text:
    """Return a text without markup, as brackets in the names of operations are none."""
    from rich.text import Text

    if column == "state":  # how a rank failed takes several lines, if it must
        return Text(text)
    return Text(text, no_wrap=True, overflow="ellipsis")
