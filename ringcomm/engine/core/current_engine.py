"""The engine of the calling thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from ringcomm.errors import NotInitializedError


class _OfThread(threading.local):
    engine: Any = None  # class attribute, for threads without an engine


_of_process: Any = None  # an Engine; its class imports this module
_of_thread = _OfThread()


def engine() -> Any:
    """Return the engine of this rank. Raises NotInitializedError before init()."""
    found = _of_thread.engine
    if found is None:
        found = _of_process
        if found is None:
            raise NotInitializedError("ringcomm is not initialized: call ringcomm.init() first")
    return found


def has_engine() -> bool:
    return _of_thread.engine is not None or _of_process is not None


def serve_process(engine: Any) -> None:
    global _of_process  # noqa: PLW0603 - one per process, as in MPI
    _of_process = engine


@contextlib.contextmanager
def serve_thread(engine: Any) -> Iterator[None]:
    """Set the engine of this thread alone in the block, for ranks that are threads or leave."""
    before, _of_thread.engine = _of_thread.engine, engine
    try:
        yield
    finally:
        _of_thread.engine = before
