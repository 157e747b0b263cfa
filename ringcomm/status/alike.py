"""Lets an error that ends all ranks of a host be printed once, by the first of them.

Also in init(), where ranks know nothing of each other yet. So the first claims a name made of the
error's text: an abstract socket (unix(7)), which ends with its process and leaves no file.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Final

from ringcomm import launched

_PRINTING_S: Final = 2.0
_SKEW_S: Final = 1.0
_claimed: list[socket.socket] = []


def print_alike_errors_once(is_watched: Callable[[], bool]) -> None:
    """Leave an error that ends this rank to the rank of this host that prints it, from now on.

    is_watched() is false before a guardian gives the ranks time to fail alike.
    """
    if launched.launched_size() is None or _claimed:
        return
    earlier, pid = sys.excepthook, os.getpid()
    _claim(f"ringcomm.{pid}")  # so that a second call does nothing

    def print_once(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        name = _name_of(error)
        if os.getpid() == pid and not _claim(name) and _is_printed(name):
            return
        earlier(kind, error, trace)
        sys.stderr.flush()
        _claim(name + ".printed")
        if os.getpid() == pid and not is_watched():
            time.sleep(_SKEW_S)  # the claim ends with this process, and others start later

    sys.excepthook = print_once


def _name_of(error: BaseException) -> str:
    """Return a name that ranks of this job and host with the same traceback have alike."""
    from hashlib import sha256

    text = "".join(traceback.format_exception(error)).encode(errors="replace")
    return f"ringcomm.{launched.job_on_this_host()}.{sha256(text).hexdigest()[:32]}"


def _claim(name: str) -> bool:
    """Hold a name until this process ends; return False if another process does."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind("\0" + name)
    except OSError:
        claim.close()
        return False
    _claimed.append(claim)
    return True


def _is_printed(name: str) -> bool:
    """Return True once its first rank has printed it, False if that takes too long.

    This rank must not end before: the launcher would kill the other in its middle.
    """
    deadline = time.monotonic() + _PRINTING_S
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking:
        while time.monotonic() < deadline:
            try:
                asking.connect(f"\0{name}.printed")
            except OSError:
                time.sleep(0.005)  # nobody tells when a name is taken
            else:
                return True
    return False
