"""What the commands of `ringcomm` share: refusals of one line, and options that name a run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from ringcomm.foreign_text import printable

RUN_HELP = (
    "name of a run or of a live job, its only beginning, the folder of a run, or `latest`: the "
    "newest of this folder"
)


class CommandParser(argparse.ArgumentParser):
    """Refuses a wrong command line by the line that counts; --help has the rest."""

    def error(self, message: str) -> NoReturn:
        name = self.prog.split(" [", 1)[0]
        text = printable(message)
        self.exit(2, f"{name}: {text}\n{name} --help lists what there is\n")


def add_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="FOLDER",
        help="folder of the runs that are meant by name (default: runs)",
    )  # fmt: skip


def say(command: str, text: str) -> None:
    print(f"ringcomm {command}: {printable(text)}", file=sys.stderr, flush=True)


def refuse(command: str, text: str, code: int = 1) -> int:
    """Say why a command is not carried out; return its exit code."""
    say(command, text)
    return code
