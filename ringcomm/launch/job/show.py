"""Shows text on stdout and stderr while somebody can read it; the job goes on without readers.

On a terminal there may be one line below all text, which changes and is wiped.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
from typing import Any, Final

from ringcomm.config import environment
from ringcomm.foreign_text import printable

# The reader has gone, as after `| head`; or the terminal has.
_GONE: Final = (errno.EPIPE, errno.EIO)
_WIPE: Final = b"\r\x1b[2K"
_line: list[str] = []  # the one that is drawn


def say(*texts: str) -> None:
    for text in texts:
        show(f"ringcomm run: {printable(text, keeps_lines=True)}\n".encode(), sys.stderr)


def show(data: bytes, stream: Any) -> None:
    """Write bytes to stdout or stderr as they are; nowhere any more, once that is impossible."""
    if not data or stream is None:  # None: it was closed when Python started
        return
    show_line("")
    _write(data, stream)


def can_show_line() -> bool:
    """Return True if stderr is a terminal that can wipe a line."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # it was closed, or replaced
        return os.isatty(sys.stderr.fileno()) and environment().get("TERM", "dumb") != "dumb"
    return False


def show_line(text: str) -> None:
    """Show this line in the place of the one before it, on a terminal; "": wipe that."""
    if text == "".join(_line):
        return
    _line[:] = [text] if text else []
    width = shutil.get_terminal_size().columns - 1
    _write(_WIPE + printable(text)[: max(width, 0)].encode(errors="replace"), sys.stderr)


def _write(data: bytes, stream: Any) -> None:
    raw = getattr(stream, "buffer", None)
    try:
        if raw is None:  # a notebook, or a test, has replaced it
            stream.write(data.decode(errors="replace"))
        else:
            stream.flush()
            raw.write(data)
        stream.flush()
    except OSError as error:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        if error.errno not in _GONE and stream is not sys.stderr:
            say(f"stdout: {error.strerror}. From now on the output is in the logs only")
