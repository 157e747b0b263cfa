"""The time by which a server decides."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time: of this process, or of the server of which another is a copy."""

    def monotonic(self) -> float:
        """Return seconds that never go back."""

    def time(self) -> float:
        """Return seconds since 1970."""


class OwnClock:
    """The time of this process, which goes on evenly if the machine's clock is set."""

    def __init__(self) -> None:
        self._began_s = time.time() - time.monotonic()

    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        """See Clock. It ages rows: where clocks jump by an hour, no row may."""
        return self._began_s + time.monotonic()


class CopiedClock:
    """The time at which a primary took note of what is carried out now."""

    def __init__(self) -> None:
        self.monotonic_s = time.monotonic()
        self.time_s = time.time()

    def monotonic(self) -> float:
        return self.monotonic_s

    def time(self) -> float:
        return self.time_s
