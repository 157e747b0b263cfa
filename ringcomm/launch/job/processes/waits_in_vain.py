"""Finds out that a job waits for what will not come: a host that is lost, a rank that has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Final

from ringcomm.launch.job.processes.ranks_of_this_host import ranks_here
from ringcomm.launch.job.run_folder import RunFolder

_LOOK_S: Final = 1.0  # between two looks whether ranks of this host live
_PATIENCE_S: Final = 3.0  # for ranks to end after another one


class Orphan:
    """Looks whether a launcher whose ranks on this host have ended waits for a lost host."""

    def __init__(self, patience_s: float, silent_hosts: Callable[[], Collection[str]]) -> None:
        self._patience_s = patience_s
        self._silent_hosts = silent_hosts
        self._ask_at = float("inf")
        self._look_at = 0.0

    @property
    def is_due(self) -> bool:
        """True once a second."""
        return time.monotonic() > self._look_at

    def look(self, *, is_idle: bool) -> str:
        """Return that it does so, and for whom, or "". is_idle: no rank of this host lives."""
        now = time.monotonic()
        self._look_at = now + _LOOK_S
        if not is_idle:
            self._ask_at = float("inf")
        elif self._ask_at == float("inf"):
            self._ask_at = now + self._patience_s
        elif now > self._ask_at:
            self._ask_at = now + self._patience_s
            if silent := self._silent_hosts():
                names = ", ".join(sorted(silent))
                return (
                    f"the ranks of this host have ended, and {names} cannot be reached: the "
                    "launcher is ended"
                )
        return ""


class Start:
    """Looks whether a rank has ended before it was through init(), where others wait for it.

    Launchers do not end such a job: Open MPI's not if it is elastic or the rank has ended with 0,
    MPICH's if it has ended with any code.

    Attributes:
        lost: the rank, once that is so.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.lost: int | None = None
        self._folder = folder
        self._look_at = 0.0
        self._patient_until = float("inf")  # all may be about to end, with the same error

    def look(self) -> str:
        """End the others if it has; return a text if the launcher is to be ended. Once a second."""
        now = time.monotonic()
        if now < self._look_at:
            return ""
        self._look_at = now + _LOOK_S
        if self._folder.ends():  # ranks are through init(), where they see each loss
            self._look_at = float("inf")
            return ""
        here = ranks_here(self._folder)
        live = {rank for rank, process in here.items() if process.lives}
        gone = sorted(here.keys() - live)
        if not gone or not live & self._folder.in_init():
            self._patient_until = float("inf")
        elif self._patient_until == float("inf"):
            self._patient_until = now + _PATIENCE_S
        elif now > self._patient_until and self.lost is not None:
            return "ranks in init() do not end: the launcher is ended"
        elif now > self._patient_until:
            self.lost = gone[0]
            self._patient_until = now + 2 * _PATIENCE_S
            self._folder.end_those_in_init(
                f"ringcomm.init: rank {self.lost} ended before it was through init()\n"
            )
        return ""
