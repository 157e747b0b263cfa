"""Which engine serves the calling thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from ringcomm.errors import NotInitializedError


class _OfThread(threading.local):
    engine: Any = None  # of the class, or whoever asks waits for an AttributeError


_of_process: Any = None  # an Engine, which knows groups, which look here for it
_of_thread = _OfThread()


def engine() -> Any:
    """Return the engine of this rank. Raises NotInitializedError: init() has not run."""
    found = _of_thread.engine
    if found is None:
        found = _of_process
        if found is None:
            raise NotInitializedError("ringcomm is not initialized: call ringcomm.init() first")
    return found


def has_engine() -> bool:
    """Return True if engine() returns one."""
    return _of_thread.engine is not None or _of_process is not None


def serve_process(engine: Any) -> None:
    """Make this engine the one of all threads; None: there is none any more."""
    global _of_process  # noqa: PLW0603 - one per process, as in MPI
    _of_process = engine


@contextlib.contextmanager
def serve_thread(engine: Any) -> Iterator[None]:
    """Make this engine the one of this thread alone: ranks as threads."""
    _of_thread.engine = engine
    try:
        yield
    finally:
        _of_thread.engine = None
