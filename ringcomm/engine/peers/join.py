"""join(): a rank without work takes part in operations of the others until all ranks have joined.

A rank that joins announces that to all others. From then on each rank that begins an operation
sends the call to the joined ranks, as an invitation. They begin the same operation with data that
changes no result, so all ledgers get the same entries. A rank that knows that all have
joined announces that, too, with the number of its steps. Messages between two ranks keep their
order, so once a rank has this second message from all others, no invitation is under way.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ringcomm.engine.core.call import Call
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.ledger import NO_GROUP, Ticket, base_of
from ringcomm.engine.core.pending_operations import Pending, PendingOperation
from ringcomm.engine.peers.answer_whether_entered import Whereabouts
from ringcomm.engine.peers.groups import Groups
from ringcomm.engine.peers.tasks_outside_collectives import Conversations
from ringcomm.engine.progress.task import CompletedTask, Task, TaskCoroutine
from ringcomm.transport.channel import Until, Wait
from ringcomm.transport.control_header import ControlHeader, ControlKind
from ringcomm.transport.control_messages import Watch

StandIn = Callable[[Call, Group], Task | CompletedTask]
_PART = 3500  # bytes of a call per message; control messages have at most 4096


class _Invitation(NamedTuple):
    """An operation that another rank has begun; for base and number see Ticket."""

    key: int
    group_id: int
    base: int
    number: int
    call: Call


class JoinedRanks:
    """The ranks that have joined. While this rank is one of them, it accepts invitations."""

    def __init__(
        self,
        watch: Watch,
        pending: Pending,
        groups: Groups,
        here: Whereabouts,
        talks: Conversations,
    ) -> None:
        watch.listeners[ControlKind.JOINED] = self._hear_joined
        watch.listeners[ControlKind.INVITE] = self._hear_invite
        self._watch = watch
        self._me, self._size = watch.transport.rank, watch.transport.size
        self._pending, self._groups = pending, groups
        self._whereabouts, self._conversations = here, talks
        self._round = 1
        self._joined: dict[int, dict[int, tuple[int, int]]] = {}  # by round: rank -> _now()
        # By round: the ranks that know that all have joined -> how many steps each has made.
        self._sealed: dict[int, dict[int, int]] = {}
        self._invitations: deque[_Invitation] = deque()
        self._parts: dict[tuple[int, int], list[str]] = {}
        self._tasks: list[Task | CompletedTask] = []
        self.has_guests = False  # another rank has joined, and must be invited
        self.seen: tuple[int, ...] = ()  # see Engine.seen_in_join

    @property
    def n_ended(self) -> int:
        """Number of times that all ranks have joined."""
        return self._round - 1

    def join(self, stand_in: StandIn, n_steps: int) -> tuple[int, int]:
        """Return the last rank that joined, once all have, and the most steps that any has made.

        Args:
            stand_in: begins invited operations.
            n_steps: how many steps this rank has made.
        """
        members = tuple(range(self._size))
        ticket = Ticket(None, base_of(NO_GROUP, "join"), self._round)

        def talk(task: Task, _: int) -> TaskCoroutine:
            task.late_elsewhere = lambda: self._missing(task)
            return self._stay(stand_in, n_steps)

        outcome: tuple[int, int] = self._conversations.hold("join()", members, talk, ticket)
        return outcome

    def invite(self, work: PendingOperation) -> None:
        """Invite the joined ranks to an operation of this rank; the caller holds the lock."""
        if self.has_guests and work.ledger is not None:
            self._invite(work, self._guests(work.task.members))

    def _hear_joined(self, source: int, header: ControlHeader, _: str) -> None:
        if header.flag:
            self._sealed.setdefault(header.value, {})[source] = header.key
            return
        with self._pending.lock:
            self._note(source, header.value, (header.fingerprint, header.key))

    def _hear_invite(self, source: int, header: ControlHeader, text: str) -> None:
        parts = self._parts.setdefault((source, header.key), [])
        parts.append(text)
        if header.flag:
            del self._parts[source, header.key]
            call = Call.unpack("".join(parts).encode())
            self._invitations.append(
                _Invitation(header.key, header.about, header.fingerprint, header.value, call)
            )

    async def _stay(self, stand_in: StandIn, n_steps: int) -> tuple[int, int]:
        watch, size, round_ = self._watch, self._size, self._round
        n_entered, now_us = when = self._now()
        with self._pending.lock:
            self._note(self._me, round_, when)
        watch.tell_all(ControlKind.JOINED, value=round_, fingerprint=n_entered, key=now_us)
        joined = self._joined[round_]
        await self._serve_until(lambda: len(joined) == size, stand_in)
        watch.tell_all(ControlKind.JOINED, value=round_, key=n_steps, flag=True)
        sealed = self._sealed.setdefault(round_, {})
        sealed[self._me] = n_steps
        await self._serve_until(lambda: len(sealed) == size and self._has_served(), stand_in)
        with self._pending.lock:
            self._round += 1
            self.seen = ()
            del self._joined[round_], self._sealed[round_]
            self._greet(self._guests(range(size)))
        return max(joined, key=lambda rank: (joined[rank], rank)), max(sealed.values())

    def _now(self) -> tuple[int, int]:
        """Return (number of operations begun in groups of all ranks, time in us).

        The largest pair is that of the last rank that joined. The order in which messages arrive
        cannot decide, because it differs between ranks. A rank that joins after others have gone
        on without it has begun more operations. Clocks of different hosts decide only between
        equal numbers.
        """
        return self._groups.n_entered_by_all, time.time_ns() // 1000

    async def _serve_until(self, is_enough: Callable[[], bool], stand_in: StandIn) -> None:
        while not is_enough():  # each accepted invitation begins a new wait
            await Wait((Until(lambda: self._serve(stand_in) or is_enough()),))

    def _serve(self, stand_in: StandIn) -> bool:
        """Begin the invited operations that are next; return True if an invitation was accepted."""
        n_before = len(self._invitations)
        self._tasks = [task for task in self._tasks if not task.is_over]
        for invitation in tuple(self._invitations):
            if self._take_part(invitation, stand_in):
                self._invitations.remove(invitation)
        return len(self._invitations) < n_before

    def _has_served(self) -> bool:
        return not self._invitations and not self._tasks

    def _take_part(self, invitation: _Invitation, stand_in: StandIn) -> bool:
        """Begin an operation unless it has begun; return False if another one must begin first."""
        base, number, call = invitation.base, invitation.number, invitation.call
        if self._whereabouts.has_entered(invitation.key, base, number):
            return True
        group = self._groups.of_id(invitation.group_id)
        if not group.ledger.is_next(call.name, number):
            return False
        self._tasks.append(stand_in(call, group))
        return True

    def _note(self, rank: int, round_: int, when: tuple[int, int]) -> None:
        self._joined.setdefault(round_, {})[rank] = when
        if round_ == self._round and rank != self._me:
            self._greet([rank])

    def _greet(self, guests: Iterable[int]) -> None:
        """Invite newly joined ranks to all pending operations; the caller holds the lock."""
        self.has_guests = bool(self._guests(range(self._size)))
        for work in self._pending.operations():
            if work.ledger is not None:
                self._invite(work, [rank for rank in guests if rank in work.task.members])

    def _guests(self, ranks: Iterable[int]) -> list[int]:
        joined = self._joined.get(self._round, ())
        return [rank for rank in ranks if rank in joined and rank != self._me]

    def _invite(self, work: PendingOperation, guests: Iterable[int]) -> None:
        assert work.ledger is not None
        assert work.call is not None
        text = work.call.pack(whole=True).decode()
        parts = [text[at : at + _PART] for at in range(0, len(text), _PART)]
        for guest in guests:
            for index, part in enumerate(parts):
                self._watch.tell(
                    guest,
                    ControlKind.INVITE,
                    part,
                    key=work.ticket.key,
                    fingerprint=work.ticket.base,
                    value=work.ticket.number,
                    about=work.ledger.group_id,
                    round=index % 256,
                    flag=index == len(parts) - 1,
                )

    def _missing(self, task: Task) -> tuple[int, ...]:
        """Return the ranks that have not joined; if one of them leaves, this wait is in vain."""
        joined = self._joined.get(task.number, ())
        return tuple(rank for rank in task.members if rank not in joined)
