"""The decisions of one process about the members of its job. Pure.

    state, actions = handle(state, event)

A rank that has lost another stops its operations, and begins to heal: it sends all changes that it
knows of to those that it takes for alive. Changes only grow. Once every live process has sent
exactly the changes of this one, they are agreed on, and no live process works in the old view any
more. Then each process clears its shared memory and says so. Once all have, each of them installs
the next view, which the changes and the view before it determine. A change in between restarts the
exchange.

Two agreed sets of changes are never crosswise: one has all of the other, so the number of changes
names a view. A process that has sent both has sent the smaller one first. If none has sent both,
each sender of one is lost according to the other, and both had senders x and y that were members of
the first view: y has sent "x is lost", so x was lost before y was; and x has sent "y is lost". This
needs that a process counts as lost only when it has ended, or has said itself that it takes part no
more (GONE), and that members go on only with one of them that lives.

The view before an agreement is the latest in which one of the live processes has worked: all of
them send the view in which they were, and one that was in an earlier view, because it had heard of
another change before it could install the later one, first goes over to that (AGREED). So does one
that has heard of the later view from a process without a place there, if there were no changes
since: its members work on. A rank that has raised an exception is known to have failed, and is lost
only when its process ends or says GONE.

Who has stopped works in that view no more. So if a spare is lost for which members have stopped,
the next view has the members of the one before.

Processes that are no members may have arrived: they have nothing to stop, and take part in the
agreements of the first run. A later view makes members of them if it has room.

The end of a run is agreed on, too. A rank that is done sends DONE, and its run is over once all
members have sent it; before it goes on, it sends OVER to all. So if the run is over for one rank
and a member dies, the others learn from OVER that their run, which was done, is over as well.

A rank that waits in vain for others, and may not have them killed (view.eviction()), ends the job:
it sends ENDS to all, members or not, and nobody goes on. A rank for which others have waited in
vain ends alone (GONE).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum

from ringcomm.transport.membership.events_and_actions import (
    Action,
    Arrive,
    Clear,
    Cleared,
    EndRun,
    Event,
    EvictRanks,
    Finish,
    GiveUp,
    GoneOn,
    Heal,
    Heard,
    Install,
    KillHere,
    Leave,
    Lost,
    Resize,
    SendMessage,
    Withdraw,
)
from ringcomm.transport.membership.messages import MembershipKind, MembershipMessage
from ringcomm.transport.membership.view import Changes, View


class Phase(IntEnum):
    WORKING = 0  # in its view
    FINISHING = 1  # its run is done, and waits for the others
    HEALING = 2  # does not work; waits for the next view
    LEAVING = 3  # will work no more, and waits for others that may do so
    GONE = 4  # has said that it takes part no more, or has heard that nobody goes on
    OUTSIDE = 5  # has not arrived


@dataclass(frozen=True)
class Membership:
    """The knowledge of one process; see handle().

    Attributes:
        me: this process.
        view: the view in which it works, or has worked last; of a process that is no member, the
            latest that it knows.
        first_size: how many members the first view had.
        outside: the processes that were no members of the first view.
        n_spares: how many processes are to wait for a place; the others outside sleep.
        phase: what it does.
        changes: all that has happened to the processes, as far as it knows.
        run: number of its runs that are over.
        is_done: it has sent DONE for this run, in this view.
    """

    me: int
    view: View
    first_size: int
    outside: tuple[int, ...] = ()
    n_spares: int = 0
    phase: Phase = Phase.WORKING
    changes: Changes = field(default_factory=Changes)
    run: int = 0
    is_done: bool = False
    _worked_in: int = 0  # number of the last view in which it has worked
    _told: tuple[Changes, int] | None = None  # changes and view of its last STOPPED, when healing
    _asked: Changes | None = None  # the changes for which it was asked to clear its memory
    _cleared: Changes | None = None  # the changes of its last CLEARED, since it began to heal
    _changes_of: Mapping[int, Changes] = field(default_factory=dict)  # of the last STOPPED
    _view_of: Mapping[int, View] = field(default_factory=dict)  # of the last STOPPED
    _cleared_of: Mapping[int, Changes] = field(default_factory=dict)  # of the last CLEARED
    _done: frozenset[tuple[int, int, int]] = frozenset()  # (source, view, run)
    _leaving: frozenset[int] = frozenset()  # those that have sent LEAVES

    @classmethod
    def first(cls, me: int, n_processes: int, n_spares: int = 0, n_reserves: int = 0) -> Membership:
        """Return the state with which a job begins: members, then spares, then reserves."""
        n_members = n_processes - n_spares - n_reserves
        outside = tuple(range(n_members, n_processes))
        phase = Phase.OUTSIDE if me in outside else Phase.WORKING
        return cls(me, View.first(n_members), n_members, outside, n_spares, phase)

    @property
    def size(self) -> int:
        """Largest number of members of a view."""
        return max(self.changes.requests, default=(0, self.first_size))[1]

    @property
    def is_needed(self) -> bool:
        """True unless enough processes before this one live, so that it may sleep."""
        before = set(range(self.me)) - self.changes.lost
        return len(before) < self.size + self.n_spares

    @property
    def is_member(self) -> bool:
        return self.me in self.view.members

    @property
    def colleagues(self) -> tuple[int, ...]:
        lost = self.changes.lost
        return tuple(m for m in self.view.members if m != self.me and m not in lost)

    @property
    def waiting(self) -> tuple[int, ...]:
        """The processes that are no members, and may become members in this run."""
        if self.run:
            return ()
        came = self.changes.arrived.union(range(self.first_size)) - self.changes.lost
        return tuple(sorted(came.difference(self.view.members)))

    @property
    def others(self) -> tuple[int, ...]:
        """The other processes that take part in an agreement."""
        return (*self.colleagues, *(each for each in self.waiting if each != self.me))

    @property
    def everyone(self) -> tuple[int, ...]:
        """The other processes that are not known to be lost."""
        more = {*range(self.first_size), *self.outside, *self.changes.arrived}
        return (*self.colleagues, *sorted(more - self.changes.lost - {self.me, *self.view.members}))

    @property
    def missing(self) -> tuple[int, ...]:
        """The processes for which this one waits."""
        if self.phase is Phase.FINISHING:
            return tuple(m for m in self.view.members if not self._is_done(m))
        to_stop = [m for m in self.others if not self._has_stopped(m)]
        return tuple(to_stop or [m for m in self.others if not self._has_cleared(m)])

    @property
    def must_heal(self) -> bool:
        """True if a run that is done cannot end: a member is lost, or heals, and was not done."""
        is_finishing = self.phase is Phase.FINISHING
        return is_finishing and any(m in self.changes.lost or self._heals(m) for m in self.missing)

    @property
    def lost_members(self) -> frozenset[int]:
        return self.changes.lost.intersection(self.view.members)

    @property
    def has_new_loss(self) -> bool:
        return bool(self.lost_members)

    @property
    def wants_another_size(self) -> bool:
        """True if the view has room for a process that waits, or has too many members."""
        size = self.view.size
        return size > self.size or (size < self.size and bool(self.waiting))

    @property
    def stopped(self) -> tuple[int, ...]:
        """The members that have left the view of this rank, to make the next one."""
        return tuple(m for m in self.colleagues if self._heals(m))

    @property
    def must_follow(self) -> bool:
        """True if this rank must stop, as other members have, although it may have lost no member.

        They have stopped because one is lost, or others were to join or to leave. If that is not to
        be any more, the next view has the same members.
        """
        return self._has_news and bool(self.stopped)

    @property
    def is_orphaned(self) -> bool:
        """True if all members were lost before they left, so that nobody has the job's state."""
        has_left = any(m in self._leaving for m in self.view.members)
        return not self.has_state and not has_left

    @property
    def has_state(self) -> bool:
        """True if a member of the view lives, so that others can get the job's state from it."""
        return self.is_member or bool(self.colleagues)

    @property
    def is_job_over(self) -> bool:
        """True if no member will work any more. Only a process that is no member knows this."""
        has_left = any(m in self._leaving for m in self.view.members)
        return has_left and all(m in self._leaving for m in self.colleagues)

    @property
    def _has_news(self) -> bool:
        return self.changes.number > self.view.number

    def _heals(self, member: int) -> bool:
        """Return True if a member has stopped working in this process's view, and heals."""
        view = self._view_of.get(member)
        return view is not None and view.number == self.view.number

    def _is_done(self, member: int) -> bool:
        if member == self.me:
            return self.is_done
        return (member, self.view.number, self.run) in self._done

    def _has_stopped(self, other: int) -> bool:
        """Return True if another process has sent STOPPED with these changes, in this view."""
        is_here = other not in self.view.members or self._heals(other)
        return is_here and self._changes_of.get(other) == self.changes

    def _has_cleared(self, other: int) -> bool:
        return self._cleared_of.get(other) == self.changes

    def _next_view(self) -> View:
        return self.view.after(self.changes, self.waiting, self.size)


_Result = tuple[Membership, list[Action]]


def handle(state: Membership, event: Event) -> _Result:
    """Return the state after an event, and what to do, in this order."""
    if state.phase is Phase.GONE:
        return state, []
    match event:
        case Lost(processes):
            return _go_on(_changed(state, Changes(lost=processes)))
        case Heard(source, message):
            return _hear(state, source, message)
        case Arrive():
            came = _changed(state, Changes(arrived=frozenset({state.me})))
            return _go_on(replace(came, phase=Phase.HEALING))
        case Resize(size):
            number = len(state.changes.requests) + 1
            state = _changed(state, Changes(requests=frozenset({(number, size)})))
            return _and_then(
                [SendMessage(state.everyone, _message(state, MembershipKind.SIZE))], _go_on(state)
            )
        case Heal():
            return _go_on(replace(state, phase=Phase.HEALING))
        case Cleared():
            return _say_cleared(state)
        case Finish():
            done = replace(state, phase=Phase.FINISHING, is_done=True)
            return _and_then(
                [SendMessage(state.colleagues, _message(state, MembershipKind.DONE))], _go_on(done)
            )
        case Leave():
            outsiders = tuple(m for m in state.everyone if m not in state.view.members)
            news = (
                [SendMessage(outsiders, _message(state, MembershipKind.LEAVES))]
                if outsiders
                else []
            )
            return _and_then([*news], _refuse_others(replace(state, phase=Phase.LEAVING)))
        case Withdraw():
            return _withdraw(state)
        case GiveUp():
            return _end_all(state)
        case EvictRanks(processes):
            order = MembershipMessage(
                MembershipKind.KILL, state.view, state.run, Changes(lost=processes)
            )
            return state, [KillHere(processes), SendMessage(state.colleagues, order)]


def _message(state: Membership, kind: MembershipKind) -> MembershipMessage:
    return MembershipMessage(kind, state.view, state.run, state.changes)


def _changed(state: Membership, changes: Changes) -> Membership:
    others = changes._replace(lost=changes.lost - {state.me})
    return replace(state, changes=state.changes | others)


def _hear(state: Membership, source: int, message: MembershipMessage) -> _Result:
    kind, view = message.kind, message.view
    if state._told is not None and source in state._told[0].lost:
        return state, []  # the others rely on it that this process goes on without the source
    if kind is MembershipKind.KILL:
        return state, [KillHere(message.changes.lost)]
    is_idle = state.phase is Phase.HEALING or not state.is_member
    if is_idle and view.number > state.view.number and state.me not in view.members:
        state = replace(state, view=view, is_done=False)  # its members have agreed with this one
    if kind is MembershipKind.AGREED:
        return _go_over(state, message)
    if kind is MembershipKind.LEAVES:
        return replace(state, _leaving=state._leaving | {source}), []
    if kind is MembershipKind.OVER:
        return _hear_over(state, message)
    if kind is MembershipKind.DONE:
        state = replace(state, _done=state._done | {(source, view.number, message.run)})
        return _refuse_others(state) if state.phase is Phase.LEAVING else _go_on(state)
    if kind is MembershipKind.GONE:
        return _go_on(_changed(state, Changes(lost=frozenset({source}))))
    if kind is MembershipKind.ENDS:
        is_ours = message.run >= state.run
        gone = _changed(state, Changes(lost=frozenset({source})))
        return _end_all(gone) if is_ours else (state, [])
    state = _changed(state, message.changes)
    if kind is MembershipKind.SIZE:
        return _go_on(state)
    if kind is MembershipKind.CLEARED:
        known = {**state._cleared_of, source: message.changes}
        return _go_on(replace(state, _cleared_of=known))
    state = replace(
        state,
        _changes_of={**state._changes_of, source: message.changes},
        _view_of={**state._view_of, source: view},
    )
    actions: list[Action] = []
    is_or_was_member = source in (*state.view.members, *view.members)
    may_be_behind = view.number < state.view.number or not state._has_news
    if is_or_was_member and may_be_behind and state.phase is not Phase.HEALING:
        actions.append(SendMessage((source,), _message(state, MembershipKind.AGREED)))
    is_leaving = state.phase is Phase.LEAVING
    return _and_then(actions, _refuse_others(state) if is_leaving else _go_on(state))


def _go_over(state: Membership, message: MembershipMessage) -> _Result:
    """Install a view on which the others have agreed with this process, or learn that it is out."""
    view = message.view
    has_place = state.me in view.members
    if not (state.is_member or has_place):
        is_over = message.run > state.run
        return (replace(state, run=message.run), [EndRun()]) if is_over else _go_on(state)
    number = state.view.number
    is_new = view.number > number or (view.number == number and not state._has_news)
    is_behind = state.phase is Phase.HEALING and view.number > state._worked_in and is_new
    if not (is_behind and has_place):
        return state, []
    return replace(_at_work(state, view), is_done=False), [Install(view)]


def _hear_over(state: Membership, message: MembershipMessage) -> _Result:
    if not state.is_member:
        is_news = message.run >= state.run
        return (replace(state, run=message.run + 1), [EndRun()]) if is_news else (state, [])
    is_ours = (message.view.number, message.run) == (state.view.number, state.run)
    return _end_run(state) if is_ours and state.is_done else (state, [])


def _refuse_others(state: Membership) -> _Result:
    """Take part no more if others heal, or are done: they must not wait for this rank."""
    waiting = [m for m in state.colleagues if state._heals(m) or state._is_done(m)]
    if not waiting:
        return state, []
    return _and_then([GoneOn(m) for m in waiting], _withdraw(state))


def _go_on(state: Membership) -> _Result:
    """Take the steps for which this process waited."""
    if state.phase is Phase.FINISHING and not state.missing:
        return _end_run(state)
    if state.phase is not Phase.HEALING:
        return state, []
    views = (state._view_of[m] for m in state.others if m in state._view_of)
    latest = max((state.view, *views), key=lambda view: view.number)
    actions: list[Action] = []
    if latest.number > state.view.number:
        state = replace(state, view=latest, is_done=False)
    if state._told != (state.changes, state.view.number):
        state = replace(state, _told=(state.changes, state.view.number))
        actions.append(SendMessage(state.others, _message(state, MembershipKind.STOPPED)))
    is_agreed = state._has_news and all(state._has_stopped(m) for m in state.others)
    if not (state.has_state and is_agreed):
        return state, actions
    if state._asked != state.changes:
        return replace(state, _asked=state.changes), [*actions, Clear()]
    is_clear = state._cleared == state.changes and all(state._has_cleared(m) for m in state.others)
    if not is_clear:
        return state, actions
    state = replace(state, view=state._next_view(), is_done=False)
    if state.is_member:
        state = _at_work(state, state.view)
        actions.append(Install(state.view))
    return state, actions


def _say_cleared(state: Membership) -> _Result:
    if state.phase is not Phase.HEALING or state._asked != state.changes:
        return state, []  # there was another change meanwhile
    said = replace(state, _cleared=state.changes)
    return _and_then(
        [SendMessage(state.others, _message(state, MembershipKind.CLEARED))], _go_on(said)
    )


def _end_run(state: Membership) -> _Result:
    over = replace(
        _at_work(state, state.view),
        run=state.run + 1,
        is_done=False,
        _done=frozenset(each for each in state._done if each[2] > state.run),
    )
    return over, [SendMessage(state.everyone, _message(state, MembershipKind.OVER)), EndRun()]


def _at_work(state: Membership, view: View) -> Membership:
    known = replace(state, view=view, _worked_in=view.number)
    return replace(known, phase=Phase.WORKING, _told=None, _asked=None, _cleared=None)


def _withdraw(state: Membership) -> _Result:
    gone = replace(state, phase=Phase.GONE)
    return gone, [SendMessage(state.everyone, _message(state, MembershipKind.GONE))]


def _end_all(state: Membership) -> _Result:
    """Go on no more, and tell all: who hears it tells all, too, in case the first one dies."""
    gone = replace(state, phase=Phase.GONE)
    return gone, [SendMessage(state.everyone, _message(state, MembershipKind.ENDS))]


def _and_then(actions: list[Action], result: _Result) -> _Result:
    state, more = result
    return state, [*actions, *more]
