"""Decides when the chief saves a checkpoint: after so many seconds, or steps. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Periodic:
    """Checkpoints that are saved between two steps: the first one at once.

    Attributes:
        every_s: seconds between two; None: they do not matter.
        every_steps: steps between two; None: they do not matter.
    """

    every_s: float | None
    every_steps: int | None
    _last: tuple[float, int] | None = None

    def is_due(self, now: float, clock: int) -> bool:
        """Return True if one is to be saved, at this time, after so many steps."""
        if self._last is None:
            return True
        at, before = self._last
        if self.every_s is not None and now - at >= self.every_s:
            return True
        if self.every_steps is None:
            return False
        return clock - before >= self.every_steps or clock < before  # ps.recover() went back

    def note(self, now: float, clock: int) -> None:
        self._last = now, clock
