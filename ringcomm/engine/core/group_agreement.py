"""How the members of a group agree on its context: what tells its messages from those of others."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ringcomm.engine.core.agreement import agree, mismatch
from ringcomm.engine.core.call import Call
from ringcomm.engine.core.ledger import NO_GROUP, Ledger, Ticket, base_of
from ringcomm.engine.progress.loop import Strand, Task
from ringcomm.errors import RingcommError
from ringcomm.transport.base import CALLS, TAGS_PER_GROUP, contexts_within
from ringcomm.transport.channel import Channel

if TYPE_CHECKING:
    from ringcomm.engine.api.group import Group
    from ringcomm.engine.core.engine import Engine


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
            number = self._n_made.get(members, 0) + 1
            ticket = Ticket(None, base_of(NO_GROUP, str(members)), number)
            call = Call(f"Group({list(group.ranks)})")

            def talk(task: Task, _: int) -> Strand:
                self._n_made[members] = number  # not before it is under way, and others count it
                return self._agree(task, call, number, engine)

            context: int = engine.complete(
                lambda: engine.converse(f"{group!r}", members, talk, ticket=ticket)
            )
        largest_tag = engine.transport.largest_tag
        if context >= contexts_within(largest_tag):
            raise RingcommError(_too_many(group, context, largest_tag))
        return Ledger(context, is_first=group.rank == 0)

    async def _agree(self, task: Task, call: Call, number: int, engine: Engine) -> int:
        talk = Channel(engine.watch, task.key, task.members)
        task.channels.append(talk)
        verdict = await agree(call.fingerprint, self._next_context, talk)
        context = verdict.value
        self._next_context = max(self._next_context, context + 1)
        if not verdict.is_agreed:
            nearest = context % contexts_within(engine.transport.largest_tag)
            calls = Channel(engine.watch, task.key, task.members, context=nearest, channel=CALLS)
            task.channels.append(calls)
            raise await mismatch(call, number, calls)
        return context


def _too_many(group: Group, context: int, largest_tag: int) -> str:
    return (
        f"{group!r}: this would be group {context} of this job, and "
        f"{contexts_within(largest_tag) - 1} are the limit: its messages need tags up to "
        f"{(context + 1) * TAGS_PER_GROUP - 1}, and there are tags up to {largest_tag}. Make "
        "groups once and keep them; where MPI has few tags (TAG_UB), another of its transports may "
        "have more: with Open MPI, `mpirun --mca pml ob1`"
    )
