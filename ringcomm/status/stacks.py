"""Python stacks of a process, which it writes when another one sends it a signal.

The handler is faulthandler's, in C: it needs no lock of Python, so it works while the process hangs
in a C function. It writes to a memfd, which other processes of the user open through /proc.

That needs one signal at a time: of several that come at once the kernel gives some to other
threads, and the handler then reads frames that the main thread may just have freed. So who asks has
a lock on the memfd, and who comes meanwhile takes what is there by then.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import re
import signal
import sysconfig
import threading
import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from ringcomm._core import StatusPage
from ringcomm.system_text import read_text

_SIGNAL: Final = signal.SIGRTMAX - 3  # one that programs do not use, as a rule
_ANSWER_S: Final = 1.0
_TICK_S: Final = 0.002
_MAX_NBYTES: Final = 1 << 18
_HEAD: Final = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)")
_FRAME: Final = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_CALLS_MPI: Final = "/ringcomm/transport/mpi.py"
_made: dict[int, int] = {}  # pid -> memfd


class StackFrame(NamedTuple):
    """A line that a thread executes."""

    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def offer_stacks(page: StatusPage) -> None:
    """Make this process write its stacks on request, and note that on its page."""
    if os.getpid() not in _made:
        if signal.getsignal(_SIGNAL) is not signal.SIG_DFL:
            return  # the program uses this signal
        fd = os.memfd_create("ringcomm-stacks", os.MFD_CLOEXEC)
        faulthandler.register(_SIGNAL, file=fd, all_threads=True, chain=False)
        _made[os.getpid()] = fd
    ident = threading.main_thread().ident or 0
    page.set_stacks(_made[os.getpid()], int(_SIGNAL), ident)


def stacks_of(page: Mapping[str, Any]) -> str:
    """Return the stacks of a process of this host by StatusPage.snapshot(), as faulthandler's text.

    Returns "" if it is dead, is stopped, or does not offer them. Takes 1 s at most.
    """
    pid, number = page["pid"], page["stacks_signal"]
    with contextlib.suppress(OSError, ValueError):
        if not number or not _handles(pid, number):
            return ""
        with open(f"/proc/{pid}/fd/{page['stacks_fd']}", "rb") as file:
            return _ask(pid, number, file.fileno())
    return ""


def _ask(pid: int, number: int, fd: int) -> str:
    deadline = time.monotonic() + _ANSWER_S
    has_waited = False
    while not _has_lock(fd):
        if time.monotonic() > deadline:
            return ""
        has_waited = True
        time.sleep(_TICK_S)
    status = os.fstat(fd)
    if not has_waited:
        os.kill(pid, number)
        return _written_after(status.st_size, fd, deadline)
    if time.time() - status.st_mtime > _ANSWER_S:
        return ""  # it has not answered who asked before
    start = max(0, status.st_size - _MAX_NBYTES)
    return last_of(os.pread(fd, _MAX_NBYTES, start).decode(errors="replace"))


def _has_lock(fd: int) -> bool:
    """Return True once no other process has the lock, until `fd` is closed."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def last_of(text: str) -> str:
    """Return the last of the texts that faulthandler has written; each has a thread once. Pure."""
    parts = re.split(r"^(?=Current thread|Thread)", text, flags=re.MULTILINE)
    last, seen = "", set[str]()
    for part in reversed(parts):
        head = _HEAD.match(part)
        if head is None or head[1] in seen:
            break
        seen.add(head[1])
        last = part + last
    return last


def main_stack(text: str, main_thread: int) -> list[StackFrame]:
    """Return the frames of the main thread, the innermost first. Pure."""
    frames: list[StackFrame] = []
    is_main = False
    for line in text.splitlines():
        if head := _HEAD.match(line):
            is_main = int(head[1], 16) == main_thread
        elif is_main and (frame := _FRAME.match(line)):
            frames.append(StackFrame(*frame.groups()))
    return frames


def users_frame(frames: list[StackFrame]) -> StackFrame | None:
    paths = sysconfig.get_paths()
    foreign = tuple({paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    package = os.path.dirname(os.path.dirname(__file__))
    own = [f for f in frames if not f.file.startswith((*foreign, package, "<"))]
    return next(iter([*own, *frames]), None)


def where_is(page: Mapping[str, Any]) -> str:
    """Return the file and line at which a process of this host is; "" if it does not tell."""
    return place_of(main_stack(stacks_of(page), page["main_thread"]))


def place_of(frames: list[StackFrame]) -> str:
    """Return the user's line of these frames, and whether MPI has been called there. Pure."""
    frame = users_frame(frames)
    if frame is None:
        return ""
    return f"{frame}, inside MPI" if frames[0].file.endswith(_CALLS_MPI) else str(frame)


def _handles(pid: int, number: int) -> bool:
    """Return True if the process catches a signal, which would end it else."""
    status = read_text(f"/proc/{pid}/status")
    match = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return match is not None and bool(int(match[1], 16) >> (number - 1) & 1)


def _written_after(before: int, fd: int, deadline: float) -> str:
    """Return what has been written to a file since it had `before` bytes."""
    size = before
    while time.monotonic() < deadline:
        time.sleep(_TICK_S)  # nobody tells of a write to a file
        now = os.fstat(fd).st_size
        if now == size and size > before:
            break
        size = now
    return os.pread(fd, min(size - before, _MAX_NBYTES), before).decode(errors="replace")
