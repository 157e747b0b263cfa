"""The number of processor cores that the ranks of a host may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ringcomm.system_text import read_text


def usable_cores(cpus: Iterable[Iterable[int]], root: Path = Path("/")) -> int:
    """Return how many of these CPUs may be busy at a time.

    Args:
        cpus: the CPUs that each rank of this host may run on, by rank.
        root: the folder that contains proc and sys.
    """
    return max(1, min(len(set().union(*cpus)), cgroup_limit(root)))


def cgroup_limit(root: Path = Path("/")) -> int:
    """Return the CPU time per second that the cgroups of this process grant, at least 1."""
    limit = min(_limits(root), default=float(os.cpu_count() or 1))
    return max(1, math.floor(limit + 0.5))


def _limits(root: Path) -> Iterator[float]:
    """Yield the limit of each cgroup of this process; see cgroups(7), cpu.max and cpu.cfs_*."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        here = Path(path.lstrip("/"))
        for folder in (here, *here.parents):
            yield from _quotient(_read(mount / folder / "cpu.max"))
            quota = _read(mount / folder / "cpu.cfs_quota_us")
            yield from _quotient(f"{quota} {_read(mount / folder / 'cpu.cfs_period_us')}")


def _quotient(text: str) -> list[float]:
    """Return [quota / period], or [] if the quota is "max" or -1: there is no limit."""
    found = text.split()
    if len(found) != 2 or not found[0].isdigit():
        return []
    return [int(found[0]) / int(found[1])]


def _read(path: Path) -> str:
    try:
        return read_text(path)
    except OSError:
        return ""
