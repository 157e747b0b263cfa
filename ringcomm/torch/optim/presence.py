"""Tells all ranks at the end of a backward() which gradients are present on any rank. Pure.

One message of a few bytes more than there are parameters, combined by BOR, so that all learn what
is present on any rank. Sent together with its complement, a value also tells whether it is alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ringcomm.torch.backward.complement import is_alike, with_complement

# Of a parameter. LATE: a part of it came after its bucket had left. WAS_SPARSE: it is sent dense.
DENSE, SPARSE, LATE, WAS_SPARSE = 1, 2, 4, 8
# Of a rank.
FAILED, WEIGHTED, UNWEIGHTED, HAS_SAMPLES = 1, 2, 4, 8

_STEP = 8  # bytes


@dataclass(frozen=True)
class Presence:
    """Gradients and flags of one rank; or, as read from a combined message, of any rank.

    codes: of each parameter: 0, or DENSE, SPARSE, LATE and WAS_SPARSE, or-ed. flags: FAILED, ...
    is_one_step: all ranks have completed as many steps.
    """

    codes: bytes
    flags: int
    is_one_step: bool = True

    def pack(self, step: int) -> bytes:
        """Return the message of a rank that has completed `step` steps."""
        return with_complement(step.to_bytes(_STEP, "little")) + bytes([self.flags]) + self.codes

    @classmethod
    def unpack(cls, message: bytes) -> Presence:
        """Read the messages of all ranks, combined by BOR."""
        steps, flags, codes = message[: 2 * _STEP], message[2 * _STEP], message[2 * _STEP + 1 :]
        return cls(codes, flags, is_alike(steps))


def samples_fault(presence: Presence) -> Literal["partial", "empty"] | None:
    """Return what is wrong with the ranks' use of set_samples(): some did not call it, or all 0."""
    if presence.flags & WEIGHTED and presence.flags & UNWEIGHTED:
        return "partial"
    if presence.flags & WEIGHTED and not presence.flags & HAS_SAMPLES:
        return "empty"
    return None


def ready_order(fired: Sequence[int], n: int) -> list[int]:
    """Return all of n parameters: those that fired, in that order, then the rest, last first."""
    seen = set(fired)
    return [*fired, *(index for index in reversed(range(n)) if index not in seen)]
