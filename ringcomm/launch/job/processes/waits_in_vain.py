"""Finds out that a job waits for what will not come: a host that is lost, a rank that has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Final

from ringcomm.launch.job.processes.ranks_of_this_host import has_company, ranks_here
from ringcomm.launch.job.run_folder import RunFolder
from ringcomm.launched.rank_process import RankProcess

_LOOK_S: Final = 1.0  # between two looks whether ranks of this host live
_PATIENCE_S: Final = 3.0  # for ranks to end after another one
_LEAST_S: Final = 10.0  # for a launcher to end after all ranks, on a machine that swaps, too


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


class Hung:
    """Looks whether a launcher does not end though all ranks of the job have, on this host.

    A shell script whose rank has ended may work on, as may a proxy of the launcher or a process
    that the job has spawned: so it must have no child, nor any other process in its session. Looks
    are counted, not seconds: a halt of this process, or of its host, is none of the launcher.

    Attributes:
        is_found: that is so.
    """

    def __init__(self, folder: RunFolder, size: int, patience_s: float) -> None:
        self.is_found = False
        self._folder, self._size = folder, size
        self._n_looks = max(patience_s, _LEAST_S) / _LOOK_S
        self._n_alone = 0
        self._look_at = 0.0
        self._live: RankProcess | None = None  # one of many, which need no look while it lives

    def look(self, launcher: int) -> str:
        """Return a text if the launcher, a pid, is to be ended. Once a second."""
        now = time.monotonic()
        if now < self._look_at:
            return ""
        self._look_at = now + _LOOK_S
        if self._live is not None and self._live.lives:
            return ""
        here = ranks_here(self._folder).values()
        self._live = next((rank for rank in here if rank.lives), None)
        are_over = len(here) == self._size and self._live is None
        self._n_alone = self._n_alone + 1 if are_over and not has_company(launcher) else 0
        self.is_found = self._n_alone > self._n_looks
        return "all ranks have ended, and the launcher hangs: it is ended" if self.is_found else ""


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
