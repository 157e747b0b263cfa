"""The entry point of `ringcomm`: a table of subcommands, which are imported when called."""

from __future__ import annotations

import argparse
import io
import os
import pkgutil
import sys
from collections.abc import Sequence
from typing import Final

import ringcomm
from ringcomm.launch.command_line import CommandParser

_WRONG: Final = 2
_READER_GONE: Final = 141  # as shells show SIGPIPE
# name -> ("module:function", help). The function takes the arguments and returns the exit code.
_COMMANDS: Final = {
    "run": (
        "ringcomm.launch.job.command:main",
        "start a job: ringcomm run -np 4 train.py",
    ),
    "runs": (
        "ringcomm.launch.watch.runs_command:main",
        "list runs and live jobs: state, ranks, how they ended, last and best loss",
    ),
    "logs": (
        "ringcomm.launch.watch.logs_command:main",
        "print what the ranks of a run have written",
    ),
    "top": (
        "ringcomm.launch.watch.top:main",
        "show what the ranks of live jobs do, also of jobs that hang",
    ),
    "ctl": (
        "ringcomm.launch.watch.ctl:main",
        "pause, stop or change a live job",
    ),
    "stacks": (
        "ringcomm.launch.watch.ctl:stacks",
        "print what the ranks of a live job execute, also of one that hangs",
    ),
    "dashboard": (
        "ringcomm.launch.dashboard.command:main",
        "show a run, or live jobs, in a browser",
    ),
    "timeline": (
        "ringcomm.launch.watch.timeline_command:main",
        "merge the timelines of ranks, or sum them up",
    ),
    "check": (
        "ringcomm.launch.check_install.command:main",
        "show what is installed, what does not fit and the fix",
    ),
    "bench": (
        "ringcomm.launch.bench:main",
        "measure every call: ringcomm bench -np 2",
    ),
    "tune": (
        "ringcomm.launch.tune:main",
        "measure the algorithms on the ranks and hosts of a job, and save the table",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code; `argv` is the command line by default.

    Without one, list the commands, and return 2.

    Raises:
        SystemExit: after --help and --version (code 0), or a wrong command line (code 2).
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # names that the terminal's charset lacks
    words = sys.argv[1:] if argv is None else list(argv)
    if not words:
        print(_command_list())
        return _WRONG
    parser = _parser()
    args = parser.parse_args(words)
    if args.command not in _COMMANDS:
        import difflib  # commands that exist need no such thing

        like = difflib.get_close_matches(args.command, _COMMANDS, 1)
        hint = f": did you mean {like[0]}?" if like else ""
        parser.error(f"{args.command!r} is no command{hint}")
    target, _ = _COMMANDS[args.command]
    try:
        code: int = pkgutil.resolve_name(target)(args.arguments)
        if sys.stdout is not None:  # it was closed when Python started
            sys.stdout.flush()
    except BrokenPipeError:  # its reader has gone, as in `ringcomm top --once | head -5`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return _READER_GONE
    return code


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="ringcomm",
        description=(ringcomm.__doc__ or "").partition("\n")[0],
        epilog=_command_list(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ringcomm {ringcomm.__version__}")
    parser.add_argument("command", metavar="command", help="see below")
    # Not add_subparsers(), which would need the options of all commands.
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments")
    rest.required = False  # else the error for options alone also asks for arguments
    return parser


def _command_list() -> str:
    width = max(map(len, _COMMANDS))
    rows = (f"  {name:<{width}}  {text}" for name, (_, text) in _COMMANDS.items())
    return "\n".join(["commands (each has its own --help):", *rows])
