"""Conversations: tasks that are no collectives, for messages, new groups and join()."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringcomm.engine.core.completion import Completion
from ringcomm.engine.core.ledger import NO_GROUP, Ticket, base_of
from ringcomm.engine.core.pending_operations import Pending, PendingOperation
from ringcomm.engine.core.usable_or_broken import EngineState
from ringcomm.engine.progress.task import Task, TaskCoroutine

Talk = Callable[[Task, int], TaskCoroutine]


class Conversations:
    """Begins tasks that are no collectives; the ledgers of groups do not count them."""

    def __init__(
        self, rank: int, state: EngineState, pending: Pending, completion: Completion
    ) -> None:
        self._rank = rank
        self._state = state
        self._pending = pending
        self._completion = completion
        self._n_begun = 0

    def begin(
        self,
        label: str,
        members: tuple[int, ...],
        talk: Talk,
        ticket: Ticket | None = None,
        *,
        is_awaited: bool = True,
        timeout_s: float | None = None,
    ) -> Task:
        """Begin a conversation with other ranks; return its task, for Completion.result_of().

        Args:
            label: text that names the conversation, such as "recv(source=3, tag=0)".
            members: ranks of the job, also this one; the death of any ends the conversation.
            talk: function of the task and of a serial number; returns the coroutine.
            ticket: identity of the task, the same on all members; None: of this rank alone.
            is_awaited, timeout_s: see PendingOperation and Engine.execute().
        """
        progress = self._completion.progress
        if not is_awaited:
            progress.work_in_background()
        self._state.require_own_process()
        is_begun = False
        try:
            with self._pending.lock:
                self._state.require_usable()
                self._pending.require_room(self._rank)
                self._n_begun += 1
                if ticket is None:
                    base = base_of(NO_GROUP, f"rank {self._rank}")
                    ticket = Ticket(None, base, self._n_begun)
                task = Task(label, ticket, members)
                task.timeout_s = timeout_s
                is_begun = True
                task.start(talk(task, self._n_begun))
                self._pending.add(PendingOperation(task, None, ticket, 0))
                progress.submit(task, is_awaited=is_awaited)
        except BaseException as error:
            if is_begun:
                self._completion.break_engine(error, label)
            raise
        return task

    def hold(
        self,
        label: str,
        members: tuple[int, ...],
        talk: Talk,
        ticket: Ticket | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Any:
        """Begin a conversation and return its result; blocks. See begin()."""
        task = None
        try:
            task = self.begin(label, members, talk, ticket, timeout_s=timeout_s)
            return self._completion.result_of(task)
        except BaseException as error:
            self._completion.break_unless_over(task, error)
            raise
