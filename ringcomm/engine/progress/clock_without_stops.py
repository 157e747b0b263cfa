"""The time in which this process ran: a deadline does not count while it is stopped. Pure."""

from __future__ import annotations

from typing import Final

# A wait looks at the clock every few milliseconds. After a longer pause this process was stopped:
# by a scheduler that suspends jobs (SIGSTOP), or because the machine slept.
_LONGEST_PAUSE_S: Final = 1.0


class RunningTime:
    """Reads the clock for one wait, without the time in which this process was stopped.

    If all ranks of a job are stopped for longer than a deadline, none of them could come.

    Args:
        start: time.monotonic() when the wait began.
    """

    def __init__(self, start: float) -> None:
        self._last = start
        self._stopped_s = 0.0

    def at(self, now: float) -> float:
        """Return time.monotonic(), which is `now`, less the pauses since the start."""
        pause = now - self._last
        self._last = now
        if pause > _LONGEST_PAUSE_S:
            self._stopped_s += pause
        return now - self._stopped_s
