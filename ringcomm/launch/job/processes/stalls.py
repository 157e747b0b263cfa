"""Finds out that a job waits in vain: for a lost host, for ranks that never start or have ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Final

from ringcomm.launch.job.processes.local_ranks import company, ranks_here
from ringcomm.launch.job.run_folder import RunFolder
from ringcomm.launched.process_stat import ProcessStat
from ringcomm.launched.rank_process import RankProcess
from ringcomm.ranks_as_text import ranks_text

_LOOK_S: Final = 1.0  # between two looks whether ranks of this host live
_PATIENCE_S: Final = 3.0  # for ranks to end after another one
_LEAST_S: Final = 10.0  # for a launcher to end after all ranks, on a machine that swaps, too
_UNSEEN_S: Final = 30.0  # for all ranks to start, before the first word about those that have not
_MANY: Final = 8  # processes that are listed


class Orphan:
    """Looks whether a launcher whose ranks on this host have ended waits for a lost host."""

    def __init__(self, patience_s: float, silent_hosts: Callable[[], Collection[str]]) -> None:
        self._patience_s = patience_s
        self._silent_hosts = silent_hosts
        self._ask_at = float("inf")
        self._look_at = 0.0

    @property
    def is_due(self) -> bool:
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
        self._n_alone = self._n_alone + 1 if are_over and not company(launcher) else 0
        self.is_found = self._n_alone > self._n_looks
        return "all ranks have ended, and the launcher hangs: it is ended" if self.is_found else ""


class Unseen:
    """Looks whether ranks have not started, which a launcher that hangs keeps waiting without end.

    Nothing is ended: who waits for an allocation or a password may wait for long. Hosts that do not
    see the folder of the run have said so.
    """

    def __init__(self, folder: RunFolder, size: int, hosts: Sequence[str], launcher: str) -> None:
        self._folder, self._size, self._hosts = folder, size, hosts
        self._launcher = launcher
        self._began = time.monotonic()
        self._wait_s = _UNSEEN_S
        self._look_at = 0.0

    def look(self, launcher: int, blind_hosts: Collection[str]) -> str:
        """Return which ranks are missing, after 30 s, 60 s, 120 s ...; else "". Once a second.

        Args:
            launcher: its pid.
            blind_hosts: hosts that do not see the folder, whose ranks are not missing.
        """
        now = time.monotonic()
        if now < self._look_at:
            return ""
        self._look_at = now + _LOOK_S
        waited_s = now - self._began
        if waited_s < self._wait_s:
            return ""
        ranks = self._folder.ranks()
        with_none = self._hosts_without({each.host for each in ranks.values()} | {*blind_hosts})
        if len(ranks) == self._size or (blind_hosts and not with_none):
            self._look_at = float("inf")
            return ""
        while self._wait_s <= waited_s:
            self._wait_s *= 2
        missing = ranks_text([rank for rank in range(self._size) if rank not in ranks])
        text = f"after {waited_s:.0f} s, {len(ranks)} of {self._size} ranks have started; "
        text += f"missing: {missing}; "
        if with_none:
            text += f"none is on {', '.join(with_none)}; "
        return f"{text}{self._state(launcher)}. Ctrl-C ends the job"

    def _hosts_without(self, seen: Collection[str]) -> list[str]:
        """Return the hosts of the job that are not among these, which may have longer names."""
        shorts = {name.partition(".")[0] for name in seen}
        return [
            name
            for name in self._hosts
            if name not in seen and name.partition(".")[0] not in shorts
        ]

    def _state(self, launcher: int) -> str:
        name = f"{self._launcher} (pid {launcher})"
        try:
            if ProcessStat.of(launcher).is_stopped:
                return f"{name} is stopped, and goes on after kill -CONT {launcher}"
        except OSError:  # it has ended in this moment
            return f"{name} has ended"
        below = [f"{each.name} (pid {each.pid})" for each in company(launcher)]
        if not below:
            return f"{name} has no process below it"
        return f"{name} has below it {', '.join(below[:_MANY])}{', ...' * (len(below) > _MANY)}"


class StartWait:
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
