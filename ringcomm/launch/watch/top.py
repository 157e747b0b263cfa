"""`ringcomm top`: the ranks of all live jobs of this user on this host, also of jobs that hang."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from ringcomm._core import monotonic_ns
from ringcomm.launch.watch.find_ranks import Ranks
from ringcomm.launch.watch.rank_rows import (
    COLUMNS,
    RankSample,
    Row,
    as_json,
    latest_events,
    row_of,
    title_of,
)
from ringcomm.launch.watch.verdicts import Verdicts

if TYPE_CHECKING:
    from rich.console import Group

_EVENTS: Final = 5
_SEARCH_S: Final = 2.0
_LOOKS: Final = 3  # of --once, in the interval
_Samples = dict[tuple[str, int], RankSample]
_verdicts: defaultdict[str, Verdicts] = defaultdict(Verdicts)  # by job


def main(argv: Sequence[str]) -> int:
    """Show the jobs until Ctrl-C, or once; return 1 if there is none, or no such one."""
    args = _parser().parse_args(argv)
    if args.prometheus_port is not None:
        return _serve(args.prometheus_port, args.job)
    ranks = Ranks()
    ranks.search()
    samples = _chosen(ranks, args.job)
    for problem in sorted(ranks.problems):
        print(f"ringcomm top: {problem}", file=sys.stderr)
    if not samples:
        what = f"no live job {args.job!r}" if args.job else "no live job"
        print(f"ringcomm top: {what} of this user on this host", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps([as_json(each) for each in samples], indent=2))
        return 0
    if args.once:
        before = _by_rank(samples)
        for _ in range(_LOOKS):
            time.sleep(args.interval / _LOOKS)
            samples = _chosen(ranks, args.job)
        print(_plain(samples, before))
        return 0
    return _watch(ranks, args.job, args.interval)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ringcomm top",
        description="Show what each rank of the live jobs of this user on this host does. The jobs "
        "need not help, so it works while they hang.",
    )
    parser.add_argument(
        "job", nargs="?", default="", help="beginning of a job's name; default: all"
    )
    parser.add_argument("--once", action="store_true", help="print one table as plain text")
    parser.add_argument("--json", action="store_true", help="print one JSON list instead")
    parser.add_argument(
        "--prometheus-port",
        type=int,
        metavar="PORT",
        help="serve the same numbers to Prometheus, at 127.0.0.1:PORT, until Ctrl-C",
    )
    parser.add_argument(
        "--interval",
        type=float,
        default=1.0,
        metavar="S",
        help="seconds between looks (default: 1)",
    )
    return parser


def _watch(ranks: Ranks, job: str, interval_s: float) -> int:
    """Show the jobs until all are over."""
    try:
        if sys.stdout.isatty():
            _on_terminal(ranks, job, interval_s)
        else:
            for samples, before in _looks(ranks, job, interval_s):
                print(_plain(samples, before), flush=True)
    except KeyboardInterrupt:
        return 0
    except ModuleNotFoundError:
        print(
            "ringcomm top: a live table needs rich: pip install 'ringcomm[cli]'; or --once",
            file=sys.stderr,
        )
        return 1
    print("ringcomm top: all jobs are over")
    return 0


def _serve(port: int, job: str) -> int:
    try:
        from ringcomm.launch.watch.prometheus import serve
    except ModuleNotFoundError as error:
        print(
            f"ringcomm top: --prometheus-port needs {error.name}: "
            "pip install 'ringcomm[prometheus]'",
            file=sys.stderr,
        )
        return 1
    try:
        serve(port, job)
    except OSError as error:
        print(f"ringcomm top: port {port}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _on_terminal(ranks: Ranks, job: str, interval_s: float) -> None:
    from rich.live import Live

    with Live(auto_refresh=False, screen=True) as live:
        for samples, before in _looks(ranks, job, interval_s):
            live.update(_rich(samples, before), refresh=True)


def _looks(
    ranks: Ranks, job: str, interval_s: float
) -> Iterator[tuple[list[RankSample], _Samples]]:
    """Yield samples and those before them, until the jobs are over."""
    before: _Samples = {}
    searched = time.monotonic()
    while samples := _chosen(ranks, job):
        yield samples, before
        before = _by_rank(samples)
        time.sleep(interval_s)
        if time.monotonic() > searched + _SEARCH_S:
            ranks.search()
            searched = time.monotonic()


def _chosen(ranks: Ranks, job: str) -> list[RankSample]:
    """Return samples of the jobs with this beginning that have a live rank."""
    samples = ranks.sample(monotonic_ns())
    live = {each.job for each in samples if not each.is_over and each.job.startswith(job)}
    chosen = [each for each in samples if each.job in live]
    for job_name in live:
        _verdicts[job_name].add(_live(chosen, job_name))
    return chosen


def _live(samples: Sequence[RankSample], job: str) -> list[RankSample]:
    return [each for each in samples if each.job == job and not each.is_over]


def _by_rank(samples: Sequence[RankSample]) -> _Samples:
    return {(each.job, each.rank): each for each in samples}


def _tables(
    samples: Sequence[RankSample], before: _Samples
) -> list[tuple[str, list[Row], list[str]]]:
    """Return title, rows and further lines of each job."""
    found = []
    for _, group in groupby(samples, key=lambda each: each.job):
        members = list(group)
        rows = [row_of(each, before.get((each.job, each.rank))) for each in members]
        job = members[0].job
        lines = latest_events(members, _EVENTS) + _verdicts[job].texts(_live(members, job))
        found.append((title_of(members), rows, lines))
    return found


def _plain(samples: Sequence[RankSample], before: _Samples) -> str:
    lines = []
    for title, rows, events in _tables(samples, before):
        texts = [COLUMNS, *(row.texts for row in rows)]
        widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
        lines.append(title)
        lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in texts]
        lines += events
    return "\n".join(lines)


def _rich(samples: Sequence[RankSample], before: _Samples) -> Group:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[Any] = []
    for title, rows, events in _tables(samples, before):
        table = Table(title=title, title_justify="left", expand=False)
        for column in COLUMNS:
            is_number = column in ("rank", "pid", "step", "for", "wait", "MB/s", "CPU", "memory")
            table.add_column(column, justify="right" if is_number else "left")
        for row in rows:  # Text: brackets in the names of operations are no markup
            table.add_row(*map(Text, row.texts), style="bold red" if row.is_bad else None)
        parts += [table, *map(Text, events)]
    return Group(*parts)
