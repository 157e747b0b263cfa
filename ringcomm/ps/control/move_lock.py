"""Keeps moves and pauses apart, at the server that leads. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from ringcomm.ps.server.core.actions import Key


class MoveLock:
    """A readers-writer lock: pauses share it, and what moves has it alone.

    A pause that is asked for while moves wait for their turn lets the next of them go first, but
    only for so long as its owner says: what they wait for may be another pause, which may last.

    Args:
        now: returns the time in seconds; see look().

    Attributes:
        moving: the unit that moves; None: nothing does.
        pauses: numbers of those that have begun.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._waiting: dict[Hashable, None] = {}  # those that have something to move, in order
        self.moving: Key | None = None
        self.pauses: set[int] = set()
        self._patient: dict[int, float] = {}  # pauses, and until when they let moves go first

    @property
    def is_free(self) -> bool:
        return self.moving is None and not self.pauses

    # --- moves ----------------------------------------------------------------------------------
    def wait(self, owner: Hashable) -> None:
        """Say that there is something to move, until leave()."""
        self._waiting[owner] = None

    def may_move(self, owner: Hashable) -> bool:
        return self.is_free and owner == next(iter(self._waiting), None)

    def begin(self, unit: Key) -> None:
        self.moving = unit

    def end(self) -> None:
        self.moving = None
        self._begin_pauses(moves_wait=False)  # each was patient for a move

    def leave(self, owner: Hashable) -> None:
        del self._waiting[owner]
        self.look()

    # --- pauses ---------------------------------------------------------------------------------
    def pause(self, number: int, patience_s: float) -> bool:
        """Begin a pause as soon as may be; return True once it has begun.

        What is asked for again begins by look() alone: a copy of this server does not hear of
        reads, and must not begin it later than this one.
        """
        if number not in self.pauses and number not in self._patient:
            self._patient[number] = self._now() + patience_s
            self.look()
        return number in self.pauses

    def unpause(self, number: int) -> None:
        self.pauses.discard(number)
        self._patient.pop(number, None)

    @property
    def awaits_time(self) -> bool:
        return bool(self._patient)

    def look(self) -> None:
        """Begin the pauses that have been patient for long enough."""
        if self.moving is None:
            self._begin_pauses(moves_wait=bool(self._waiting))

    def _begin_pauses(self, *, moves_wait: bool) -> None:
        now = self._now()
        due = {n for n, until in self._patient.items() if not moves_wait or now >= until}
        self._patient = {n: until for n, until in self._patient.items() if n not in due}
        self.pauses |= due
