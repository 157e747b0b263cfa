"""`ringcomm ctl`: commands for a live job, and the stacks of its ranks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Final

from ringcomm.engine.control.commands import COMMANDS, parse
from ringcomm.foreign_text import printable
from ringcomm.launch.option_types import seconds
from ringcomm.launch.watch.rank_rows import RankSample
from ringcomm.launch.watch.send_command import ask, look
from ringcomm.status.stacks import stacks_of

_STACKS: Final = "stacks"
_LIMIT_S: Final = 60.0


def main(argv: Sequence[str]) -> int:
    """Carry out a command; return 0 if the job has taken it, 1 if not, 2 if it is no command."""
    args = _parser().parse_args(argv)
    try:
        command = None if args.command == [_STACKS] else parse(args.command, others=(_STACKS,))
    except ValueError as error:
        return _refuse(str(error), 2)
    try:
        ranks, members = look(args.job)
    except LookupError as error:
        return _refuse(str(error), 1)
    if command is None:
        print("\n".join(map(_stacks_text, members)))
        return 0
    outcome = ask(ranks, members, command, args.timeout)
    if not outcome.is_done:
        return _refuse(outcome.text, 1)
    print(printable(f"{command.text}: {outcome.text}"))
    return 0


def _parser() -> argparse.ArgumentParser:
    rows = [(f"{word} {usage}".rstrip(), text) for word, (usage, text) in COMMANDS.items()]
    rows.append((_STACKS, "print what each rank on this host executes, also if it hangs"))
    width = max(len(usage) for usage, _ in rows)
    parser = argparse.ArgumentParser(
        prog="ringcomm ctl",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Control a live job of this user. All its ranks take a command after the same "
        "training step.",
        epilog="\n".join(["commands:", *(f"  {usage:<{width}}  {text}" for usage, text in rows)]),
    )
    parser.add_argument(
        "job",
        metavar="JOB|RUN",
        help='beginning of its name, or the folder of its run; "" for the only one',
    )
    parser.add_argument("command", nargs="+", metavar="COMMAND")
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=_LIMIT_S,
        metavar="S",
        help="seconds to wait for a step boundary of all ranks (default: 60)",
    )
    return parser


def _stacks_text(sample: RankSample) -> str:
    title = f"rank {sample.rank} (pid {sample.page['pid']})"
    stacks = printable(stacks_of(sample.page), keeps_lines=True)
    return f"{title}:\n{stacks or '  does not answer: it is stopped, or dead'}"


def _refuse(text: str, code: int) -> int:
    print(f"ringcomm ctl: {printable(text)}", file=sys.stderr)
    return code
