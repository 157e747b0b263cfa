"""What the kernel says of processes, in /proc/PID/stat."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

from ringcomm.system_text import read_text


class ProcessStat(NamedTuple):
    """A process of this host, which may have ended by now.

    Attributes:
        pid: its pid.
        name: up to 15 bytes, which may be cut in the middle of a character.
        is_dead: it has ended, and its parent has not waited for it.
        is_stopped: by SIGSTOP or the like.
        parent: the pid of its parent.
        session: its session.
        cpu_ticks: the time of CPU that it has used, in 1 / SC_CLK_TCK seconds.
        start: when it was started, in ticks since its host was.
        n_pages: the pages of memory that it uses.
    """

    pid: int
    name: str
    is_dead: bool
    is_stopped: bool
    parent: int
    session: int
    cpu_ticks: int
    start: int
    n_pages: int

    @classmethod
    def of(cls, pid: int) -> ProcessStat:
        """Return what is known of the process with this pid. Raises OSError if there is none."""
        text = read_text(f"/proc/{pid}/stat")
        name, _, rest = text.partition("(")[2].rpartition(")")
        fields = rest.split()
        return cls(
            pid=pid,
            name=name,
            is_dead=fields[0] in "ZX",
            is_stopped=fields[0] in "Tt",
            parent=int(fields[1]),
            session=int(fields[3]),
            cpu_ticks=int(fields[11]) + int(fields[12]),
            start=int(fields[19]),
            n_pages=int(fields[21]),
        )


def all_processes() -> Iterator[ProcessStat]:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            yield ProcessStat.of(int(pid))
