"""The handle that an asynchronous operation returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from ringcomm.engine.core.completion import Completion
from ringcomm.engine.progress.task import CompletedTask, Task

R = TypeVar("R")


class Handle(Generic[R]):
    """An operation under way. It goes on whether or not anybody waits for it.

    Any thread of the rank may wait, in any order, more than once, and after shutdown(), which
    completes what was started. A handle may be dropped: the operation is carried out all the same,
    and an error that nobody can ask for any more is a warning in the log. Until it is over, what
    was passed in must not be changed, and in-place arguments not be read.
    """

    def __init__(self, completion: Completion, task: Task | CompletedTask) -> None:
        self._completion = completion
        self._task = task

    def wait(self, timeout_s: float | None = None) -> R:
        """Return the result of the operation.

        On a GPU that is not when it is computed: this returns once the work is on a stream, and
        what the current stream is given from then on comes behind it.

        Args:
            timeout_s: how long this call waits, in seconds, and up to 0.5 s more to learn who is
                missing; 0 only looks. None: until RINGCOMM_TIMEOUT_S ends the operation. After a
                shorter one the operation is still under way.

        Raises:
            CommTimeoutError: timeout_s is over; the engine stays usable, and one can wait again. Or
                RINGCOMM_TIMEOUT_S is over, and the engine is unusable; the text says which.
            MismatchError, PeerFailedError, ...: as the synchronous form raises.
            ValueError: timeout_s is negative or not a number.
        """
        result: R = self._completion.result_of(self._task, timeout_s)
        return result

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when the operation is over, however it ends.

        At once and in this thread if it is over already; else in the thread that notices, which
        then does nothing else for this rank: the callback must be short, must not raise, and must
        not wait for anything.

        Raises:
            TypeError: it cannot be called.
        """
        if not callable(callback):
            raise TypeError(f"when_done: the callback must be a function, not {callback!r}")
        self._task.when_over(callback)

    def done(self) -> bool:
        """Return True once wait() would return or raise at once; never blocks."""
        return self._task.is_over

    @property
    def number(self) -> int:
        """Number among its group's unnamed operations, from 1 on; the same on all ranks."""
        return self._task.number

    def __del__(self) -> None:
        task: Task | CompletedTask | None = self.__dict__.get("_task")
        if task is None or task.is_asked:
            return
        task.is_dropped = True
        if task.is_over and task.error is not None:
            self._completion.dropped.warn(task.error)

    def __repr__(self) -> str:
        state = "pending" if not self.done() else "failed" if self._task.error else "done"
        return f"<Handle of {self._task.label}: {state}>"
