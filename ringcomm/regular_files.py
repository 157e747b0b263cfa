"""Reads files that somebody else may have made, or that may be damaged.

Where a file is expected, there may be a pipe, which waits for its other end, a device without an
end such as /dev/zero, or a file of a terabyte. So all files that come from a shared place are
opened here: regular files alone, without a wait, and as much of them as the format can have.
"""

from __future__ import annotations

import os
import stat
import zlib
from io import FileIO
from typing import Final

MOST_NBYTES: Final = 64 << 20  # of a file that is read as a whole, unless its format has more
_CRC_NBYTES: Final = 4
_PIECE: Final = 1 << 20


class BrokenFileError(Exception):
    """A file cannot be used as what it should be."""


def open_regular(
    path: str | os.PathLike[str], *, flags: int = 0, folder: int | None = None
) -> FileIO:
    """Return a regular file, to be read without a buffer. Waits for nobody.

    Args:
        path: path of the file, or of a link to it.
        flags: more flags of open(), such as O_NOFOLLOW.
        folder: descriptor of the folder in which a relative path begins.

    Raises:
        OSError: it cannot be opened.
        BrokenFileError: it is something else. The text begins with a verb, and lacks the path.
    """

    def without_waiting(path: str, flags_of_open: int) -> int:
        more = flags | os.O_NONBLOCK | os.O_NOCTTY
        return os.open(path, flags_of_open | more, dir_fd=folder)

    file = open(os.fspath(path), "rb", buffering=0, opener=without_waiting)  # noqa: SIM115 - the caller's
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise BrokenFileError("is no regular file")
    return file


def read_regular(path: str | os.PathLike[str], most: int = MOST_NBYTES, *, flags: int = 0) -> bytes:
    """Return the content of a regular file of up to `most` bytes.

    Raises as open_regular() and rest_of() do.
    """
    with open_regular(path, flags=flags) as file:
        return rest_of(file, most)


def rest_of(file: FileIO, most: int = MOST_NBYTES) -> bytes:
    """Return what a file of open_regular() has left.

    Raises BrokenFileError if that is more than `most` bytes, or if it would have to be waited for,
    as in some files of /proc. The text begins with a verb, and lacks the path.
    """
    size, data = os.fstat(file.fileno()).st_size - file.tell(), bytearray()
    while size <= most and len(data) <= most:
        piece = file.read(min(max(size - len(data), 0), most - len(data)) + 1)
        if piece is None:
            raise BrokenFileError("has no end")
        if not piece:
            return bytes(data)
        data += piece
    raise _too_long(most)


def _too_long(most: int) -> BrokenFileError:
    return BrokenFileError(f"has more than the {most} bytes that it may have")


def with_checksum(data: bytes) -> bytes:
    """Return data behind its CRC-32."""
    return zlib.crc32(data).to_bytes(_CRC_NBYTES, "little") + data


def without_checksum(content: bytes) -> bytes:
    """Return the data that with_checksum() had. Raises BrokenFileError if it has changed."""
    data = content[_CRC_NBYTES:]
    if with_checksum(data) != content:
        raise BrokenFileError("has changed since it was written")
    return data


def checksum(path: str | os.PathLike[str], most: int | None = None) -> tuple[int, int]:
    """Return the length of a file and its CRC-32.

    Raises as open_regular() does, and BrokenFileError if it has more than `most` bytes, if given.
    """
    crc = length = 0
    with open_regular(path) as file:
        if most is not None and os.fstat(file.fileno()).st_size > most:
            raise _too_long(most)
        while piece := file.read(_PIECE):
            crc, length = zlib.crc32(piece, crc), length + len(piece)
    return length, crc
