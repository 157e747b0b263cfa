"""`ringcomm timeline`: merges the timelines of ranks into a file for Perfetto, or sums them up."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

from ringcomm.foreign_text import printable
from ringcomm.launch.command_line import CommandParser
from ringcomm.launch.watch.find_runs import RUNS, find
from ringcomm.launch.watch.timelines import Event, merge, read_events, summary
from ringcomm.launch.watch.which_run import NoSuchRunError
from ringcomm.regular_files import BrokenFileError, open_regular

_LINE_NBYTES: Final = 1 << 20  # more than a line of a timeline has


def main(argv: Sequence[str]) -> int:
    """Merge or sum up; return 1 if there is no timeline."""
    args = _parser().parse_args(argv)
    output = args.output if args.action == "merge" else None
    try:
        files = _files([_place_of(each) for each in args.what])
        if output is not None and output.resolve() in files and _events_of(output)[0]:
            return _refuse(f"{output} is one of the timelines that are merged: -o another file")
        events = _events(files, args.what)
        if output is not None:
            output.write_text(json.dumps({"traceEvents": merge(events)}))
    except OSError as error:
        return _refuse(f"{error.filename or output}: {error.strerror}")
    except (LookupError, BrokenFileError) as error:
        return _refuse(str(error))
    print(f"{output}: open it in https://ui.perfetto.dev" if output else summary(events))
    return 0


def _refuse(text: str) -> int:
    _say(text)
    return 1


def _say(text: str) -> None:
    print(f"ringcomm timeline: {printable(text)}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="ringcomm timeline",
        description="Work on the files that `ringcomm run --timeline`, RINGCOMM_TIMELINE or "
        "`ringcomm ctl RUN timeline start` have made.",
    )
    actions = parser.add_subparsers(dest="action", required=True)
    for name, text in (
        ("merge", "write one file of all ranks, with aligned clocks, for ui.perfetto.dev"),
        ("summary", "print which operations took the most time, and which rank came last"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument(
            "what",
            nargs="+",
            type=Path,
            metavar="FILE|FOLDER|RUN",
            help="timelines, their folder, or the name of a run in `runs`, or `latest`",
        )
        if name == "merge":
            action.add_argument("-o", "--output", type=Path, default=Path("merged.json"))
    return parser


def _place_of(path: Path) -> Path:
    """Return a path that is there, or the folder of the run that it means; else the path.

    Raises LookupError if it means several runs.
    """
    if path.exists():
        return path
    with contextlib.suppress(NoSuchRunError):
        run = find(str(path), RUNS, [])  # of a live job nobody knows where its files are
        if run.folder:
            return Path(run.folder)
    return path


def _files(paths: Sequence[Path]) -> dict[Path, Path]:
    """Return the files that are named, or in a folder that is, each once: resolved -> as named."""
    found: list[Path] = []
    for path in paths:
        found += sorted(path.glob("timeline.*.json")) if path.is_dir() else [path]
    return {path.resolve(): path for path in found}


def _events(files: Mapping[Path, Path], paths: Sequence[Path]) -> list[Event]:
    found: list[Event] = []
    for path in files.values():
        try:
            events, n_bad = _events_of(path)
        except BrokenFileError as error:
            _say(f"{error}: left out")
            continue
        if not events:
            _say(f"{path} has no events of a rank")
        elif n_bad:
            lines = "1 line that is no event" if n_bad == 1 else f"{n_bad} lines that are no events"
            _say(f"{path} has {lines}, as if it were damaged: left out")
        found += events
    if not found:
        raise LookupError(f"no timeline in {', '.join(map(str, paths))}")
    return found


def _events_of(path: Path) -> tuple[list[Event], int]:
    try:
        with io.BufferedReader(open_regular(path)) as file:
            return read_events(_lines_of(file))
    except BrokenFileError as error:
        raise BrokenFileError(f"{path} {error}") from error


def _lines_of(file: IO[bytes]) -> Iterator[bytes]:
    """Yield lines until one is longer than any of a timeline: what follows is none."""
    while line := file.readline(_LINE_NBYTES):
        yield line
        if len(line) == _LINE_NBYTES:
            return
