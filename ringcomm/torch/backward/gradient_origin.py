"""Tells who has made the .grad of a parameter: an earlier reduction, or the program."""

from __future__ import annotations

from enum import Enum, auto

import torch

from ringcomm.torch.backward.watched_tensors import Mark, address_of


class Origin(Enum):
    """Who has made a .grad that is there before a reduction."""

    NOBODY = auto()  # it is zeros of zero_grad()
    REDUCTION = auto()  # an earlier reduction: the same on all ranks, or with shard_state=1 a part
    PROGRAM = auto()  # the program: this rank's own, to be reduced
    UNCLEAR = auto()  # the program has changed what an earlier reduction left


class GradientHistory:
    """What has happened to one parameter's .grad since the last reduction.

    Args:
        is_left_unclear: take what step() has left for UNCLEAR, even if no write to it was counted.

    Attributes:
        is_final: .grad was reduced in this step; what the program does now, it does to the result.
    """

    def __init__(self, *, is_left_unclear: bool) -> None:
        self._is_left_unclear = is_left_unclear
        self.is_final = False
        self._left: torch.Tensor | None = None  # .grad of an earlier step, as step() has left it
        self._version = self._address = 0  # of `_left`
        self._zeroed: Mark | None = None  # .grad as zero_grad() has left it

    def origin_of(self, gradient: torch.Tensor) -> Origin:
        """Return who has made this .grad. Writes through .data stay unseen."""
        if self.is_final:
            return Origin.REDUCTION
        if self._zeroed is not None and self._zeroed.is_of(gradient):
            return Origin.NOBODY
        if gradient is not self._left:
            return Origin.PROGRAM
        is_same = gradient._version == self._version and address_of(gradient) == self._address
        return Origin.REDUCTION if is_same and not self._is_left_unclear else Origin.UNCLEAR

    def is_left(self, gradient: torch.Tensor) -> bool:
        """Return True if this .grad is the tensor that step() has left there, changed or not."""
        return not self.is_final and gradient is self._left

    def note_final(self, gradient: torch.Tensor | None) -> None:
        """Note that .grad was reduced, or that no rank had a gradient to reduce."""
        self.is_final = gradient is not None

    def note_zeroed(self, gradient: torch.Tensor | None) -> None:
        """Note that zero_grad() has set .grad to zeros."""
        self._zeroed = None if gradient is None else Mark(gradient)

    def begin_step(self, left: torch.Tensor | None) -> None:
        """Note what step() leaves in .grad; None: nothing, or zero_grad() clears it."""
        self.is_final, self._zeroed, self._left = False, None, left
        if left is not None:
            self._version, self._address = left._version, address_of(left)

    def forget_unless(self, gradient: torch.Tensor | None) -> None:
        """Forget what step() has left, unless it is .grad still."""
        if self._left is not gradient:
            self._left = None
