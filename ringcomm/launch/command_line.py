"""What the commands of `ringcomm` share: refusals of one line, and options that name a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ringcomm.foreign_text import printable

RUN_HELP = (
    "name of a run or of a live job, its only beginning, the folder of a run, or `latest`: the "
    "newest of this folder"
)


class CommandParser(argparse.ArgumentParser):
    """Refuses a wrong command line by the line that counts; --help has the rest."""

    def parse_args(  # type: ignore[override]  # its overloads differ by the namespace alone
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._meant_by(unknown)}")
        return found

    def _meant_by(self, unknown: Sequence[str]) -> str:
        """Return the option that the first of these words may stand for, as a question; or ""."""
        import difflib  # command lines that are right need no such thing

        word = next((each.partition("=")[0] for each in unknown if each.startswith("-")), "")
        like = difflib.get_close_matches(word, self._long_options(), 1)
        return f": did you mean {like[0]}?" if like else ""

    def _long_options(self) -> Iterator[str]:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    yield from parser._long_options()
            elif action.help != argparse.SUPPRESS:
                yield from (each for each in action.option_strings if each.startswith("--"))

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
