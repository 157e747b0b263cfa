"""What push(), pull() and the like return."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from numbers import Real
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from ringcomm.errors import CommTimeoutError

if TYPE_CHECKING:
    from ringcomm.ps.client import Client

R = TypeVar("R")
_log = logging.getLogger("ringcomm")
_LOCK: Final = threading.Lock()  # of callbacks and counts, held for a moment


class Pushed(NamedTuple):
    """What became of a push.

    Attributes:
        applied: it is part of the parameters, exactly once.
        why: "" if it was applied; "late": the round that it was for was over; "empty": nobody had a
            gradient for it, so that it changed nothing; "skipped", of rows: release(None) dropped
            the round.
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


class Future(Generic[R]):
    """A request under way, which goes on whether or not anybody waits for it.

    Args:
        client: which made it.
        label: "push[w]".
        n: how many replies make it complete.
        finish: makes the result of them.

    Attributes:
        timestamp: number of the request; those of one process ascend.
        awaited: servers that have not answered.
        acked_by: number of its last request, if an ack may be the answer; else 0.
    """

    acked_by = 0
    _result: Any = None
    _error: BaseException | None = None
    _is_done = False

    def __init__(
        self, client: Client, label: str, n: int, finish: Callable[[], R], timestamp: int
    ) -> None:
        self._client = client
        self.label = label
        self.timestamp = timestamp
        self._left = n
        self._finish = finish
        self._callbacks: tuple[Callable[[Future[R]], object], ...] = ()
        self.awaited: set[int] = set()
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
        """Let callback(self) be called once it is done; return self.

        At once and in this thread if it is done already; else in the thread that notices: the
        callback must be short and must not wait for anything. What it raises is logged.
        """
        with _LOCK:
            if not self._is_done:
                self._callbacks += (callback,)
                return self
        self._call(callback)
        return self

    def replied(self, server: int) -> None:
        """Take note of a good reply."""
        with _LOCK:
            self._left -= 1
            is_last = self._left == 0
        self.awaited.discard(server)
        if is_last:
            self._complete()

    def expect(self, n: int) -> None:
        """Let it take so many more replies; while one is outstanding. Any thread."""
        with _LOCK:
            self._left += n

    def fail(self, error: BaseException) -> None:
        """Let wait() raise; the first error counts."""
        if not self._is_done:
            self._error = error
            self._end()

    def _complete(self) -> None:
        try:
            self._result = self._made()
        except Exception as error:  # noqa: BLE001 - raised where the result is asked for
            self._error = error
        self._end()

    def _made(self) -> R:
        return self._finish()

    def _end(self) -> None:
        with _LOCK:
            self._is_done = True
            callbacks, self._callbacks = self._callbacks, ()
        for callback in callbacks:
            self._call(callback)

    def _call(self, callback: Callable[[Future[R]], object]) -> None:
        try:
            callback(self)
        except Exception:  # noqa: BLE001 - who drives did not write it
            _log.exception("%s: a callback of then() raised", self.label)

    def __repr__(self) -> str:
        state = "pending" if not self._is_done else "failed" if self._error else "done"
        return f"<Future of {self.label}: {state}>"


def require_timeout(label: str, timeout_s: object) -> None:
    """Raise ValueError for what no wait can be long: who drives compares it with the clock."""
    if timeout_s is not None and not (isinstance(timeout_s, Real) and float(timeout_s) >= 0):
        raise ValueError(f"{label}: timeout_s is {timeout_s!r}; it must be a number >= 0")


def behind(push: Future[Any], pull: Callable[[], Future[R]]) -> Future[R]:
    """Return pull(); a future that raises what that raises, as who calls must not push again."""
    try:
        return pull()
    except CommTimeoutError as error:
        failed: Future[R] = Future(push._client, push.label, 1, _unreachable, push.timestamp)
        failed.fail(error)
        return failed


def _unreachable() -> Any:
    raise AssertionError("it failed before it was sent")
