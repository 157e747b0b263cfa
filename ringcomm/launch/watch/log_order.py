"""Orders the lines of the ranks' logs by the times with which they begin. Pure."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from ringcomm.foreign_text import printable

# As Python's logging writes it, and ISO 8601: 2026-11-20 22:10:03,123
_TIME: Final = re.compile(
    r"\W{0,2}(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?", re.ASCII
)
_ESCAPES: Final = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])"
)


def in_order(logs: Mapping[int, Iterable[str]]) -> Iterator[tuple[int, str]]:
    """Yield rank and line of all logs, in the order of time where lines begin with one.

    A line without a time stays behind the one before it. Ranks without any come one after the
    other.

    Args:
        logs: rank -> its lines.
    """
    streams = (_timed(rank, lines) for rank, lines in logs.items())
    for _, rank, line in heapq.merge(*streams, key=lambda each: each[0]):
        yield rank, line


def _timed(rank: int, lines: Iterable[str]) -> Iterator[tuple[str, int, str]]:
    latest = ""
    for line in lines:
        if found := _TIME.match(line):
            day, second, fraction = found.groups()
            latest = f"{day} {second}.{fraction or 0:0<9}"
        yield latest, rank, line


def shown_line(line: str) -> str:
    """Return a line of a log as a terminal would leave it, without what could command that.

    A progress bar writes over itself after each carriage return: the last one is left.
    """
    bare = line.rstrip("\r\n").rpartition("\r")[2]
    return printable(_ESCAPES.sub("", bare), keeps_lines=True)
