"""Handles, which asynchronous operations return; poll() and synchronize()."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from ringcomm.engine.core import handle as engine

R = TypeVar("R")


class HorovodHandle(Generic[R]):
    """An operation under way; pass it to poll() or synchronize().

    Args:
        parts: handles of the operations that this one consists of.
        finish: function that makes the result from the results of the parts; called at most once.
    """

    def __init__(
        self, parts: Sequence[engine.Handle[Any] | HorovodHandle[Any]], finish: Callable[..., R]
    ) -> None:
        self._parts = tuple(parts)
        self._finish: Callable[..., R] | None = finish
        self._result: R | None = None

    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    def wait(self, timeout_s: float | None = None) -> R:
        if self._finish is not None:
            results = [part.wait(timeout_s) for part in self._parts]
            self._result, self._finish = self._finish(*results), None
        return self._result  # type: ignore[return-value]  # it is what finish() returned

    __call__ = wait  # Horovod's sparse_allreduce_async() returns a function


def poll(handle: HorovodHandle[Any]) -> bool:
    """Return True if synchronize() would not block."""
    _require_handle("poll", handle)
    return handle.done()


def synchronize(handle: HorovodHandle[R]) -> R:
    """Wait for an operation and return its result.

    Raises:
        MismatchError: ranks disagree, and each of them gets this error. Later operations work.
        PeerFailedError, CommTimeoutError: a rank died, left, or did not come.
    """
    _require_handle("synchronize", handle)
    return handle.wait()


def _require_handle(caller: str, handle: object) -> None:
    if not hasattr(handle, "wait"):
        raise TypeError(f"{caller} takes a handle that an _async function returned, not {handle!r}")
