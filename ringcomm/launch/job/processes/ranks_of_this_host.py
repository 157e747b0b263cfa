"""Finds the processes of a job on this host, and sends signals to its ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from ringcomm.launch.job.run_folder import RunFolder
from ringcomm.launched.ancestors import is_launcher


def send_signal(number: int, pids: Sequence[int]) -> None:
    """Send a signal to ranks of this run; a pid may belong to another process by now."""
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            if is_rank(pid):
                os.kill(pid, number)


def is_rank(pid: int) -> bool:
    """Return True if `ringcomm run` started this process as a rank, and it lives.

    Raises OSError if there is no such process.
    """
    environ = b""
    with contextlib.suppress(PermissionError):  # it has capabilities, as for RDMA
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    if b"=" in environ:
        return f"RINGCOMM_RUN_FOLDER={pid} ".encode() in environ
    # It is dead, or has overwritten its environment, as setproctitle does.
    state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    return state not in "ZX" and is_launcher(int(parent))


def ranks_here(folder: RunFolder) -> dict[int, int]:
    """Return rank -> pid, for the ranks of this host."""
    here = os.uname().nodename
    return {rank: pid for rank, (pid, host) in folder.ranks().items() if host == here}


def lives(pid: int) -> bool:
    """Return True if it is the pid of a rank that has not ended."""
    with contextlib.suppress(OSError):  # it has ended
        return is_rank(pid)
    return False


def session_members(session: int) -> list[int]:
    """Return the pids of the processes of a session, except those that are dead."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            state, _, _, of = path.read_text().rpartition(")")[2].split()[:4]
            if of == str(session) and state not in "ZX":
                found.append(int(path.parent.name))
    return found
