"""Futures: the results of push(), pull() and other calls that are under way."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from ringcomm.errors import CommTimeoutError

R = TypeVar("R")
_log = logging.getLogger("ringcomm")
_LOCK: Final = threading.Lock()  # of callbacks and counts, held for a moment


class Pushed(NamedTuple):
    """The outcome of a push.

    Attributes:
        applied: it is part of the parameters, exactly once.
        why: "" if it was applied; "late": its round was over; "empty": nobody had a gradient for
            the round, so nothing changed; "skipped", of rows: release(None) dropped the round.
        version: updates of the block so far, of the block with the fewest.
        rejected: keys of a hash table that were not admitted.
        squares: of a push that is held: the sum of the squares of the round's mean.
        is_finite: of a push that is held: the mean has no inf or NaN.
    """

    applied: bool
    why: str
    version: int
    rejected: int = 0
    squares: float = 0.0
    is_finite: bool = True


class FutureWaiter(Protocol):
    """The client of a future."""

    def timestamp(self) -> int:
        """Return a number greater than all before."""

    def wait_for(self, future: Future[Any], timeout_s: float | None) -> None:
        """Return once the future is done. Raises CommTimeoutError, PeerFailedError."""

    def owing(self, future: Future[Any]) -> set[int]:
        """Return the servers that have not answered requests of the future."""


class Future(Generic[R]):
    """A request under way, which goes on whether or not anybody waits for it.

    Attributes:
        label: "push[w]".
        timestamp: number of the request; those of one process ascend.
        carried_by: the future of requests to several tables, its own among them, and which servers
            get its own; None: its requests go by themselves.
        acked_by: number of its last request, if an ack may be the answer; else 0.
    """

    acked_by = 0
    carried_by: tuple[Future[Any], set[int]] | None = None
    _result: Any = None
    _error: BaseException | None = None
    _is_done = False

    def __init__(self, client: FutureWaiter, label: str, n: int, finish: Callable[[], R]) -> None:
        self._client = client
        self.label = label
        self.timestamp = client.timestamp()
        self._left = n
        self._finish = finish
        self._callbacks: tuple[Callable[[Future[R]], object], ...] = ()
        if n == 0:
            self._complete()

    def done(self) -> bool:
        """Return True once wait() would return or raise at once; never blocks."""
        return self._is_done

    def wait(self, timeout_s: float | None = None) -> R:
        """Return the result.

        Args:
            timeout_s: how long this call waits, in seconds; None: ps.init(deadline_s=). After a
                timeout the request is still under way, and one can wait again.

        Raises:
            CommTimeoutError: the servers that it names have not answered.
            PeerFailedError: a rank died.
            ValueError, TypeError, KeyError: the server refused it; nothing was changed.
            ValueError: timeout_s is negative or not a number.
        """
        require_timeout(self.label, timeout_s)
        if not self._is_done:
            self._client.wait_for(self, timeout_s)
        if self._error is not None:
            raise self._error
        result: R = self._result
        return result

    result = wait

    def then(self, callback: Callable[[Future[R]], object]) -> Future[R]:
        """Call callback(self) once it is done; return self.

        If it is done already, at once and in this thread; else in the thread that notices: the
        callback must be short and must not wait for anything. What it raises is logged.
        """
        with _LOCK:
            if not self._is_done:
                self._callbacks += (callback,)
                return self
        self._call(callback)
        return self

    def replied(self) -> None:
        """Count a good reply."""
        self._count_down()

    def unanswered(self) -> set[int]:
        """Return the servers that have not answered."""
        servers = self._client.owing(self)
        if self.carried_by is not None:
            whole, own = self.carried_by
            servers |= own & whole.unanswered()
        return servers

    def _count_down(self) -> None:
        with _LOCK:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self._complete()

    def expect(self, n: int) -> None:
        """Await so many more replies; while one is outstanding. Any thread."""
        with _LOCK:
            self._left += n

    def fail(self, error: BaseException) -> None:
        """End with an error, which wait() raises; the first one counts."""
        if not self._is_done:
            self._error = error
            self._end()

    def _complete(self) -> None:
        try:
            self._result = self._finish()
        except Exception as error:  # noqa: BLE001 - raised where the result is asked for
            self._error = error
        self._end()

    def _end(self) -> None:
        with _LOCK:
            self._is_done = True
            callbacks, self._callbacks = self._callbacks, ()
        for callback in callbacks:
            self._call(callback)

    def _call(self, callback: Callable[[Future[R]], object]) -> None:
        try:
            callback(self)
        except Exception:  # noqa: BLE001 - the thread that drives did not write it
            _log.exception("%s: a callback of then() raised", self.label)

    def __repr__(self) -> str:
        state = "pending" if not self._is_done else "failed" if self._error else "done"
        return f"<Future of {self.label}: {state}>"


class FutureOfAll(Future[list[R]]):
    """Done once all its parts are; the list of their results, or the first error among them.

    Args:
        client: which made them.
        label: see Future.
        parts: futures.
    """

    def __init__(self, client: FutureWaiter, label: str, parts: Sequence[Future[R]]) -> None:
        self._parts = parts
        super().__init__(client, label, len(parts), lambda: [each.wait() for each in parts])
        for each in parts:
            each.then(lambda _: self._count_down())

    def unanswered(self) -> set[int]:
        return {server for each in self._parts for server in each.unanswered()}


def require_timeout(label: str, timeout_s: object) -> None:
    if timeout_s is not None and not (isinstance(timeout_s, Real) and float(timeout_s) >= 0):
        raise ValueError(f"{label}: timeout_s is {timeout_s!r}; it must be a number >= 0")


def pull_after(push: Future[Any], pull: Callable[[], Future[R]]) -> Future[R]:
    """Return pull(). If it times out the future raises that: the caller must not push again."""
    try:
        return pull()
    except CommTimeoutError as error:
        failed: Future[R] = Future(push._client, push.label, 1, _never_sent)
        failed.fail(error)
        return failed


def _never_sent() -> Any:
    raise AssertionError("it failed before it was sent")
