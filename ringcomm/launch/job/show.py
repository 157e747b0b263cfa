"""Shows text on stdout and stderr while somebody can read it; the job goes on without readers."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any, Final

from ringcomm.foreign_text import printable

# The reader has gone, as after `| head`; or the terminal has.
_GONE: Final = (errno.EPIPE, errno.EIO)


def say(*texts: str) -> None:
    for text in texts:
        show(f"ringcomm run: {printable(text, keeps_lines=True)}\n".encode(), sys.stderr)


def show(data: bytes, stream: Any) -> None:
    """Write bytes to stdout or stderr as they are; nowhere any more, once that is impossible."""
    if not data or stream is None:  # None: it was closed when Python started
        return
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
