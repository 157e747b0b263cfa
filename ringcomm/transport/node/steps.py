"""Reductions and copies in shared memory: one step of the ranks of a node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from ringcomm._core import NodeStep, start_copy, start_reduce
from ringcomm.arrays.base import Bytes
from ringcomm.transport.node import To

if TYPE_CHECKING:
    from ringcomm.transport.node.shm import NodeTeam


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of an operation meet in shared memory."""

    team: NodeTeam  # those of its ranks that share this node's memory
    slot: int  # of the operation
    fingerprint: int  # of what this rank is about to do; they compare it before anything moves


@dataclass(frozen=True, slots=True)
class NodeReduction:
    """A reduction, see csrc/shm/reduce_step.hpp.

    Attributes:
        source: this rank's values.
        target: where the result goes, as large as what is due here; None where nothing is.
        op: code of the kernel.
        dtype: code of the kernel.
        divisor: of the sum.
        to: who gets it.
        root: the one that gets it, To.ROOT.
        bounds: in bytes: rank r owns [bounds[r], bounds[r + 1]). Empty: equal parts.
    """

    source: Bytes
    target: Bytes | None
    op: int
    dtype: int
    divisor: int
    to: To = To.ALL
    root: int = 0
    bounds: Sequence[int] = ()

    def begin(self, where: Meeting) -> NodeStep:
        """Start it."""
        return start_reduce(
            where.team.team,
            where.slot,
            where.fingerprint,
            self.source,
            self.target,
            self.bounds,
            self.to,
            self.root,
            self.op,
            self.dtype,
            self.divisor,
        )


@dataclass(frozen=True, slots=True)
class NodeCopy:
    """An exchange of ranges of arrays, see csrc/shm/copy_step.hpp.

    Attributes:
        shown: what the others may read.
        pulls: (rank, offset, out) each: fill `out` with what that rank shows, from there on.
    """

    shown: Bytes
    pulls: Sequence[tuple[int, int, Bytes]] = ()

    def begin(self, where: Meeting) -> NodeStep:
        """Start it."""
        return start_copy(where.team.team, where.slot, where.fingerprint, self.shown, self.pulls)


MEET: Final = NodeCopy(np.empty(0, np.uint8))  # nothing but the agreement
