"""Prints an error only once if it ends all ranks of a host: the first of them prints it.

This works even in init(), before ranks know each other: the first rank claims a name made of the
error's text. The name is that of an abstract socket (unix(7)), which ends with its process and
leaves no file. Other users can claim names, too, but nobody is silent because of theirs.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Final

from ringcomm.launched.launcher import job_on_this_host, launched_size

_PRINTING_S: Final = 2.0
_SKEW_S: Final = 1.0
_OF_ALL: Final = "is raised on all ranks"
_CREDENTIALS: Final = struct.Struct("=3i")  # pid, uid, gid
_claimed: list[str] = []


def print_alike_errors_once(is_watched: Callable[[], bool]) -> None:
    """Set a hook that prints an uncaught error only if no rank of this host has printed it.

    is_watched() returns False as long as no guardian watches: others may fail in the same way.
    """
    if launched_size() is None or _claimed:
        return
    earlier, pid = sys.excepthook, os.getpid()
    _claimed.append("")  # now a second call does nothing

    def print_once(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        name = _name_of(error)
        if os.getpid() == pid and not _claim(name) and _is_printed(name):
            return
        earlier(kind, error, trace)
        sys.stderr.flush()
        _claim(name + ".printed")
        if os.getpid() == pid and (not is_watched() or _OF_ALL in vars(error)):
            time.sleep(_SKEW_S)  # ranks that are later must find the claim

    sys.excepthook = print_once


def others_raise_it_too(error: BaseException) -> None:
    """Let the rank that prints this error stay until the others may have raised it."""
    vars(error)[_OF_ALL] = True


def _name_of(error: BaseException) -> str:
    """Return a name that is the same for ranks of this job and host with the same traceback."""
    from hashlib import sha256

    text = "".join(traceback.format_exception(error)).encode(errors="replace")
    return f"ringcomm.{job_on_this_host()}.{sha256(text).hexdigest()[:32]}"


def _claim(name: str) -> bool:
    """Hold a name until this process ends; return False if the name is held already."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind("\0" + name)
        claim.listen(socket.SOMAXCONN)  # only who listens shows who he is
    except OSError:
        claim.close()
        return False
    claim.detach()  # the descriptor stays open: it is the claim, and python -X dev is silent
    _claimed.append(name)
    return True


def _is_printed(name: str) -> bool:
    """Wait until the first rank has printed the error; return False if that takes 2 s.

    This rank must wait, because the launcher kills the first rank as soon as this one ends.
    """
    deadline = time.monotonic() + _PRINTING_S
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.setblocking(False)  # others may have filled the queue
            try:
                asking.connect(f"\0{name}.printed")
            except OSError:
                time.sleep(0.005)  # no event reports that a name is claimed
            else:
                return _uid_of_peer(asking) == os.geteuid()
    return False


def _uid_of_peer(connected: socket.socket) -> int:
    facts = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(facts)[1])
