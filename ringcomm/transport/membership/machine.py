"""The decisions of one rank about the members of its job. Pure.

    state, actions = handle(state, event)

A rank that has lost another stops its operations, and begins to heal: it sends the set of all lost
processes that it knows of to those that it takes for alive. A set only grows. Once every live
process has sent exactly the set of this rank, the set is agreed on, and no live process works in
the old view any more. Then each rank clears its shared memory and says so. Once all have, each of
them installs the next view: the members that are not in the set. A loss in between restarts the
exchange with a larger set.

Two agreed sets are never crosswise. Suppose D1 has x but not y, and D2 has y but not x. y has sent
D1, so x was lost before y was; and x has sent D2, so y was lost before x was. So all agreed sets
are a chain, and the number of lost processes names a view. This needs that a process counts as lost
only when it has ended, or has said itself that it takes part no more (GONE).

An agreement must be larger than the set before it. A rank that has raised an exception is known to
have failed, and is lost only when its process ends or says GONE.

The end of a run is agreed on, too. A rank that is done sends DONE, and its run is over once all
members have sent it; before it goes on, it sends OVER to all. So if the run is over for one rank
and a member dies, the others learn from OVER that their run, which was done, is over as well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import NamedTuple

from ringcomm.transport.membership.view import View


class Phase(IntEnum):
    """What this rank does."""

    WORKING = 0  # in its view
    FINISHING = 1  # its run is done, and waits for the others
    HEALING = 2  # has stopped working; waits for the next view
    LEAVING = 3  # will work no more, and waits for others that may do so
    GONE = 4  # has said that it takes part no more


class Kind(IntEnum):
    """Kinds of messages."""

    LOST = 1  # the sender has stopped working; `lost` are all lost processes that it knows
    CLEARED = 2  # all have sent LOST with `lost`, and the sender has cleared its shared memory
    DONE = 3  # run number `run` is done, in view `view`
    OVER = 4  # that run is over
    GONE = 5  # the sender takes part no more


class Message(NamedTuple):
    """A message to another rank."""

    kind: Kind
    view: int = 0  # number of the sender's view
    run: int = 0  # number of the sender's runs that are over
    lost: frozenset[int] = frozenset()

    def numbers(self) -> list[int]:
        """Return the wire form."""
        return [self.kind, self.view, self.run, *sorted(self.lost)]

    @classmethod
    def of(cls, numbers: list[int]) -> Message:
        """Read the wire form."""
        kind, view, run, *lost = numbers
        return cls(Kind(kind), view, run, frozenset(lost))


# --- events ---------------------------------------------------------------------------------------
class Lost(NamedTuple):
    """Processes have ended."""

    processes: frozenset[int]


class Heard(NamedTuple):
    """A message has come."""

    source: int
    message: Message


class Heal(NamedTuple):
    """This rank has stopped its operations, as one of them had failed."""


class Cleared(NamedTuple):
    """This rank has done what the action Clear asks for."""


class Finish(NamedTuple):
    """The run of this rank is done."""


class Leave(NamedTuple):
    """This rank begins no operation any more."""


class Withdraw(NamedTuple):
    """This rank takes part no more: it gives up, or ends."""


Event = Lost | Heard | Heal | Cleared | Finish | Leave | Withdraw


# --- actions --------------------------------------------------------------------------------------
class Send(NamedTuple):
    """Send a message to these processes."""

    to: tuple[int, ...]
    message: Message


class Clear(NamedTuple):
    """Clear the shared memory of this rank, then report Cleared."""


class Install(NamedTuple):
    """Work in this view."""

    view: View


class EndRun(NamedTuple):
    """The run is over on all ranks."""


class GoneOn(NamedTuple):
    """Another rank goes on without this one."""

    process: int


Action = Send | Clear | Install | EndRun | GoneOn


@dataclass(frozen=True)
class Membership:
    """The knowledge of one rank; see handle().

    Attributes:
        me: this process.
        view: the view in which it works, or has worked last.
        phase: what it does.
        lost: all processes that are lost, as far as it knows.
        run: number of its runs that are over.
        is_done: it has sent DONE for this run, in this view.
    """

    me: int
    view: View
    phase: Phase = Phase.WORKING
    lost: frozenset[int] = frozenset()
    run: int = 0
    is_done: bool = False
    _told: frozenset[int] | None = None  # the set of its last LOST, since it began to heal
    _asked: frozenset[int] | None = None  # the set for which it was asked to clear its memory
    _cleared: frozenset[int] | None = None  # the set of its last CLEARED, since it began to heal
    _lost_of: Mapping[int, frozenset[int]] = field(default_factory=dict)  # by source
    _left_view: Mapping[int, int] = field(default_factory=dict)  # source -> view of its last LOST
    _cleared_of: Mapping[int, frozenset[int]] = field(default_factory=dict)  # by source
    _done: frozenset[tuple[int, int, int]] = frozenset()  # (source, view, run)

    @property
    def others(self) -> tuple[int, ...]:
        """The other members that are not known to be lost."""
        return tuple(m for m in self.view.members if m != self.me and m not in self.lost)

    @property
    def missing(self) -> tuple[int, ...]:
        """The members for which this rank waits."""
        if self.phase is Phase.FINISHING:
            return tuple(m for m in self.view.members if not self._is_done(m))
        told = [m for m in self.others if self._lost_of.get(m) != self._told]
        return tuple(told or [m for m in self.others if self._cleared_of.get(m) != self._told])

    @property
    def must_heal(self) -> bool:
        """True if a run that is done cannot end: a member is lost, or heals, and was not done."""
        is_finishing = self.phase is Phase.FINISHING
        return is_finishing and any(m in self.lost or self._heals(m) for m in self.missing)

    @property
    def has_new_loss(self) -> bool:
        """True if a member of the view is lost."""
        return any(m in self.lost for m in self.view.members)

    def _heals(self, member: int) -> bool:
        """Return True if a member has stopped working in this rank's view, and heals."""
        return self._left_view.get(member) == self.view.number

    def _is_done(self, member: int) -> bool:
        if member == self.me:
            return self.is_done
        return (member, self.view.number, self.run) in self._done


_Result = tuple[Membership, list[Action]]


def handle(state: Membership, event: Event) -> _Result:  # noqa: PLR0911 - one per event
    """Return the state after an event, and what to do, in this order."""
    if state.phase is Phase.GONE:
        return state, []
    match event:
        case Lost(processes):
            return _go_on(replace(state, lost=state.lost | (processes - {state.me})))
        case Heard(source, message):
            return _hear(state, source, message)
        case Heal():
            return _go_on(replace(state, phase=Phase.HEALING))
        case Cleared():
            return _say_cleared(state)
        case Finish():
            done = replace(state, phase=Phase.FINISHING, is_done=True)
            message = Message(Kind.DONE, state.view.number, state.run)
            return _and_then([Send(state.others, message)], _go_on(done))
        case Leave():
            return _refuse_others(replace(state, phase=Phase.LEAVING))
        case Withdraw():
            return _withdraw(state)


def _hear(state: Membership, source: int, message: Message) -> _Result:
    kind, lost = message.kind, state.lost
    if kind is Kind.GONE:
        return _go_on(replace(state, lost=lost | {source}))
    if kind is Kind.OVER:
        is_ours = (message.view, message.run) == (state.view.number, state.run)
        return _end_run(state) if is_ours and state.is_done else (state, [])
    if kind is Kind.DONE:
        state = replace(state, _done=state._done | {(source, message.view, message.run)})
        return _refuse_others(state) if state.phase is Phase.LEAVING else _go_on(state)
    lost |= message.lost - {state.me}
    if kind is Kind.CLEARED:
        known = {**state._cleared_of, source: message.lost}
        return _go_on(replace(state, lost=lost, _cleared_of=known))
    state = replace(
        state,
        lost=lost,
        _lost_of={**state._lost_of, source: message.lost},
        _left_view={**state._left_view, source: message.view},
    )
    return _refuse_others(state) if state.phase is Phase.LEAVING else _go_on(state)


def _refuse_others(state: Membership) -> _Result:
    """Take part no more if others heal, or are done: they must not wait for this rank."""
    waiting = [m for m in state.others if state._heals(m) or state._is_done(m)]
    if not waiting:
        return state, []
    return _and_then([GoneOn(m) for m in waiting], _withdraw(state))


def _go_on(state: Membership) -> _Result:
    """Take the steps for which this rank waited."""
    if state.phase is Phase.FINISHING and not state.missing:
        return _end_run(state)
    if state.phase is not Phase.HEALING:
        return state, []
    actions: list[Action] = []
    if state._told != state.lost:
        state = replace(state, _told=state.lost)
        message = Message(Kind.LOST, state.view.number, state.run, state.lost)
        actions.append(Send(state.others, message))
    if not (state.has_new_loss and _all_have(state._lost_of, state)):
        return state, actions
    if state._asked != state.lost:
        return replace(state, _asked=state.lost), [*actions, Clear()]
    if state._cleared != state.lost or not _all_have(state._cleared_of, state):
        return state, actions
    state = replace(
        state,
        view=state.view.without(state.lost),
        phase=Phase.WORKING,
        is_done=False,
        _told=None,
        _asked=None,
        _cleared=None,
    )
    return state, [*actions, Install(state.view)]


def _say_cleared(state: Membership) -> _Result:
    if state.phase is not Phase.HEALING or state._asked != state.lost:
        return state, []  # another process was lost meanwhile
    message = Message(Kind.CLEARED, state.view.number, state.run, state.lost)
    said = replace(state, _cleared=state.lost)
    return _and_then([Send(state.others, message)], _go_on(said))


def _all_have(sets: Mapping[int, Collection[int]], state: Membership) -> bool:
    return all(sets.get(m) == state.lost for m in state.others)


def _end_run(state: Membership) -> _Result:
    message = Message(Kind.OVER, state.view.number, state.run)
    over = replace(
        state,
        phase=Phase.WORKING,
        run=state.run + 1,
        is_done=False,
        _told=None,
        _asked=None,
        _cleared=None,
        _done=frozenset(each for each in state._done if each[2] > state.run),
    )
    return over, [Send(state.others, message), EndRun()]


def _withdraw(state: Membership) -> _Result:
    return replace(state, phase=Phase.GONE), [Send(state.others, Message(Kind.GONE))]


def _and_then(actions: list[Action], result: _Result) -> _Result:
    state, more = result
    return state, [*actions, *more]
