"""The commands that a job takes: a fixed list of words, and nothing else. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

# word -> what follows it, and what it does; `ringcomm ctl --help` shows this list.
COMMANDS: Final = {
    "pause": ("", "wait at the next step boundary"),
    "resume": ("", "go on after a pause"),
    "checkpoint": ("", "call the functions that @rc.on_checkpoint marks"),
    "stop": ("", "call them, then end the job in order"),
    "scale": ("N", "go on with N ranks, if the job is elastic"),
    "set": ("NAME=VALUE", "change a live parameter, such as lr=0.01"),
    "timeline": ("start|stop", "record operations in a file for each rank, or end that"),
}
STOP: Final = "stop"
TEXT_MAX: Final = 255  # bytes
_NAME: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)


class Command(NamedTuple):
    """A command.

    Attributes:
        word: one of COMMANDS.
        name: of the parameter, for "set".
        value: of the parameter, for "set"; "start" or "stop", for "timeline".
        n: number of ranks, for "scale".
    """

    word: str
    name: str = ""
    value: str = ""
    n: int = 0

    @property
    def text(self) -> str:
        what = {
            "scale": str(self.n),
            "set": f"{self.name}={self.value}",
            "timeline": self.value,
        }.get(self.word, "")
        return f"{self.word} {what}".strip()


def parse(words: Sequence[str], *, others: Sequence[str] = ()) -> Command:
    """Return the command that these words are. Raises ValueError, which says what is wrong.

    others: words that the caller knows, too; alone, for it takes these itself.
    """
    word, *rest = list(words) or [""]
    if word in others:
        raise ValueError(f"usage: {word}")
    if word not in COMMANDS:
        raise ValueError(f"{word!r} is no command; there are {', '.join([*COMMANDS, *others])}")
    usage, _ = COMMANDS[word]
    if len(rest) != (1 if usage else 0):
        raise ValueError(f"usage: {word} {usage}".rstrip())
    found = _with_argument(word, rest[0]) if usage else Command(word)
    if len(found.text.encode()) > TEXT_MAX:
        raise ValueError(f"{word}: the command has more than {TEXT_MAX} bytes")
    return found


def _with_argument(word: str, text: str) -> Command:
    if word == "scale":
        if not text.isascii() or not text.isdigit() or not 0 < int(text) < 1 << 31:
            raise ValueError(f"scale: {text!r} is no number of ranks; it must be 1 or more")
        return Command(word, n=int(text))
    if word == "timeline":
        if text not in ("start", "stop"):
            raise ValueError(f"timeline: {text!r} must be start or stop")
        return Command(word, value=text)
    name, equals, value = text.partition("=")
    is_one_line = value.isprintable() and value.strip() == value and value
    if not equals or not _NAME.fullmatch(name) or not is_one_line:
        raise ValueError(f"set: {text!r} must be NAME=VALUE, such as lr=0.01")
    return Command(word, name=name, value=value)


def split(text: str) -> list[str]:
    """Return the words of a command's text: at most two, as a value may contain spaces."""
    return text.split(" ", 1)
