"""Errors of opening a file that name its purpose, and the limit that was reached."""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def needed_for(what: str) -> Iterator[None]:
    """Add the purpose `what`, and a limit that was reached, to an OSError of the block."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{what}: {error.strerror}{_limit(error)}") from error


def _limit(error: OSError) -> str:
    if error.errno != errno.EMFILE:
        return ""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f", while `ulimit -n` allows {allowed} (raise it)"
