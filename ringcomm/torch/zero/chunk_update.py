"""The update of this rank's chunk of a bucket's weights, piece by piece: one per parameter."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Final

import torch
from torch.optim import Optimizer

from ringcomm.torch.optim.buckets import is_16_bit, wide
from ringcomm.torch.optim.wrapping import Settings, plain_step, settings_of
from ringcomm.torch.zero.parameter_state import ParameterState

MASTER: Final = "master"  # in the state of a 16-bit parameter: its weights in float32


class ChunkUpdate:
    """The update of a chunk by an optimizer of the user's class; not collective.

    The optimizer's parameters are the pieces. A 16-bit piece has a float32 master. The master is
    updated with the gradient in float32, and then rounded to the weights. If somebody has changed a
    weight, its master gets the new value.
    """

    def __init__(self, optimizer: Optimizer, weights: Sequence[torch.Tensor]) -> None:
        self._optimizer = optimizer
        optimizer.state = defaultdict(dict)
        optimizer._optimizer_step_pre_hooks = OrderedDict()  # hooks run in the user's optimizer
        optimizer._optimizer_step_post_hooks = OrderedDict()
        self._step = plain_step(type(optimizer))
        self._weights = weights
        self._masters = [wide(each) for each in weights]
        self._has_master = [False for _ in weights]  # the master differs from the weights

    def update(
        self,
        gradients: Sequence[torch.Tensor | None],
        groups: Sequence[tuple[Settings, list[int]]],
    ) -> list[Settings]:
        """Update the weights; return the settings after the update.

        Args:
            gradients: one gradient per piece, of its shape and dtype, read only; None: no update.
            groups: the settings of each param_group, and the numbers of its pieces.
        """
        for piece, gradient in enumerate(gradients):
            master = self._masters[piece]
            if gradient is not None:
                self._take_changed_weights(piece)
                master.grad = gradient.to(master.dtype)
        self._optimizer.param_groups = [
            {**settings, "params": [self._masters[piece] for piece in pieces]}
            for settings, pieces in groups
        ]
        self._step(self._optimizer)
        for piece, (master, gradient) in enumerate(zip(self._masters, gradients, strict=True)):
            if gradient is not None and self._weights[piece] is not master:
                self._weights[piece].copy_(master)
                self._has_master[piece] = True
            master.grad = None
        return settings_of(self._optimizer)

    def state_of(self, piece: int) -> ParameterState:
        """Return the state of a piece, read only; empty if the piece was never updated.

        It has the master if that differs from the weights.
        """
        master = self._masters[piece]
        state = ParameterState.of(self._optimizer.state.get(master, {}), master)
        if self._has_master[piece]:
            state.by_element[MASTER] = master.reshape(-1)
        return state

    def set_state(self, piece: int, state: ParameterState) -> None:
        """Set the state of a piece; this object may keep `state`, without a copy."""
        master = self._masters[piece]
        by_element = dict(state.by_element)
        weights = by_element.pop(MASTER, None)
        if weights is not None and is_16_bit(self._weights[piece]):
            master.copy_(weights.reshape(master.shape))
            self._has_master[piece] = True
        state = ParameterState(by_element, state.common).mapped(
            lambda line: _as_wide_as(master, line)
        )
        self._optimizer.state.pop(master, None)
        if state:
            self._optimizer.state[master] = state.shaped(master)

    def _take_changed_weights(self, piece: int) -> None:
        """Set the master to the weights that somebody else has written."""
        weights, master = self._weights[piece], self._masters[piece]
        if weights is master:
            return
        is_own = master.to(weights.dtype) == weights
        if not is_own.all():
            master.copy_(torch.where(is_own, master, weights.to(master.dtype)))


def _as_wide_as(master: torch.Tensor, line: torch.Tensor) -> torch.Tensor:
    is_float = master.is_floating_point() and line.is_floating_point()
    return line.to(master.device, master.dtype if is_float else line.dtype)
