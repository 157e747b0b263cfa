"""Steps in shared memory, in which the ranks of a node reduce or copy arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np

from ringcomm._core import CopyStep, NodeStep, Places, start_copy, start_reduce
from ringcomm.arrays.base import Bytes
from ringcomm.transport.node import To

if TYPE_CHECKING:
    from ringcomm.transport.node.shared_memory import NodeTeam

Pulls: TypeAlias = Sequence[tuple[int, int, Bytes]]  # (rank, offset in its `shown`, out to fill)
ShownByAll: TypeAlias = list[tuple[bytes, int]]  # by rank: its header, and how many bytes it shows


class Meeting(NamedTuple):
    """The place in shared memory where the ranks of an operation meet."""

    team: NodeTeam  # the ranks of the group, which share this node's memory
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

    def begin(self, where: Meeting) -> NodeStep:
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

    def begin(self, where: Meeting) -> CopyStep:
        return start_copy(
            where.team.team, where.slot, where.shown, self.shown, self.pulls, places=self.places
        )


@dataclass(slots=True, eq=False)
class NodeExchange:
    """A copy in which a rank learns from the others what there is to pull.

    Attributes:
        header: at most 8192 bytes that say what this rank shows.
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

    def begin(self, where: Meeting) -> CopyStep:
        pulls = self.pulls if self.pulls_from is None else None
        return start_copy(where.team.team, where.slot, where.shown, self.shown, pulls, self.header)

    def choose(self, step: CopyStep) -> None:
        """Tell a step that is to choose what this rank pulls."""
        assert self.pulls_from is not None
        self.shown_by_all = step.shown()
        self.pulls = self.pulls_from(self.shown_by_all)
        step.choose(self.pulls)

    @property
    def has_chosen(self) -> bool:
        return bool(self.shown_by_all)


NodeWork: TypeAlias = NodeReduction | NodeCopy | NodeExchange


def drive(step: NodeStep, what: NodeWork | None, seconds: float) -> bool:
    """Stay with a step for a while, and choose for it; return True once it is over."""
    choose(step, what)  # it may have been begun, and driven, by others
    is_over = step.is_over or step.drive(seconds)
    while not is_over and choose(step, what):
        is_over = step.drive(seconds)
    return is_over


def choose(step: NodeStep, what: NodeWork | None) -> bool:
    """Tell a step what to pull if it is to choose; return whether it was."""
    if not (isinstance(what, NodeExchange) and isinstance(step, CopyStep) and step.is_to_choose):
        return False
    what.choose(step)
    return True


MEET: Final = NodeCopy(np.empty(0, np.uint8))  # compares fingerprints, and copies nothing
