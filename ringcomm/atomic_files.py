"""Writes files as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import zlib
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


@contextlib.contextmanager
def replacing(
    path: Path, check: Callable[[Path], None] | None = None, *, mode: int = 0o666
) -> Iterator[IO[bytes]]:
    """Yield a file to write. At the end of the block it is flushed to disk, and replaces `path`.

    Args:
        path: path of the file; its folder is made if necessary. On any error an earlier file stays.
        check: function of the path of the complete file, called before `path` is replaced.
        mode: its permissions, of which the umask takes some away.

    Raises:
        OSError: there is no room, or no permission.
    """
    import tempfile  # takes 5 ms, which a rank saves

    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(".tmp", f".{path.name}-", path.parent)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            # mkstemp() lets only the owner read. Not by the name: who else can write the folder may
            # have put a link there, whose target would be opened to them.
            os.fchmod(descriptor, mode & ~_umask())
            os.fsync(file.fileno())
        if check is not None:
            check(path.with_name(os.path.basename(name)))
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
    sync_folder(path.parent)


def remove_unfinished(path: Path) -> None:
    """Remove what killed processes have left in replacing() of `path`, which nobody writes now."""
    unfinished = re.compile(rf"\.{re.escape(path.name)}-[a-z0-9_]{{8}}\.tmp")  # of mkstemp()
    for each in paths_in(path.parent):
        if unfinished.fullmatch(each.name):
            each.unlink(missing_ok=True)


def paths_in(folder: Path) -> list[Path]:
    """Return the paths of what is in a folder; none if there is no folder.

    Raises:
        OSError: it is there, and cannot be read, or is no folder, or a link that leads nowhere.
    """
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        if os.path.lexists(folder):
            raise
        return []


def sync_folder(folder: Path) -> None:
    """Flush a folder to disk, so that new names in it survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def crc_of(*pieces: Any) -> int:
    crc = 0
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
    return crc


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
