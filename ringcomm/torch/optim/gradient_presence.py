"""Finds, at the end of a backward(), which gradients exist on any rank. Pure.

Each rank's message has one byte per parameter, and a few more; messages are combined by BOR. The
step is sent with its complement, which shows whether all ranks are in the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ringcomm.torch.backward.equality import is_alike, with_complement

# Codes of a gradient. LATE: a part came after the bucket was sent. WAS_SPARSE: it was made dense.
# HAS_BASE: .grad contains what an earlier reduction has left; NO_BASE: it does not. LEFT: that is
# of an earlier step, and is reduced again, together with what the program has added to it.
DENSE, SPARSE, LATE, WAS_SPARSE, HAS_BASE, NO_BASE, LEFT = 1, 2, 4, 8, 16, 32, 64
# Flags of a rank. COMPLAINS: .grad was changed in a way that cannot count. EXCEEDS_UNIT: see
# Scaling.exceeds_unit.
FAILED, WEIGHTED, UNWEIGHTED, HAS_SAMPLES, COMPLAINS, EXCEEDS_UNIT = 1, 2, 4, 8, 16, 32

_STEP = 8  # bytes


@dataclass(frozen=True)
class GradientPresence:
    """Gradients and flags of one rank, or of all ranks, or-ed.

    Attributes:
        codes: for each parameter, its codes, or-ed.
        flags: or-ed.
        is_one_step: True if all ranks have completed the same number of steps.
        ranks: one bit per rank that has sent a message.
    """

    codes: bytes
    flags: int
    is_one_step: bool = True
    ranks: bytes = b""

    def pack(self, step: int) -> bytes:
        """Return the message of a rank that has completed `step` steps."""
        steps = with_complement(step.to_bytes(_STEP, "little"))
        return steps + bytes([self.flags]) + self.ranks + self.codes

    @classmethod
    def unpack(cls, message: bytes, size: int = 0) -> GradientPresence:
        """Read the BOR of the messages of `size` ranks; 0: they have no `ranks`."""
        n = 2 * _STEP + 1
        ranks, codes = message[n : n + (size + 7) // 8], message[n + (size + 7) // 8 :]
        return cls(codes, message[n - 1], is_alike(message[: n - 1]), ranks)

    def is_of_all(self, size: int) -> bool:
        return sum(each.bit_count() for each in self.ranks) == size

    def absent(self, size: int) -> tuple[int, ...]:
        if self.is_of_all(size):
            return ()
        sent = int.from_bytes(self.ranks, "little")
        return tuple(rank for rank in range(size) if not sent >> rank & 1)


def bit_of(rank: int, size: int) -> bytes:
    return (1 << rank).to_bytes((size + 7) // 8, "little")


def samples_fault(presence: GradientPresence) -> Literal["partial", "empty"] | None:
    """Return "partial" if only some ranks called set_samples(), "empty" if all passed 0."""
    if presence.flags & WEIGHTED and presence.flags & UNWEIGHTED:
        return "partial"
    if presence.flags & WEIGHTED and not presence.flags & HAS_SAMPLES:
        return "empty"
    return None


def sparse_ones(presence: GradientPresence) -> list[int]:
    if not any(code & SPARSE for code in set(presence.codes)):
        return []
    return [i for i, code in enumerate(presence.codes) if code & (DENSE | SPARSE) == SPARSE]


def with_unlike_bases(presence: GradientPresence) -> int | None:
    """Return the index of a gradient that some ranks add to an earlier .grad, and some do not."""
    both, any_ = HAS_BASE | NO_BASE, DENSE | SPARSE
    unlike = {code for code in set(presence.codes) if code & both == both and code & any_}
    if not unlike:
        return None
    return next(i for i, code in enumerate(presence.codes) if code in unlike)


def ready_order(fired: Sequence[int], n: int) -> list[int]:
    others = set(range(n)) - set(fired)
    return [*fired, *sorted(others, reverse=True)]
