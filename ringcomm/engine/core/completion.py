"""Ends operations, gives callers their results, and decides which errors break the engine."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from typing import Any, Final

from ringcomm.config import Settings
from ringcomm.engine.core.pending_operations import Pending, PendingOperation
from ringcomm.engine.core.plan import Deferred
from ringcomm.engine.core.usable_or_broken import EngineState
from ringcomm.engine.progress.deadlines import ANSWER_S, ask_around, describe_wait
from ringcomm.engine.progress.loop import Progress
from ringcomm.engine.progress.task import CompletedTask, Task
from ringcomm.errors import (
    CommTimeoutError,
    ConfigError,
    MismatchError,
    PeerFailedError,
    RingcommError,
)
from ringcomm.transport.control_messages import Watch

_log = logging.getLogger("ringcomm")
_ASK_EVERY_S: Final = 0.1


class Completion:
    """Waits for tasks, notes their ends, and decides which errors break the engine."""

    def __init__(
        self, watch: Watch, settings: Settings, state: EngineState, pending: Pending
    ) -> None:
        self._watch = watch
        self._state = state
        self._pending = pending
        self.progress = Progress(watch, settings, self._on_over, self.break_engine)
        self._lost_on_streams: BaseException | None = None
        self._last_dropped = ""
        self._has_raised = False
        self._has_warned_of_names = False

    def result_of(self, task: Task | CompletedTask, timeout_s: float | None = None) -> Any:
        if timeout_s is not None and not (hasattr(timeout_s, "__float__") and timeout_s >= 0):
            raise ValueError(f"timeout_s is {timeout_s!r}; it must be a number of seconds >= 0")
        if not task.is_over:
            assert isinstance(task, Task)
            self._state.require_own_process()
            self._wait(task, math.inf if timeout_s is None else timeout_s)
        task.is_asked = True
        if isinstance(task.error, RingcommError):
            self._has_raised = True
            raise copy.copy(task.error) from task.error.__cause__  # a traceback per waiter
        if task.error is not None:
            raise task.error
        return task.result.take() if isinstance(task.result, Deferred) else task.result

    def await_streams(self) -> None:
        """Return once what operations have left on streams of GPUs is done.

        Raises the error of an operation that failed there: its result is worthless.
        """
        for work in self._pending.operations():
            if work.task.is_follow_up:
                self.result_of(work.task)
        if self._lost_on_streams is not None:
            raise copy.copy(self._lost_on_streams)

    def wait_unless(self, is_vain: Callable[[Task], bool], task: Task | CompletedTask) -> bool:
        """Wait until a task is over; return False if is_vain(task), by the other ranks' answers.

        They are asked every 0.1 s where they are. An interrupt breaks the engine.
        """
        try:
            while not task.is_over:
                assert isinstance(task, Task)
                if self.progress.wait(task, _ASK_EVERY_S):
                    break
                if is_vain(task):
                    return False
                ask_around(task, self._watch)
        except BaseException as error:
            task.is_asked = True
            self.break_engine(error)
            raise
        return True

    def wait_briefly(self, limit_s: float, task: Task | CompletedTask) -> bool:
        """Wait until a task is over; return False after limit_s, having asked the others for news.

        For who waits for one of several tasks, again and again. An interrupt breaks the engine.
        """
        if not task.is_over:
            assert isinstance(task, Task)
            self._state.require_own_process()
            self._wait(task, limit_s, raises=False)
        return task.is_over

    def break_unless_over(self, task: Task | CompletedTask | None, error: BaseException) -> None:
        """Break the engine if `error` interrupted a task; None: the task did not begin."""
        if task is not None and not task.is_over:
            self.break_engine(error)

    def break_engine(self, error: BaseException, label: str = "") -> None:
        """Break the engine and end all tasks, as after an interrupt; any thread may call.

        label: the operation to blame; by default the oldest one.
        """
        if self._state.break_off(label or self._pending.oldest() or "ringcomm", error):
            self.progress.fail_soon(self._state.copy_of_error)

    def warn_of_dropped(self, error: BaseException) -> None:
        """Log an error that no caller will see; once if it has ended several operations.

        What has broken the engine is not logged if a caller of another operation has its error.
        """
        if self._has_raised and self._state.is_broken:
            return
        text = str(error)
        if text != self._last_dropped:
            self._last_dropped = text
            _log.warning("nobody waited for an operation that failed: %s", text)

    def _wait(self, task: Task, limit_s: float, *, raises: bool = True) -> None:
        """Return once the task is over. After limit_s find missing ranks, then raise an error.

        To find the lines at which they are takes long, and interrupts them.
        """
        task.waiters.append(0)
        try:
            if self.progress.wait(task, limit_s):
                return
            missing: list[int] = []
            text = f"{task.label}: is not over."
            if limit_s > 0:
                ask_around(task, self._watch)
                if self.progress.wait(task, min(ANSWER_S, limit_s)) or not raises:
                    return
                text = describe_wait(task, self._watch, limit_s)
                missing = self._watch.peers.blamed(task.key, task.members)
        except BaseException as error:  # an interrupt, or the wire broke
            task.is_asked = True
            self.break_engine(error)
            raise
        finally:
            task.waiters.pop()
        raise CommTimeoutError(
            f"{text} The timeout of this wait is over. The operation is still under way, and the "
            "engine stays usable: wait again, or pass a larger timeout_s.",
            missing=missing,
        )

    def _on_over(self, task: Task, error: BaseException | None) -> None:
        """Note that a task is over, and break the engine if the error requires it."""
        try:
            with self._pending.lock:
                work = self._pending.get(task.key)
                if work.ledger is not None:
                    work.ledger.finish(work.ticket)
                    if work.ledger.has_overflown and not self._has_warned_of_names:
                        self._warn_of_names(work.ledger.n_cached)
                has_failed = error is not None and not _is_harmless(work, error)
                is_fatal = has_failed and not self._ends_alone(task, error)
                if work.lane is not None:
                    work.lane.end(_outcome(work, error, has_failed=has_failed))
                if has_failed and work.ledger is not None:
                    work.ledger.is_spoiled = True  # its context must not be used again
                self._pending.remove(task.key, has_failed=is_fatal)
            self._watch.peers.forget(task.key)
        finally:
            if task.is_follow_up and error is not None:
                self._lost_on_streams = error
            task.error = error
            task.is_over = True
            task.call_back()
        if error is not None and is_fatal and self._state.break_off(task.label, error):
            self.progress.fail_all(self._state.copy_of_error)
        elif task.is_dropped and error is not None:
            self.warn_of_dropped(error)

    def _ends_alone(self, task: Task, error: BaseException | None) -> bool:
        """Return True if the group of a failed task ends, and the engine goes on.

        A rank died without which the job goes on. It belongs to the group, so all others that live
        have the same error, in this operation or in the next: see refuse_hopeless(). They hear of
        the death before they can see that this rank has given the operation up.
        """
        if not (task.ends_alone and isinstance(error, PeerFailedError)):
            return False
        is_own_fault = error.rank == self._watch.transport.rank
        peers, or_left = self._watch.peers, task.ends_alone_if_left
        return not is_own_fault and peers.are_parted(task.members, or_left=or_left)

    def _warn_of_names(self, n_cached: int) -> None:
        self._has_warned_of_names = True
        if self._watch.transport.rank == 0:
            _log.warning(
                "more than %d names are in use, so each operation with a further name costs a "
                "round of agreement. Do not put a step number into a name.",
                n_cached,
            )


def _is_harmless(work: PendingOperation, error: BaseException) -> bool:
    """Return True if all ranks have the error, so that no message is left over."""
    return isinstance(error, MismatchError | ConfigError) or error is work.problem


def _outcome(work: PendingOperation, error: BaseException | None, *, has_failed: bool) -> str:
    if error is None:
        return "done"
    return "failed" if has_failed else "refused" if error is work.problem else "mismatch"
