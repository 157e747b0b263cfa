"""The processes from which this one descends, and the launchers among them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

# MPICH's variables are the same in every job, also in a job that a rank starts.
_LAUNCHERS = ("hydra_pmi_proxy", "mpiexec", "mpirun", "prterun", "prted", "orted")


def launcher_since(ancestor: int) -> bool:
    """Return True if a launcher is between this process and that ancestor."""
    names = itertools.takewhile(lambda each: each[0] != ancestor, ancestors())
    return any(name.startswith(_LAUNCHERS) for _, name in names)


def mpirun_and_above() -> Iterator[int]:
    """Yield the pids of this process's mpirun, if that is on this host, and of its ancestors."""
    names = ("prterun", "mpirun", "mpiexec", "orterun")
    above = itertools.dropwhile(lambda each: not each[1].startswith(names), ancestors())
    return (pid for pid, _ in above)


def ancestors() -> Iterator[tuple[int, str]]:
    """Yield pid and name of the processes from which this one descends, the nearest first."""
    pid = os.getppid()
    while pid not in (0, 1):
        try:
            with open(f"/proc/{pid}/stat") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
        except OSError:
            return
        yield pid, name
        pid = int(rest.split()[1])
