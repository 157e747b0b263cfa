"""Whether a process may read the private memory of another one, as the ranks of a node do.

Where /proc/sys/kernel/yama/ptrace_scope is 1, as on Ubuntu, only an ancestor of a process may. But
the process can name another one by PR_SET_PTRACER: then that one may, too, and its descendants
(Linux, security/yama/yama_lsm.c: ptracer_exception_found()). So a rank names the process that has
started the ranks of its node.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
from collections.abc import Callable, Iterable
from typing import Final

import numpy as np

from ringcomm._core import read_private
from ringcomm.system_text import read_text

_SCOPE = "/proc/sys/kernel/yama/ptrace_scope"
_RELATIVES: Final = 1  # the scope in which a process may name who reads it
_PR_SET_PTRACER: Final = 0x59616D61
_INIT: Final = 1


def ptrace_scope() -> int | None:
    """Return what Yama restricts, 0 (nothing) to 3 (everything); None: there is no Yama."""
    try:
        return int(read_text(_SCOPE))
    except (OSError, ValueError):
        return None


def let_siblings_read(pids: Iterable[int]) -> int | None:
    """Let processes read this one's memory that the same process has started, or its descendants.

    Does nothing unless Yama asks for it. Replaces what an earlier PR_SET_PTRACER has named.

    Args:
        pids: of the siblings, as this process sees them; 0: it does not.

    Returns:
        The pid of the ancestor that is named; None: none. They may have init alone in common.
    """
    others = set(pids) - {0, os.getpid()}
    if not others or ptrace_scope() != _RELATIVES:
        return None
    ancestor = common_ancestor([os.getpid(), *others], _parent_of)
    if ancestor is not None:
        _name_reader(ancestor)
    return ancestor


def common_ancestor(pids: Iterable[int], parent_of: Callable[[int], int]) -> int | None:
    """Return the nearest process from which all descend, which may be one of them; never init.

    To name init is to let all processes of the user in.

    Args:
        pids: one or more.
        parent_of: returns the pid of a process's parent; 0 if it has none, or has ended.
    """
    first, *others = (_line_of(pid, parent_of) for pid in pids)
    return next((pid for pid in first if all(pid in line for line in others)), None)


def _line_of(pid: int, parent_of: Callable[[int], int]) -> list[int]:
    line: list[int] = []
    while pid > _INIT:
        line.append(pid)
        pid = parent_of(pid)
    return line


def _parent_of(pid: int) -> int:
    try:
        return int(read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _name_reader(pid: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


# --- a trial --------------------------------------------------------------------------------------
_OTHER_DATA: Final = errno.EIO  # the answer if what was read is not what the other process has
_TRIED: Final = 300_007  # bytes


def try_between_children() -> int:
    """Return 0 if one child of this process can read another's memory, as ranks do; else the errno.

    Forks, so this process must have one thread.

    Raises:
        ChildProcessError: the system has ended the reader for it.
    """
    told, tells = os.pipe()
    over, held = os.pipe()
    reader = _fork(lambda: _read_as_told(told, tells))
    target = _fork(lambda: _be_read(tells, over, held, reader))
    for fd in (told, tells, over):
        os.close(fd)
    code = os.waitstatus_to_exitcode(os.waitpid(reader, 0)[1])
    os.close(held)  # the target ends
    os.waitpid(target, 0)
    if code < 0:
        raise ChildProcessError(f"process_vm_readv ended the process: signal {-code}")
    return code


def _fork(body: Callable[[], int]) -> int:
    pid = os.fork()
    if pid == 0:
        code = _OTHER_DATA
        try:
            code = body()
        finally:
            os._exit(code)
    return pid


def _be_read(tells: int, over: int, held: int, reader: int) -> int:
    data = np.frombuffer(os.urandom(_TRIED), np.uint8)  # made here: no fork has them
    let_siblings_read([reader])
    os.write(tells, f"{os.getpid()} {data.ctypes.data} {_digest(data)}".encode())
    os.close(held)
    os.read(over, 1)
    return 0


def _read_as_told(told: int, tells: int) -> int:
    os.close(tells)
    pid, place, digest = os.read(told, 1000).split()
    out = np.zeros(_TRIED, np.uint8)
    got = read_private(int(pid), int(place), out)
    if got < 0:
        return -got
    return 0 if _digest(out) == digest.decode() else _OTHER_DATA


def _digest(data: np.typing.NDArray[np.uint8]) -> str:
    return hashlib.sha256(data.tobytes()).hexdigest()
