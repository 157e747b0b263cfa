"""Prints an uncaught error, and only once if it ends all ranks of a host: the first prints it.

This works even before init(), when ranks do not know each other: the first rank claims a name made
of the error's text, and the others tell it their ranks. The name is that of an abstract socket
(unix(7)), which ends with its process and leaves no file. Other users can claim names, too, but
nobody is silent because of theirs, and nobody counts them. Under `ringcomm run` each rank prints
its error in its own log, and the command shows it once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final

from ringcomm.launched.child_marks import parent_rank_pid, run_file
from ringcomm.launched.launcher import (
    job_on_this_host,
    launched_local_size,
    launched_rank,
    launched_size,
)
from ringcomm.ranks_as_text import ranges_of
from ringcomm.status.error_text import hides_frames, text_of_error

_GATHERING_S: Final = 0.3
_SKEW_S: Final = 1.0  # of ranks that start
_PRINTING_S: Final = 2.0
_OF_ALL: Final = "is raised on all ranks"
_CREDENTIALS: Final = struct.Struct("=3i")  # pid, uid, gid
_watch: list[Callable[[], bool]] = []
_printed: set[str] = set()  # by this rank


def note_watch(is_watched: Callable[[], bool]) -> None:
    """Say how to find out that a guardian watches; else others may fail in the same way."""
    _watch[:] = [is_watched]


def print_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an uncaught error, unless a rank of this host has printed it; a sys.excepthook."""
    is_rank = _is_rank()
    if not is_rank and not hides_frames(error):
        sys.__excepthook__(kind, error, trace)
        return
    _print(text_of_error(error))
    if is_rank and _OF_ALL in vars(error):
        time.sleep(_SKEW_S)  # ranks that are later must find the claim


def print_error_of_thread(args: threading.ExceptHookArgs) -> None:
    """Print an error that has ended a thread, as threading.excepthook does."""
    error = args.exc_value
    if error is None or isinstance(error, SystemExit) or not (_is_rank() or hides_frames(error)):
        threading.__excepthook__(args)
        return
    name = threading.get_ident() if args.thread is None else args.thread.name
    _print(f"Exception in thread {name}:\n{text_of_error(error)}")


def others_raise_it_too(error: BaseException) -> None:
    """Let the rank that prints this error stay until the others may have raised it."""
    vars(error)[_OF_ALL] = True


def _is_rank() -> bool:
    return launched_size() is not None and parent_rank_pid() is None


def _is_watched() -> bool:
    return any(is_watched() for is_watched in _watch)


def _print(text: str) -> None:
    if _is_rank() and not run_file(""):
        _print_once(text)
    else:
        _write(text)


def _write(text: str) -> None:
    """Write by one call, so that ranks do not interleave."""
    if sys.stderr is not None:
        sys.stderr.write(text)
        sys.stderr.flush()


def _print_once(text: str) -> None:
    name = _name_of(text)
    claim = _claim(name)
    if claim is None and name not in _printed:
        _tell(name)
        if _is_printed(name):
            return
    _write(f"rank {launched_rank()}:\n{text}")  # at once: the launcher may kill this rank soon
    if claim is not None:
        with claim:
            others = _others_that_raise_it(claim)
        if others:
            _write(f"likewise: rank{'s' * (len(others) > 1)} {ranges_of(others)}\n")
    _printed.add(name)
    if (printed := _claim(name + ".printed")) is not None:
        printed.close()


def _name_of(text: str) -> str:
    """Return a name that is the same for ranks of this job and host with the same traceback."""
    from hashlib import sha256

    digest = sha256(text.encode(errors="replace")).hexdigest()
    return f"ringcomm.{job_on_this_host()}.{digest[:32]}"


def _others_that_raise_it(claim: socket.socket) -> set[int]:
    """Return the other ranks of this host that say soon that they raise the error, too."""
    ranks: set[int] = set()
    end = time.monotonic() + (_GATHERING_S if _is_watched() else _SKEW_S)
    while len(ranks) < launched_local_size() - 1 and (left_s := end - time.monotonic()) > 0:
        claim.settimeout(left_s)
        with contextlib.suppress(OSError), claim.accept()[0] as heard:
            heard.settimeout(left_s)
            said = heard.recv(16) if _uid_of_peer(heard) == os.geteuid() else b""
            ranks |= {int(said)} if said.isdigit() else set()
    return ranks


def _tell(name: str) -> None:
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as telling,
        contextlib.suppress(OSError),  # too late
    ):
        telling.settimeout(_GATHERING_S)
        telling.connect("\0" + name)
        telling.sendall(b"%d" % launched_rank())


def _claim(name: str) -> socket.socket | None:
    """Hold a name until this process ends; return None if the name is held already."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind("\0" + name)
        claim.listen(socket.SOMAXCONN)  # only who listens shows who he is
    except OSError:
        claim.close()
        return None
    os.dup(claim.fileno())  # stays open: it is the claim
    return claim


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
