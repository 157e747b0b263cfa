"""Finds the memory that a server can get, so that a table that is too large is refused in time."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from ringcomm.system_text import read_text

_MEMINFO: Final = Path("/proc/meminfo")
_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")  # of a container; "max" where it has none


def available_nbytes() -> int:
    """Return the bytes of memory that this machine, or container, can give at most.

    Linux gives memory before it has it: a process that uses more is killed, and says nothing.
    """
    found = re.search(r"MemAvailable: +(\d+) kB", read_text(_MEMINFO))
    available = 1 << 63 if found is None else int(found[1]) * 1024
    try:
        limit = read_text(_LIMIT).strip()
    except OSError:
        return available
    return min(available, int(limit)) if limit.isdecimal() else available
