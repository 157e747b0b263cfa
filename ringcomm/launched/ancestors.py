"""The processes from which this one descends, and the launchers among them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

from ringcomm.launched.process_stat import ProcessStat

# MPICH's variables are the same in every job, also in a job that a rank starts.
_LAUNCHERS = ("hydra_pmi_proxy", "mpiexec", "mpirun", "prterun", "prted", "orted")


def launcher_since(ancestor: int) -> bool:
    """Return True if a launcher is between this process and that ancestor."""
    since = itertools.takewhile(lambda each: each.pid != ancestor, ancestors())
    return any(each.name.startswith(_LAUNCHERS) for each in since)


def launchers() -> Iterator[int]:
    """Yield the pids of the launchers of this process that are on this host, the nearest first."""
    return (each.pid for each in ancestors() if each.name.startswith(_LAUNCHERS))


def mpirun_and_above() -> Iterator[int]:
    """Yield the pids of this process's mpirun, if that is on this host, and of its ancestors."""
    names = ("prterun", "mpirun", "mpiexec", "orterun")
    above = itertools.dropwhile(lambda each: not each.name.startswith(names), ancestors())
    return (each.pid for each in above)


def ancestors(of: int | None = None) -> Iterator[ProcessStat]:
    """Yield the processes from which one descends, the nearest first.

    Args:
        of: its pid; None: this process.

    Raises OSError if there is no such process.
    """
    pid = os.getppid() if of is None else ProcessStat.of(of).parent
    while pid not in (0, 1):
        try:
            process = ProcessStat.of(pid)
        except OSError:
            return
        yield process
        pid = process.parent
