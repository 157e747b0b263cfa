"""The time in which this process ran: a deadline does not count while it is stopped. Pure."""

from __future__ import annotations

import math
from typing import Final

STANDSTILL_S: Final = 5.0  # polls take milliseconds
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
        pause = now - self._last
        self._last = now
        if pause > _LONGEST_PAUSE_S:
            self._stopped_s += pause
        return now - self._stopped_s


class Standstill:
    """How long one driver has been inside one poll, without the time in which we were stopped.

    A poll waits for nothing of its own. One that lasts is inside MPI, which may read a connection
    to its port without a deadline.
    """

    def __init__(self) -> None:
        self._seen: object = None
        self._last = -math.inf
        self._stood_s = 0.0
        self._is_told = False

    def at(self, now: float, driver: object, n_passes: int) -> float:
        """Return the seconds, once per standstill that is longer than STANDSTILL_S; else 0.

        Args:
            now: time.monotonic(); to be called at least once a second while there is a driver.
            driver: who drives, or when its call of MPI began; None if there is none.
            n_passes: grows whenever a driver begins, or comes through a poll.
        """
        if driver is None or self._seen != (driver, n_passes):
            self._seen, self._stood_s, self._is_told = (driver, n_passes), 0.0, False
        else:
            self._stood_s += min(now - self._last, _LONGEST_PAUSE_S)
        self._last = now
        if self._is_told or self._stood_s < STANDSTILL_S:
            return 0.0
        self._is_told = True
        return self._stood_s
