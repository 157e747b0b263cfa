"""Steps in shared memory, in which the ranks of a node reduce or copy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from ringcomm._core import CopyStep, NodeStep, Places, start_copy, start_reduce
from ringcomm.arrays.base import Bytes
from ringcomm.transport.node import To

if TYPE_CHECKING:
    from ringcomm.transport.node.shared_memory import NodeTeam


@dataclass(frozen=True)
class Meeting:
    """The place in shared memory where the ranks of an operation meet."""

    team: NodeTeam  # the ranks of the group, which share this node's memory
    slot: int  # number of the operation's slot
    fingerprint: int  # digest of this rank's call

    @property
    def shown(self) -> int:
        """The digest that the ranks compare before any data moves."""
        return self.fingerprint ^ self.team.digest


@dataclass(frozen=True, slots=True)
class NodeReduction:
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


@dataclass(frozen=True, slots=True)
class NodeCopy:
    """An exchange of ranges of arrays, see csrc/shm/copy_step.hpp."""

    shown: Bytes  # array that the other ranks may read
    pulls: Sequence[tuple[int, int, Bytes]] = ()  # (rank, offset in its `shown`, out to fill)
    places: Places | None = None  # of the first rank: it gives the step one, for all ranks

    def begin(self, where: Meeting) -> CopyStep:
        return start_copy(
            where.team.team, where.slot, where.shown, self.shown, self.pulls, self.places
        )


MEET: Final = NodeCopy(np.empty(0, np.uint8))  # compares fingerprints, and copies nothing
