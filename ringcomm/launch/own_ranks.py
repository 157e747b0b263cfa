"""`-np` of commands that measure on ranks: they start these as `ringcomm run` does."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

_OPTION = "-np"


def add_np(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        _OPTION, type=_at_least_two, metavar="N",
        help="start N ranks on this host; without it, this is one of a job's ranks",
    )  # fmt: skip


def run_own_ranks(command: str, np: int, argv: Sequence[str]) -> int:
    """Run a command on ranks of its own; return its exit code.

    Args:
        command: of `ringcomm`.
        np: number of ranks.
        argv: its arguments, which are no wrong ones.
    """
    from ringcomm.launch.job.command import main  # who is a rank already does not need it

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_np(parser)
    _, rest = parser.parse_known_args(argv)
    # -P: a folder ringcomm in the working folder is not imported.
    return main([_OPTION, str(np), sys.executable, "-P", "-m", "ringcomm", command, *rest])


def _at_least_two(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) > 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 2")
    return int(text)
