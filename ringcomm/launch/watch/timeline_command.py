"""`ringcomm timeline`: merges the timelines of ranks into a file for Perfetto, or sums them up."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ringcomm.launch.watch.timelines import Event, merge, read_events, summary


def main(argv: Sequence[str]) -> int:
    """Merge or sum up; return 1 if there is no timeline."""
    args = _parser().parse_args(argv)
    try:
        events = _events(args.what)
        if args.action == "summary":
            print(summary(events))
            return 0
        args.output.write_text(json.dumps({"traceEvents": merge(events)}))
    except OSError as error:
        return _refuse(f"{error.filename or args.output}: {error.strerror}")
    except LookupError as error:
        return _refuse(str(error))
    print(f"{args.output}: open it in https://ui.perfetto.dev")
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


def _events(paths: Sequence[Path]) -> list[Event]:
    files: list[Path] = []
    for path in paths:
        files += sorted(path.glob("timeline.*.json")) if path.is_dir() else [path]
    found: list[Event] = []
    for path in files:
        events = read_events(path.read_text(errors="replace"))
        if not events:
            print(f"ringcomm timeline: {path} has no events of a rank", file=sys.stderr)
        found += events
    if not found:
        raise LookupError(f"no timeline in {', '.join(map(str, paths))}")
    return found
