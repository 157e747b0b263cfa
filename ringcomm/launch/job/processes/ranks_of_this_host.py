"""Finds the processes of a job on this host and MPI's files of them; sends signals to its ranks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Sequence
from typing import Final

from ringcomm.launch.job.run_folder import RunFolder
from ringcomm.launch.run_child_with_deadline import mpi_files_below, remove_files
from ringcomm.launched.process_stat import ProcessStat, all_processes
from ringcomm.launched.rank_process import RankProcess
from ringcomm.system_text import host_name

_LOOK_S: Final = 1.0  # between two looks at the ranks in init()
_LONGEST_S: Final = 64.0  # between two at the others


def send_signal(number: int, ranks: Sequence[RankProcess]) -> None:
    """Send a signal to those of these processes that live; all are of this host."""
    for rank in ranks:
        with contextlib.suppress(OSError):  # it has ended in this moment, or has got rights
            if rank.lives:
                os.kill(rank.pid, number)


def ranks_here(folder: RunFolder) -> dict[int, RankProcess]:
    """Return the processes of the ranks of this host, by rank."""
    here = host_name()
    return {rank: process for rank, process in folder.ranks().items() if process.host == here}


def session_members(session: int) -> list[int]:
    """Return the pids of the processes of a session, except those that are dead."""
    processes = all_processes()
    return [each.pid for each in processes if each.session == session and not each.is_dead]


def company(launcher: int) -> list[ProcessStat]:
    """Return the children of the launcher that live, and the other processes of its session."""
    return [
        each
        for each in all_processes()
        if not each.is_dead and each.pid != launcher and launcher in (each.parent, each.session)
    ]


class MpiFiles:
    """MPI's files in /dev/shm of the ranks that no guardian watches yet, or ever.

    Ranks that are killed leave them there: of Intel MPI, those that are killed in init().
    """

    def __init__(self, folder: RunFolder, size: int) -> None:
        self._folder, self._is_alone = folder, size == 1  # without a guardian
        self._paths: set[str] = set()
        self._look_at, self._look_at_all = 0.0, 0.0
        self._pause_s = _LOOK_S

    def look(self) -> None:
        """Note the files of the ranks in init() once a second; of others after 1, 2, 4 ... s."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_S
        if now < self._look_at_all:
            self._note(self._folder.in_init())
            return
        self.note()
        self._look_at_all = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_S)

    def note(self) -> None:
        """Note the files that there are now."""
        self._note(ranks_here(self._folder))

    def _note(self, ranks: Collection[int]) -> None:
        here = ranks_here(self._folder) if ranks else {}
        ends = () if self._is_alone else self._folder.ends()
        live = [here[rank] for rank in ranks if rank in here and rank not in ends]
        self._paths |= mpi_files_below([rank.pid for rank in live if rank.lives])

    def remove(self) -> None:
        """Remove them; to be called when the ranks have ended."""
        remove_files(self._paths)
