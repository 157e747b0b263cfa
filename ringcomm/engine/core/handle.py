"""The handle that an asynchronous operation returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from ringcomm.engine.core.completion import Completion
from ringcomm.engine.progress.task import CompletedTask, Task

R_co = TypeVar("R_co", covariant=True)


class Handle(Generic[R_co]):
    """An operation under way. The operation goes on whether or not anybody waits for it.

    Any thread of the rank may wait, in any order, more than once, and after shutdown(), which
    completes the operations that were started. A handle may be dropped: the operation goes on, and
    its error becomes a warning in the log. Until the operation is over, its arguments must not be
    changed, and those that it overwrites must not be read.
    """

    def __init__(self, completion: Completion, task: Task | CompletedTask) -> None:
        self._completion = completion
        self._task = task

    def wait(self, timeout_s: float | None = None) -> R_co:
        """Return the result of the operation.

        For arrays on a GPU, this returns once the work is on a stream, before it is computed. Work
        that is put on the current stream from then on runs after it.

        Args:
            timeout_s: limit of this wait in seconds; after it, the call takes up to 0.5 s to learn
                which ranks are missing. 0: do not wait. None: until RINGCOMM_TIMEOUT_S ends the
                operation. A shorter timeout_s does not end the operation.

        Raises:
            CommTimeoutError: timeout_s has passed; the engine stays usable, and the caller may wait
                again. Or RINGCOMM_TIMEOUT_S has passed, and the engine is unusable. The text says
                which.
            MismatchError, PeerFailedError, ...: as in the blocking form.
            ValueError: timeout_s is negative or not a number.
        """
        result: R_co = self._completion.result_of(self._task, timeout_s)
        return result

    def wait_unless(self, is_vain: Callable[[Task], bool]) -> bool:
        """See Completion.wait_unless()."""
        return self._completion.wait_unless(is_vain, self._task)

    def wait_briefly(self, limit_s: float) -> bool:
        """See Completion.wait_briefly()."""
        return self._completion.wait_briefly(limit_s, self._task)

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when the operation has succeeded or failed.

        If the operation is over, this thread calls it now; else the thread that drives the rank's
        operations calls it. All operations stop meanwhile, so the callback must be short, must not
        raise, and must not wait for anything.

        Raises:
            TypeError: callback is not callable.
        """
        if not callable(callback):
            raise TypeError(f"when_done: the callback must be a function, not {callback!r}")
        self._task.when_over(callback)

    def done(self) -> bool:
        """Return True if wait() would return or raise at once; never blocks."""
        return self._task.is_over

    @property
    def number(self) -> int:
        """Number of an unnamed operation in its group, from 1 on; the same on all ranks."""
        return self._task.number

    def __del__(self) -> None:
        task: Task | CompletedTask | None = self.__dict__.get("_task")
        if task is None or task.is_asked:
            return
        task.is_dropped = True
        if task.is_over and task.error is not None:
            self._completion.warn_of_dropped(task.error)

    def __repr__(self) -> str:
        state = "pending" if not self.done() else "failed" if self._task.error else "done"
        return f"<Handle of {self._task.label}: {state}>"


def wait_all(handles: Iterable[Handle[R_co]]) -> list[R_co]:
    """Return the results of all handles, in their order, once all operations are over.

    The handles may be of any operations, such as isend() and allreduce_async().

    Raises:
        TypeError: one is no Handle. Nothing was waited for.
        MismatchError, PeerFailedError, CommTimeoutError, ...: an operation failed. If several did,
            this is the error of the first one in the order of the handles; its notes have the
            others. All were waited for.
    """
    checked: list[Handle[R_co]] = []
    for each in handles:
        if not isinstance(each, Handle):
            raise TypeError(f"wait_all: handles must be of ringcomm.Handle, not {each!r}")
        checked.append(each)
    results: list[R_co] = []
    failures: list[tuple[int, Exception]] = []
    for place, handle in enumerate(checked):
        try:
            results.append(handle.wait())
        except Exception as error:  # noqa: BLE001 - raised once all are over
            failures.append((place, error))
    if not failures:
        return results
    _, first = failures[0]
    for place, failure in failures[1:]:
        if str(failure) != str(first):
            first.add_note(f"wait_all: the operation of handle {place} failed, too: {failure}")
    raise first
