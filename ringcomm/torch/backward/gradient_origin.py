"""Tells who has made the .grad of a parameter: an earlier reduction, or the program."""

from __future__ import annotations

from enum import Enum, auto

import torch

from ringcomm.torch.backward.watched_tensors import Mark


class Origin(Enum):
    """Origin of a .grad that is there before a reduction."""

    NOBODY = auto()  # it is zeros of zero_grad()
    REDUCTION = auto()  # a reduction of this step
    LEFT = auto()  # it was there when the last step() ended; the program may have written to it
    PROGRAM = auto()  # the program: this rank's own, to be reduced


class GradientHistory:
    """History of one parameter's .grad since the last reduction.

    Attributes:
        is_final: .grad was reduced in this step; what the program does now, it does to the result.
    """

    def __init__(self) -> None:
        self.is_final = False
        self._left: torch.Tensor | None = None
        self._zeroed: Mark | None = None  # .grad as zero_grad() has left it

    def origin_of(self, gradient: torch.Tensor) -> Origin:
        if self.is_final:
            return Origin.REDUCTION
        if self._zeroed is not None and self._zeroed.is_of(gradient):
            return Origin.NOBODY
        return Origin.LEFT if gradient is self._left else Origin.PROGRAM

    def note_zeroed(self, gradient: torch.Tensor | None) -> None:
        self._zeroed = None if gradient is None else Mark(gradient)

    def move(self, gradient: torch.Tensor | None, view: torch.Tensor) -> None:
        if gradient is None or gradient.requires_grad or gradient.dtype != view.dtype:
            return
        if gradient.shape == view.shape and gradient.stride() == view.stride():
            is_zeroed = self._zeroed is not None and self._zeroed.is_of(gradient)
            view.copy_(gradient)
            gradient.data = view.data
            self.note_zeroed(gradient if is_zeroed else None)

    def begin_step(self, left: torch.Tensor | None) -> None:
        """Note what step() leaves in .grad; None: nothing, or zero_grad() clears it."""
        self.is_final, self._zeroed, self._left = False, None, left

    def forget_unless(self, gradient: torch.Tensor | None) -> None:
        if self._left is not gradient:
            self._left = None
