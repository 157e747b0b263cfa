"""Numbers of moments (snapshots, checkpoints, pauses), and the names of the requests about them.

A client that wants a moment asks the leader for a pause, in which nothing moves. Then it asks all
servers to stop rounds, and to say how many are over; to hold what they have after as many rounds as
the first of them; and to release it.
"""

from __future__ import annotations

from typing import Final

PAUSE: Final = "pause"
STOP: Final = "stop"
HOLD: Final = "hold"
RELEASE: Final = "release"


def moment_number(rank: int, count: int = 0) -> int:
    """Return the number of a moment, or of a pause, that a rank owns."""
    return rank << 32 | count


def owner_of(number: int) -> int:
    return number >> 32
