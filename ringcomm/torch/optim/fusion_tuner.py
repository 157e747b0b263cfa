"""Finds the bucket size with the shortest steps, by trials in the first steps. Pure."""

from __future__ import annotations

import statistics
from typing import Final

CANDIDATES_MIB: Final = (25.0, 4.0, 8.0, 16.0, 64.0, 128.0)
STEPS_EACH: Final = 6  # the first one makes buckets, and is not counted
_WORTH_A_CHANGE = 0.97  # times the first candidate's time; a smaller gain may be noise


class FusionTuner:
    """Tries bucket sizes (`mib`), the same on all ranks, and notes this rank's times."""

    def __init__(self) -> None:
        self.mib = CANDIDATES_MIB[0]
        self.is_over = False
        self._place = 0
        self._times: list[list[float]] = [[]]

    def note_step(self, seconds: float) -> bool:
        """Note the duration of a step; return True if it was the last one with this size."""
        if self.is_over:
            return False
        times = self._times[self._place]
        times.append(seconds)
        if len(times) < STEPS_EACH:
            return False
        self._place += 1
        self.is_over = self._place == len(CANDIDATES_MIB)
        if not self.is_over:
            self.mib = CANDIDATES_MIB[self._place]
            self._times.append([])
        return True

    def choose(self) -> float:
        """Return the size with the shortest steps; the first size if no other is clearly better."""
        medians = [statistics.median(times[1:]) for times in self._times]
        best = min(range(len(medians)), key=medians.__getitem__)
        is_better = medians[best] < medians[0] * _WORTH_A_CHANGE
        return CANDIDATES_MIB[best if is_better else 0]
