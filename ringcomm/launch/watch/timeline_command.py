"""`ringcomm timeline`: merges the timelines of ranks into a file for Perfetto, or sums them up."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ringcomm.launch.watch.timelines import Event, merge, read_events, summary


def main(argv: Sequence[str]) -> int:
    """Merge or sum up; return 1 if there is no timeline."""
    args = _parser().parse_args(argv)
    output = args.output if args.action == "merge" else None
    try:
        files = _files(args.what)
        if output is not None and output.resolve() in files and _events_of(output):
            return _refuse(f"{output} is one of the timelines that are merged: -o another file")
        events = _events(files, args.what)
        if output is not None:
            output.write_text(json.dumps({"traceEvents": merge(events)}))
    except OSError as error:
        return _refuse(f"{error.filename or output}: {error.strerror}")
    except LookupError as error:
        return _refuse(str(error))
    print(f"{output}: open it in https://ui.perfetto.dev" if output else summary(events))
    return 0


def _refuse(text: str) -> int:
    print(f"ringcomm timeline: {text}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ringcomm timeline",
        description="Work on the files that `ringcomm run --timeline`, RINGCOMM_TIMELINE or "
        "`ringcomm ctl JOB timeline start` have made.",
    )
    actions = parser.add_subparsers(dest="action", required=True)
    for name, text in (
        ("merge", "write one file of all ranks, with aligned clocks, for ui.perfetto.dev"),
        ("summary", "print which operations took the most time, and which rank came last"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument(
            "what", nargs="+", type=Path, metavar="FILE|FOLDER", help="timelines, or their folder"
        )
        if name == "merge":
            action.add_argument("-o", "--output", type=Path, default=Path("merged.json"))
    return parser


def _files(paths: Sequence[Path]) -> dict[Path, Path]:
    """Return the files that are named, or in a folder that is, each once: resolved -> as named."""
    found: list[Path] = []
    for path in paths:
        found += sorted(path.glob("timeline.*.json")) if path.is_dir() else [path]
    return {path.resolve(): path for path in found}


def _events(files: Mapping[Path, Path], paths: Sequence[Path]) -> list[Event]:
    found: list[Event] = []
    for path in files.values():
        events = _events_of(path)
        if not events:
            print(f"ringcomm timeline: {path} has no events of a rank", file=sys.stderr)
        found += events
    if not found:
        raise LookupError(f"no timeline in {', '.join(map(str, paths))}")
    return found


def _events_of(path: Path) -> list[Event]:
    return read_events(path.read_text("utf-8", "replace"))
