"""Conversations of ranks on which no collective agrees: messages, new groups, joining."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringcomm.engine.core.completion import Completion
from ringcomm.engine.core.ledger import NO_GROUP, Ticket, base_of
from ringcomm.engine.core.pending import Pending, PendingOperation
from ringcomm.engine.core.state import EngineState
from ringcomm.engine.progress.task import Task, TaskCoroutine

Talk = Callable[[Task, int], TaskCoroutine]


class Conversations:
    """Begins tasks on which no collective agrees."""

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
        """Begin to speak with other ranks; see Completion.result_of().

        Args:
            label: "recv(source=3, tag=0)".
            members: the ranks of the job whose death ends it, this one among them.
            talk: returns what to do, given the task and a serial number of this rank's.
            ticket: what it is, the same on those ranks; None: no other rank knows it.
            is_awaited, timeout_s: see Engine.start().
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

    def hold(self, label: str, members: tuple[int, ...], talk: Talk, ticket: Ticket) -> Any:
        """Return the result of a conversation; blocks."""
        return self._completion.complete(lambda: self.begin(label, members, talk, ticket))
