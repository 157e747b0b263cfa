"""How the members of a group agree on its context: what tells its messages from those of others."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ringcomm.engine.agreement import agree, mismatch
from ringcomm.engine.call import Call
from ringcomm.engine.ledger import NO_GROUP, Ledger, Ticket, base_of
from ringcomm.engine.progress import Strand, Task
from ringcomm.errors import RingcommError
from ringcomm.transport.base import CALLS, N_CONTEXTS
from ringcomm.transport.channel import Channel

if TYPE_CHECKING:
    from ringcomm.engine.engine import Engine
    from ringcomm.engine.group import Group


class Founding:
    """The groups that one rank has taken part in making.

    A group's context is the largest that any member has not used yet: two groups that share a rank
    never have the same one.
    """

    def __init__(self) -> None:
        self._one_at_a_time = threading.Lock()  # each takes the next context
        self._next_context = 1
        self._n_made: dict[tuple[int, ...], int] = {}

    def found(self, group: Group, engine: Engine) -> Ledger:
        """Return the ledger of a new group, agreed on by its members; blocks."""
        members = tuple(sorted(group.ranks))
        with self._one_at_a_time:
            number = self._n_made[members] = self._n_made.get(members, 0) + 1
            ticket = Ticket(None, base_of(NO_GROUP, str(members)), number)
            call = Call(f"Group({list(group.ranks)})")

            def talk(task: Task, _: int) -> Strand:
                return self._agree(task, call, number, engine)

            context: int = engine.result_of(
                engine.converse(f"{group!r}", members, talk, ticket=ticket)
            )
        if context >= N_CONTEXTS:
            raise RingcommError(
                f"{group!r}: this would be group {context} of this job, and {N_CONTEXTS - 1} are "
                "the limit: make groups once and keep them"
            )
        return Ledger(context, is_first=group.rank == 0)

    async def _agree(self, task: Task, call: Call, number: int, engine: Engine) -> int:
        talk = Channel(engine.watch, task.key, task.members)
        task.channels.append(talk)
        verdict = await agree(call.fingerprint, self._next_context, talk)
        context = verdict.value
        self._next_context = max(self._next_context, context + 1)
        if not verdict.is_agreed:
            calls = Channel(
                engine.watch, task.key, task.members, context=context % N_CONTEXTS, channel=CALLS
            )
            task.channels.append(calls)
            raise await mismatch(call, number, calls)
        return context
