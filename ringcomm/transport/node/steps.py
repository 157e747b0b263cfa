"""Steps in which the ranks of a group reduce or copy arrays: in shared memory, or by messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol, TypeAlias

import numpy as np

from ringcomm._core import CollectiveStep, MeetingPlace, Places, start_copy, start_reduce
from ringcomm.arrays.base import Bytes
from ringcomm.transport.node import To

Pulls: TypeAlias = Sequence[tuple[int, int, Bytes]]  # (rank, offset in its `shown`, out to fill)
ShownByAll: TypeAlias = list[tuple[bytes, int]]  # by rank: its header, and how many bytes it shows


class Team(Protocol):
    """The members of a group that take steps together: a NodeTeam, or a WireTeam."""

    digest: int
    moment_s: float
    n_slots: int  # of unnamed operations

    @property
    def team(self) -> MeetingPlace: ...
    def slot(self, stream: int, slot: int | None) -> int | None:
        """Return the slot of an operation, given its stream, and its slot in shared memory."""

    def fits(self, nbytes: int) -> bool:
        """Return True if a payload of this size can go along with a step."""

    def is_turn_of(self, place: int) -> bool:
        """Return True if the slot of the unnamed operation number `place` is free for it."""

    def end_turn(self, place: int) -> None: ...


class Meeting(NamedTuple):
    """The place where the ranks of an operation meet."""

    team: Team  # the ranks of the group
    slot: int  # number of the operation's slot
    fingerprint: int  # digest of this rank's call

    @property
    def shown(self) -> int:
        """The digest that the ranks compare before any data moves."""
        return self.fingerprint ^ self.team.digest


class NodeReduction(NamedTuple):
    """A reduction, see csrc/shm/reduce_step.hpp."""

    source: Bytes  # this rank's values
    target: Bytes | None  # gets this rank's part of the result; None: this rank gets nothing
    op: int  # number of the operator in the reduction kernels
    dtype: int  # number of the dtype in the reduction kernels
    divisor: int  # the combined values are divided by it
    to: To = To.ALL  # the ranks that get the result
    root: int = 0  # To.ROOT: the rank that gets the result
    bounds: Sequence[int] = ()  # bytes; rank r owns [bounds[r], bounds[r + 1]). Empty: equal parts
    is_widened: bool = False  # To.OWNER, 16-bit floats: the target is float32

    def begin(self, where: Meeting) -> CollectiveStep:
        return start_reduce(
            where.team.team,
            where.slot,
            where.shown,
            self.source,
            self.target,
            self.bounds,
            self.to,
            self.root,
            self.op,
            self.dtype,
            self.divisor,
            self.is_widened,
        )


class NodeCopy(NamedTuple):
    """An exchange of ranges of arrays, see csrc/shm/copy_step.hpp."""

    shown: Bytes  # array that the other ranks may read
    pulls: Pulls = ()
    places: Places | None = None  # of the first rank: it gives the step one, for all ranks
    is_whole: bool = True  # False: if the step is messages, the ranks only agree

    def begin(self, where: Meeting) -> CollectiveStep:
        return start_copy(
            where.team.team,
            where.slot,
            where.shown,
            self.shown,
            self.pulls,
            places=self.places,
            is_whole=self.is_whole,
        )


MOST_HEADER: Final = 8192  # bytes


@dataclass(slots=True, eq=False)
class NodeExchange:
    """A copy in which a rank learns from the others what there is to pull.

    Attributes:
        header: at most MOST_HEADER bytes that say what this rank shows.
        pulls_from: from what all show, the pulls of this rank; None: they are `pulls`.
        shown_by_all: what all have shown, once this rank has chosen; before that empty.
        goes_on: the operation goes on after the step, on all ranks.
    """

    shown: Bytes
    header: bytes
    pulls_from: Callable[[ShownByAll], Pulls] | None
    pulls: Pulls = ()
    shown_by_all: ShownByAll = field(default_factory=list)
    goes_on: bool = False

    def begin(self, where: Meeting) -> CollectiveStep:
        pulls = self.pulls if self.pulls_from is None else None
        return start_copy(where.team.team, where.slot, where.shown, self.shown, pulls, self.header)

    def choose(self, step: CollectiveStep) -> None:
        """Tell a step that is to choose what this rank pulls."""
        assert self.pulls_from is not None
        self.shown_by_all = step.shown()
        self.pulls = self.pulls_from(self.shown_by_all)
        step.choose(self.pulls)

    @property
    def has_chosen(self) -> bool:
        return bool(self.shown_by_all)


NodeWork: TypeAlias = NodeReduction | NodeCopy | NodeExchange


def drive(step: CollectiveStep, what: NodeWork | None, seconds: float) -> bool:
    """Stay with a step for a while, and choose for it; return True once it is over."""
    choose(step, what)  # it may have been begun, and driven, by others
    is_over = step.is_over or step.drive(seconds)
    while not is_over and choose(step, what):
        is_over = step.drive(seconds)
    return is_over


def choose(step: CollectiveStep, what: NodeWork | None) -> bool:
    """Tell a step what to pull if it is to choose; return whether it was."""
    if not (isinstance(what, NodeExchange) and step.is_to_choose):
        return False
    what.choose(step)
    return True


MEET: Final = NodeCopy(np.empty(0, np.uint8))  # compares fingerprints, and copies nothing
AGREE: Final = MEET._replace(is_whole=False)  # the same, before messages of another kind
