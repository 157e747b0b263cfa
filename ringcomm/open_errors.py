"""Errors for want of a file or a thread that name its purpose, and the limit that was reached."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def needed_for(what: str) -> Iterator[None]:
    """Add the purpose `what`, and a limit that was reached, to an OSError of the block.

    Python's error that there can be no further thread becomes one.
    """
    try:
        yield
    except RuntimeError as error:
        if str(error) != "can't start new thread":
            raise
        raise _with_purpose(what, OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))) from error
    except OSError as error:
        raise _with_purpose(what, error) from error


def _with_purpose(what: str, error: OSError) -> OSError:
    return OSError(error.errno, f"{what}: {error.strerror}{_limit(error)}")


def _limit(error: OSError) -> str:
    limits = {
        errno.EMFILE: ("n", resource.RLIMIT_NOFILE),
        errno.EAGAIN: ("u", resource.RLIMIT_NPROC),
    }
    if error.errno not in limits:
        return ""
    letter, limit = limits[error.errno]
    allowed, _ = resource.getrlimit(limit)
    return f", while `ulimit -{letter}` allows {allowed} (raise it)"
