"""Reads files that make whoever reads them run code: those that nobody else can have written.

A pickle is such a file. Whoever can write it, or put another in its place, decides what runs.
"""

from __future__ import annotations

import grp
import logging
import os
import pwd
import stat
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

from ringcomm.regular_files import BrokenFileError, open_regular
from ringcomm.system_text import read_text

_log = logging.getLogger("ringcomm")
_MODE: Final = 0o600  # of a file that is mended


def read_trusted(path: str | os.PathLike[str], *, mends_mode: bool = False) -> bytes:
    """Return the content of a file that this user or root has written, and nobody else.

    What was opened is judged, and the folder that it lies in: links may lead there.

    Args:
        path: path of the file.
        mends_mode: a file that its group can write is taken, with a warning, and made this user's
            alone, so that it happens once; otherwise it is refused.

    Raises:
        OSError: it cannot be read.
        BrokenFileError: it is no regular file, or somebody else can have written it. The text says
            who, and what to do; it begins with a verb, and lacks the path.
    """
    with open_regular(path) as file:
        if text := _distrust(file):
            raise BrokenFileError(text)
        mode = os.fstat(file.fileno()).st_mode
        if mode & stat.S_IWGRP:
            if not mends_mode:
                raise BrokenFileError(_of_group(file))
            _mend_mode(file, path)
        return file.read()


def why_untrusted(path: str | os.PathLike[str]) -> str:
    """Return why read_trusted() would refuse a file; "" if it would not.

    Raises as open_regular() does.
    """
    with open_regular(path) as file:
        return _distrust(file) or _of_group(file)


def user_name(uid: int) -> str:
    try:
        return f"user {uid} ({pwd.getpwuid(uid).pw_name})"
    except KeyError:
        return f"user {uid}"


def is_own(uid: int) -> bool:
    return uid in (os.geteuid(), 0)


def _distrust(file: IO[bytes]) -> str:
    """Return why a file is not trusted whatever its group may do; "" if it is."""
    facts = os.fstat(file.fileno())
    mode = stat.S_IMODE(facts.st_mode)
    if not is_own(facts.st_uid):
        return (
            f"belongs to {user_name(facts.st_uid)}, who could make this process of "
            f"{user_name(os.geteuid())} run any code. If you trust its content, copy it (cp): the "
            f"copy is yours{_of_squashing(facts.st_uid)}"
        )
    if mode & stat.S_IWOTH:
        return (
            f"can be written by every user (mode {mode:04o}), who could make this process run any "
            "code. If you trust its content, make it yours alone (chmod 600)"
        )
    path = Path(os.readlink(f"/proc/self/fd/{file.fileno()}"))
    folder = os.stat(path.parent)
    if folder.st_mode & stat.S_IWOTH and not folder.st_mode & stat.S_ISVTX:
        mode = stat.S_IMODE(folder.st_mode)
        return (
            f"lies in {path.parent}, where every user can replace it (mode {mode:04o}), and so "
            "make this process run any code. If you trust its content, take that right away "
            "(chmod o-w, or +t) or keep it elsewhere"
        )
    return ""


def _of_group(file: IO[bytes]) -> str:
    facts = os.fstat(file.fileno())
    if not facts.st_mode & stat.S_IWGRP:
        return ""
    return (
        f"can be written by {_group_name(facts.st_gid)} (mode {stat.S_IMODE(facts.st_mode):04o}), "
        "which could make this process run any code. If you trust its content, make it yours "
        "alone (chmod 600)"
    )


def _mend_mode(file: IO[bytes], path: str | os.PathLike[str]) -> None:
    """Take the rights of others away. Raises BrokenFileError if the file system does not do so."""
    before = os.fstat(file.fileno())
    why = "the file system ignores chmod"
    try:
        os.fchmod(file.fileno(), _MODE)
    except OSError as error:
        why = f"chmod: {error.strerror}"
    if os.fstat(file.fileno()).st_mode & stat.S_IWGRP:
        raise BrokenFileError(f"{_of_group(file)}; that could not be done here ({why}), so copy it")
    _log.warning(
        "%s could be written by %s until now (mode %04o), which could have made this process run "
        "any code. It is taken this once, and is yours alone from now on (mode %04o)",
        path,
        _group_name(before.st_gid),
        stat.S_IMODE(before.st_mode),
        _MODE,
    )


def _group_name(gid: int) -> str:
    try:
        return f"group {gid} ({grp.getgrgid(gid).gr_name})"
    except KeyError:
        return f"group {gid}"


def _of_squashing(uid: int) -> str:
    """Return what may have made a file that of nobody; "" if it is another user's."""
    with suppress(OSError):
        if uid == int(read_text("/proc/sys/fs/overflowuid")):
            return (
                ". An NFS server that squashes root, or all users, gives that user what they "
                "write: keep the file on another disk, or run the job as the owner of the folder"
            )
    return ""
