"""`ringcomm runs`: the runs of a folder, and the live jobs that have none."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from ringcomm._core import monotonic_ns
from ringcomm.launch.command_line import CommandParser, add_runs, refuse, say
from ringcomm.launch.watch.find_ranks import Ranks
from ringcomm.launch.watch.find_runs import facts_of, facts_of_job, known_runs
from ringcomm.launch.watch.run_rows import as_json, table


def main(argv: Sequence[str]) -> int:
    """Print the list, the newest run first; return 1 if there is none."""
    args = _parser().parse_args(argv)
    ranks = Ranks()
    ranks.search()
    samples = ranks.sample(monotonic_ns())
    known = sorted(known_runs(args.runs, samples), key=lambda each: -each.began_s)
    known = known[: args.last or None]
    best = "max" if args.max else "min"
    facts = [
        facts_of(each, args.metric, best=best, samples=samples)
        if each.folder
        else facts_of_job(each, samples, args.metric)
        for each in known
    ]
    for problem in [problem for each in facts for problem in each.problems]:
        say("runs", f"{problem}: it does not count")
    if args.json:
        print(json.dumps([as_json(each, args.metric) for each in facts], indent=2))
        return 0
    if not facts:
        return refuse(
            "runs", f"there is no run in {args.runs}, and no live job of this user on this host"
        )
    print(table(facts, args.metric))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="ringcomm runs",
        description="List the runs of a folder, the newest first, and the live jobs of this user "
        "on this host. Those under plain mpirun have no folder, and are listed while they live.",
    )
    add_runs(parser)
    parser.add_argument(
        "--metric", default="loss", metavar="NAME",
        help="show the last and the best value that rank 0 has logged under this name by rc.log() "
        "(default: loss)",
    )  # fmt: skip
    parser.add_argument(
        "--max", action="store_true", help="the best value is the largest, not the smallest"
    )
    parser.add_argument(
        "-n", "--last", type=_count, default=0, metavar="N", help="the newest N alone"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON list instead")
    return parser


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 1")
    return int(text)
