"""Handles, which asynchronous operations return; poll() and synchronize()."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from ringcomm.engine.core import handle as engine

R = TypeVar("R")


class Handle(Generic[R]):
    """An operation under way, or several that make one; pass it to poll() or synchronize().

    Args:
        parts: what the engine carries out.
        finish: turns their results into the operation's; called at most once.
    """

    def __init__(
        self, parts: Sequence[engine.Handle[Any] | Handle[Any]], finish: Callable[..., R]
    ) -> None:
        self._parts = tuple(parts)
        self._finish: Callable[..., R] | None = finish
        self._result: R | None = None

    def done(self) -> bool:
        """Return True once wait() would not block."""
        return all(part.done() for part in self._parts)

    def wait(self, timeout_s: float | None = None) -> R:
        """Return the result; see ringcomm.Handle.wait()."""
        if self._finish is not None:
            results = [part.wait(timeout_s) for part in self._parts]
            self._result, self._finish = self._finish(*results), None
        return self._result  # type: ignore[return-value]  # it is what finish() returned

    __call__ = wait  # what sparse_allreduce_async() returns is called in Horovod


def poll(handle: Handle[Any]) -> bool:
    """Return True once synchronize() would not block."""
    _require_handle("poll", handle)
    return handle.done()


def synchronize(handle: Handle[R]) -> R:
    """Wait for an operation and return its result.

    Raises:
        MismatchError: ranks disagree; the same on every rank; the next operation works.
        PeerFailedError, CommTimeoutError: a rank died, left, or did not come.
    """
    _require_handle("synchronize", handle)
    return handle.wait()


def _require_handle(what: str, handle: object) -> None:
    if not hasattr(handle, "wait"):
        raise TypeError(f"{what} takes what an _async function returned, not {handle!r}")
