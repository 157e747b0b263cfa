"""Finds the processes of a job on this host, and sends signals to its ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from ringcomm.launch.job.run_folder import RunFolder
from ringcomm.launched.process_stat import ProcessStat, all_processes
from ringcomm.launched.rank_process import RankProcess
from ringcomm.system_text import host_name


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
