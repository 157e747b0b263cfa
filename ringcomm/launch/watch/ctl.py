"""`ringcomm ctl`: commands for a live job; `ringcomm stacks`: the stacks of its ranks."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ringcomm.engine.control.commands import COMMANDS, Command, parse
from ringcomm.foreign_text import printable
from ringcomm.launch.command_line import RUN_HELP, CommandParser, add_runs, refuse, say
from ringcomm.launch.option_types import seconds
from ringcomm.launch.watch.find_runs import find_job
from ringcomm.launch.watch.rank_rows import RankSample
from ringcomm.launch.watch.send_command import ask
from ringcomm.launch.watch.which_run import LATEST, NoSuchRunError
from ringcomm.status.stacks import stacks_of

_STACKS: Final = "stacks"
_LIMIT_S: Final = 60.0


def main(argv: Sequence[str]) -> int:
    """Carry out a command; return 0 if the job has taken it, 1 if not, 2 if it is no command."""
    parser = _parser()
    if _lacks_run(argv):
        parser.error(f"which run? Name it before the command: {_line_for_latest(argv)}")
    args = parser.parse_args(argv)
    if args.command == [_STACKS]:
        return _print_stacks(args.job, args.runs)
    try:
        command = parse(args.command, others=(_STACKS,))
    except ValueError as error:
        return refuse("ctl", str(error), 2)
    return _give(command, args)


def stacks(argv: Sequence[str]) -> int:
    """Print what each rank of a job executes; return 1 if there is no such job."""
    parser = CommandParser(
        prog="ringcomm stacks",
        description="Print what each rank of a live job of this user executes, on this host, also "
        "if it hangs in C. As `ringcomm ctl RUN stacks`.",
    )
    help_text = f"{RUN_HELP} (default: latest)"
    parser.add_argument("job", nargs="?", default=LATEST, metavar="RUN", help=help_text)
    add_runs(parser)
    args = parser.parse_args(argv)
    return _print_stacks(args.job, args.runs)


def _give(command: Command, args: argparse.Namespace) -> int:
    try:
        ranks, members, run = find_job(args.job, args.runs)
    except NoSuchRunError as error:
        words = [args.job, *args.command]
        hint = f". A run stands before the command: {_line_for_latest(words)}"
        return refuse("ctl", f"{error}{hint if args.job in COMMANDS else ''}")
    except LookupError as error:
        return refuse("ctl", str(error))
    say("ctl", run.title)
    outcome = ask(ranks, members, command, args.timeout)
    if not outcome.is_done:
        return refuse("ctl", outcome.text)
    print(printable(f"{command.text}: {outcome.text}"))
    return 0


def _lacks_run(argv: Sequence[str]) -> bool:
    """Return True if a command stands where the run should, and none follows."""
    words = (*COMMANDS, _STACKS)
    return bool(argv) and argv[0] in words and not any(each in words for each in argv[1:])


def _line_for_latest(command: Sequence[str]) -> str:
    return f"ringcomm ctl {LATEST} {shlex.join(command)}"


def _print_stacks(job: str, runs: Path) -> int:
    try:
        _, members, run = find_job(job, runs)
    except LookupError as error:
        return refuse(_STACKS, str(error))
    say(_STACKS, run.title)
    print("\n".join(map(_stacks_text, members)))
    return 0


def _parser() -> argparse.ArgumentParser:
    rows = [(f"{word} {usage}".rstrip(), text) for word, (usage, text) in COMMANDS.items()]
    rows.append((_STACKS, "print what each rank on this host executes, as `ringcomm stacks`"))
    width = max(len(usage) for usage, _ in rows)
    parser = CommandParser(
        prog="ringcomm ctl",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Control a live job of this user. All its ranks take a command after the same "
        "training step.",
        epilog="\n".join(["commands:", *(f"  {usage:<{width}}  {text}" for usage, text in rows)]),
    )
    parser.add_argument(
        "job", metavar="RUN", help=f'{RUN_HELP}; "" for the only live job of this folder'
    )
    parser.add_argument("command", nargs="+", metavar="COMMAND")
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=_LIMIT_S,
        metavar="S",
        help="seconds to wait for a step boundary of all ranks (default: 60)",
    )
    add_runs(parser)
    return parser


def _stacks_text(sample: RankSample) -> str:
    title = f"rank {sample.rank} (pid {sample.page['pid']})"
    text = printable(stacks_of(sample.page), keeps_lines=True)
    return f"{title}:\n{text or '  does not answer: it is stopped, or dead'}"
