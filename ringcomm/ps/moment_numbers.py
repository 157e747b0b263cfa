"""Numbers of moments: snapshots, checkpoints and pauses; see ringcomm.ps.control.commands."""

from __future__ import annotations


def moment_number(rank: int, count: int = 0) -> int:
    """Return the number of a moment, or of a pause, that a rank owns."""
    return rank << 32 | count


def owner_of(number: int) -> int:
    return number >> 32
