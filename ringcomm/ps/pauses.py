"""Who lets no partition move: pauses, each with the rank that owns it. Decisions only.

Moves begin while nobody has a pause, and a pause while nothing moves. One that is asked for while
moves wait for their turn lets the next of them go first, but only for so long as its owner says:
what they wait for may be another pause, which may last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

Grant = Callable[[], None]


def pause_number(rank: int, count: int = 0) -> int:
    """Return the number of a pause that a rank owns."""
    return rank << 32 | count


def owner_of(number: int) -> int:
    """Return the rank that owns a pause, or another moment of that number."""
    return number >> 32


class _Asked(NamedTuple):
    number: int
    grant: Grant
    until: float  # when it ceases to let moves go first


class Pauses:
    """The pauses that have begun, and those that are asked for."""

    def __init__(self) -> None:
        self._numbers: set[int] = set()
        self._asked: list[_Asked] = []

    @property
    def may_move(self) -> bool:
        """True if no pause has begun."""
        return not self._numbers

    @property
    def are_asked(self) -> bool:
        """True if some pause has not begun."""
        return bool(self._asked)

    def ask(self, number: int, grant: Grant, until: float) -> None:
        """Let grant() be called when the pause begins.

        Args:
            number: see pause_number().
            grant: is to tell its owner.
            until: the time at which it begins though moves wait, if none is under way.
        """
        self._asked.append(_Asked(number, grant, until))

    def begin_due(self, now: float, *, moves_wait: bool) -> list[Grant]:
        """Let the pauses begin whose time has come, while nothing moves; return what tells of it.

        Args:
            now: the time.
            moves_wait: moves wait for their turn.
        """
        due = [each for each in self._asked if not moves_wait or now >= each.until]
        self._asked = [each for each in self._asked if each not in due]
        self._numbers.update(each.number for each in due)
        return [each.grant for each in due]

    def end(self, number: int) -> None:
        """End a pause, or give up one that has not begun."""
        self._end(lambda each: each == number)

    def leave(self, rank: int) -> None:
        """End all that a rank owns."""
        self._end(lambda each: owner_of(each) == rank)

    def _end(self, is_over: Callable[[int], bool]) -> None:
        self._numbers = {each for each in self._numbers if not is_over(each)}
        self._asked = [each for each in self._asked if not is_over(each.number)]
