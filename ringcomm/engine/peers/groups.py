"""The groups of a rank: how their members agree on them, and when they are over.

A group has two numbers. Its id identifies the group in control messages; two groups that share a
rank never have the same id. Its context is a part of the tag of each of its messages, and the
number of its window of shared memory. There are few contexts, so a context is used again after
every member has dropped the group and knows that all others have done so.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ringcomm.collectives.message_patterns import dissemination_steps
from ringcomm.engine.core.agreement import agree, mismatch
from ringcomm.engine.core.call import Call
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.ledger import NO_GROUP, Ledger, Tally, Ticket, base_of
from ringcomm.engine.peers.tasks_outside_collectives import Conversations
from ringcomm.engine.progress.task import Task, TaskCoroutine
from ringcomm.errors import RingcommError
from ringcomm.transport.channel import Channel, Until, Wait
from ringcomm.transport.control_header import ControlHeader, ControlKind
from ringcomm.transport.control_messages import Watch
from ringcomm.transport.tags import GROUPS

_ATTEMPTS = 12  # to find a free context; between them, members may drop other groups
_PAUSE_S = 0.1  # between two attempts


@dataclass
class _Member:
    ledger: Ledger
    steps: tuple[tuple[int, int], ...]  # (dest, source) in each round of DROPPED messages
    is_dropped: bool = False  # this rank has no reference to the group, and no operation in it
    round: int = 0  # the round whose message this rank waits for


class Groups:
    """The groups of one rank, from the agreement on them until all members have dropped them."""

    def __init__(self, watch: Watch, of_all: Group, conversations: Conversations) -> None:
        self._watch = watch
        self._conversations = conversations
        self._of_all = of_all  # is never over
        self.default = of_all  # stands for group=None; this process is a member
        self._one_at_a_time = threading.Lock()  # for new groups
        self._next_id = 1
        self._n_made: dict[tuple[int, ...], int] = {}
        self._groups: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()
        self._members: dict[int, _Member] = {}  # by id
        watch.listeners[ControlKind.DROPPED], watch.before_poll = self._hear_dropped, self._poll
        self._contexts = 1  # bit c: context c is in use
        self._heard: dict[int, set[int]] = {}  # by id: rounds whose message has come
        self._dropped: deque[int] = deque()  # ids, appended by the garbage collector in any thread
        # Called with the id of a group once all members have dropped it.
        self.when_over: Callable[[int], None] = lambda group_id: None

    @property
    def ledgers(self) -> list[Ledger]:
        return [self._of_all.ledger, *(each.ledger for each in list(self._members.values()))]

    @property
    def n_entered_by_all(self) -> int:
        """Number of operations that this rank has begun in groups of all ranks."""
        return self._of_all.ledger.tally.n_entered

    def or_default(self, group: Group | None) -> Group:
        if group is None:
            return self.default
        if not isinstance(group, Group):
            raise TypeError(f"group must be a ringcomm.Group or None, not {group!r}")
        return group

    def agree_on(self, group: Group, key: str = "", timeout_s: float | None = None) -> Ledger:
        """Return the ledger of a new group once its members have agreed on it; see Group."""
        ledger: Ledger | None
        with self._one_at_a_time:
            for attempt in range(_ATTEMPTS):  # all members get the same result each time
                pause_s = _PAUSE_S if attempt else 0.0
                ledger, n_in_use = self._attempt(group, key, pause_s, timeout_s)
                if ledger is not None:
                    break
                gc.collect()  # drops groups in cycles of references
            else:
                raise RingcommError(
                    _too_many(group, n_in_use, self._watch.transport.tags.largest_tag)
                )
        self._groups[ledger.group_id] = group
        weakref.finalize(group, self._dropped.append, ledger.group_id).atexit = False
        return ledger

    def require_all_met(self, group: Group, failure: Exception | None) -> None:
        """Return once all members have their memory for a new group; else raise, on all of them.

        A member without memory would otherwise leave alone, and the others wait in the group.

        Args:
            failure: why this rank cannot take part, None if it can.
        """
        members = tuple(sorted(group.ranks))
        ticket = Ticket(None, base_of(NO_GROUP, f"met {members}"), self._n_made[members])
        mine = 0 if failure is None else members.index(self._watch.transport.rank) + 1

        async def talk(task: Task) -> int:
            channel = Channel(self._watch, task.key, task.members)
            task.channels.append(channel)
            return (await agree(0, mine, channel)).value

        failed = self._hold(group, members, talk, ticket)
        if failed:
            one = members[failed - 1] if failure is None else self._watch.transport.rank
            why = f"{type(failure).__name__}: {failure}" if failure else "its own error says why"
            who = self._watch.transport.label(one)
            raise RingcommError(
                f"{group!r}: {who} cannot take part ({why}), so no member has the group"
            ) from failure

    def of_id(self, group_id: int) -> Group:
        """Return the group of this id. Raises RingcommError if this rank has dropped it."""
        group = self._groups.get(group_id) if group_id else self._of_all
        if group is None:
            raise RingcommError(
                f"join(): another rank uses group {group_id}, which rank "
                f"{self._watch.transport.rank} has dropped: keep a reference to it"
            )
        return group

    def has_entered(self, base: int, number: int) -> bool:
        return any(ledger.has_entered(base, number) for ledger in self.ledgers)

    def _poll(self) -> None:
        while self._dropped and not self._watch.has_left:
            group_id = self._dropped.popleft()
            member = self._members[group_id]
            if not member.ledger.is_spoiled:  # else its context must not be used again
                member.is_dropped = True
                self._tell(group_id, member)
                self._advance(group_id, member)

    def _hear_dropped(self, _: int, header: ControlHeader, __: str) -> None:
        self._heard.setdefault(header.key, set()).add(header.round)
        member = self._members.get(header.key)
        if member is not None and member.is_dropped and not self._watch.has_left:
            self._advance(header.key, member)

    def _attempt(
        self, group: Group, key: str, pause_s: float, timeout_s: float | None
    ) -> tuple[Ledger | None, int]:
        """Return (ledger, number of contexts in use); the ledger is None if no context is free."""
        members = tuple(sorted(group.ranks))
        number = self._n_made.get(members, 0) + 1
        ticket = Ticket(None, base_of(NO_GROUP, f"{members}{key}"), number)

        def talk(task: Task) -> TaskCoroutine:
            self._n_made[members] = number  # now that the task is under way
            return self._agree(task, group, number, pause_s)

        result: tuple[Ledger | None, int] = self._hold(group, members, talk, ticket, timeout_s)
        return result

    def _hold(
        self,
        group: Group,
        members: tuple[int, ...],
        talk: Callable[[Task], TaskCoroutine],
        ticket: Ticket,
        timeout_s: float | None = None,
    ) -> Any:
        def begin(task: Task, _: int) -> TaskCoroutine:
            task.ends_alone = task.ends_alone_if_left = True
            return talk(task)

        return self._conversations.hold(f"{group!r}", members, begin, ticket, timeout_s=timeout_s)

    async def _agree(
        self, task: Task, group: Group, number: int, pause_s: float
    ) -> tuple[Ledger | None, int]:
        call = Call(f"Group({list(group.ranks)})")
        if pause_s:
            end = time.monotonic() + pause_s
            await Wait((Until(lambda: time.monotonic() >= end),))
        self._poll()
        talk = Channel(self._watch, task.key, task.members)
        task.channels.append(talk)
        verdict = await agree(call.fingerprint, self._next_id, talk, in_use=self._contexts)
        if not verdict.is_agreed:
            calls = Channel(self._watch, task.key, task.members, channel=GROUPS)
            task.channels.append(calls)
            raise await mismatch(call, number, calls)
        context = (~verdict.in_use & (verdict.in_use + 1)).bit_length() - 1  # the lowest free one
        if context >= self._watch.transport.tags.n_contexts:
            return None, verdict.in_use.bit_count()
        ledger = self._take(group, verdict.value, context)
        return ledger, verdict.in_use.bit_count()

    def _take(self, group: Group, group_id: int, context: int) -> Ledger:
        is_of_all = group.size == self._watch.transport.size
        tally = self._of_all.ledger.tally if is_of_all else Tally()
        tags = self._watch.transport.tags
        ledger = Ledger(group_id, context=context, is_first=group.rank == 0, tally=tally, tags=tags)
        ranks, pairs = group.ranks, dissemination_steps(group.index, group.size)
        steps = tuple((ranks[dest], ranks[source]) for dest, source in pairs)
        self._next_id = group_id + 1
        self._contexts |= 1 << context
        self._members[group_id] = _Member(ledger, steps)
        return ledger

    def _tell(self, group_id: int, member: _Member) -> None:
        if member.round < len(member.steps):
            dest, _ = member.steps[member.round]
            self._watch.tell(dest, ControlKind.DROPPED, key=group_id, round=member.round)

    def _advance(self, group_id: int, member: _Member) -> None:
        """Go past the rounds whose message has come; after the last, no member has the group."""
        heard = self._heard.setdefault(group_id, set())
        while member.round < len(member.steps) and member.round in heard:
            member.round += 1
            self._tell(group_id, member)
        if member.round == len(member.steps):
            self._recycle(group_id, member.ledger.context)

    def _recycle(self, group_id: int, context: int) -> None:
        del self._heard[group_id], self._members[group_id]
        node = self._watch.transport.node
        if node is not None:
            node.clear(context)
        self._contexts &= ~(1 << context)
        self.when_over(group_id)


def _too_many(group: Group, n_in_use: int, largest_tag: int) -> str:
    return (
        f"{group!r}: its ranks have {n_in_use - 1} groups in use, which is the limit: each needs "
        f"tags of its own, and there are tags up to {largest_tag} (TAG_UB). Drop "
        "groups that are not needed, on all of their members: new ones can then be made. If MPI "
        "has few tags, another of its transports may have more: with Open MPI, "
        "`mpirun --mca pml ob1`"
    )
