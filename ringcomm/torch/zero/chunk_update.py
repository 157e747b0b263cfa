"""Updates of this rank's part of a bucket's weights."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import torch
from torch.optim import Optimizer

from ringcomm.torch.optim.buckets import is_16_bit, wide
from ringcomm.torch.optim.wrapping import Settings, plain_step, settings_of
from ringcomm.torch.zero.parameter_state import ParameterState

if TYPE_CHECKING:
    from ringcomm.gpu.transports.base import UpdatePiece

MASTER: Final = "master"  # in the state of 16-bit parameters: their weights in float32


@dataclass(frozen=True)
class Chunk:
    """This rank's part (own) of a bucket's weights, flat, cut into pieces of one parameter each."""

    weights: torch.Tensor
    own: slice
    places: Sequence[slice]
    pieces: Sequence[torch.Tensor]


class ChunkUpdate(Protocol):
    """Updates the pieces of one bucket that are this rank's; local."""

    @property
    def pieces(self) -> Sequence[UpdatePiece] | None:
        """Updates left to a kernel, which gives others the new weights, too; None: nothing is."""
        ...

    def update(
        self,
        gradients: Sequence[torch.Tensor | None],
        groups: Sequence[tuple[Settings, list[int]]],
        buffer: torch.Tensor,
    ) -> list[Settings]:
        """Write new weights over the old ones, or say in `pieces` how; return the settings as left.

        Args:
            gradients: of each piece, of its shape and dtype, read only; None: it stays as it is.
            groups: the settings of each param_group, and which pieces are in it.
            buffer: of the bucket, flat; where gradients are that nobody has replaced. What a kernel
                is to read must be there.
        """
        ...

    def note_done(self) -> None:
        """Note that the update in `pieces` was made."""
        ...

    def state_of(self, piece: int) -> ParameterState:
        """Return what is kept of a piece; nothing if it was never updated. Not to be changed."""
        ...

    def set_state(self, piece: int, state: ParameterState) -> None:
        """Go on with this instead; it is kept."""
        ...


class OwnClassUpdate:
    """ChunkUpdate by an optimizer of the user's class over the pieces alone; local.

    Pieces of 16 bits have float32 masters: those are updated, by gradients made float32, and the
    weights are the masters rounded. A weight that somebody has changed since is a new master.
    """

    pieces = None

    def __init__(self, optimizer: Optimizer, weights: Sequence[torch.Tensor]) -> None:
        self._optimizer = optimizer
        optimizer.state = defaultdict(dict)
        optimizer._optimizer_step_pre_hooks = OrderedDict()  # run by the one that the user has
        optimizer._optimizer_step_post_hooks = OrderedDict()
        self._step = plain_step(type(optimizer))
        self._weights = weights
        self._masters = [wide(each) for each in weights]
        self._has_master = [False for _ in weights]  # one that differs from the weights

    def update(
        self,
        gradients: Sequence[torch.Tensor | None],
        groups: Sequence[tuple[Settings, list[int]]],
        buffer: torch.Tensor,
    ) -> list[Settings]:
        """Update the masters by the user's class, and round the weights."""
        del buffer
        for piece, gradient in enumerate(gradients):
            master = self._masters[piece]
            if gradient is not None:
                self._follow(piece)
                master.grad = gradient.to(master.dtype)
        self._optimizer.param_groups = [
            {**settings, "params": [self._masters[piece] for piece in pieces]}
            for settings, pieces in groups
        ]
        self._step(self._optimizer)
        for piece, gradient in enumerate(gradients):
            if gradient is not None:
                self._round(piece)
            self._masters[piece].grad = None
        return settings_of(self._optimizer)

    def note_done(self) -> None:
        """Do nothing: update() has written the weights."""

    def state_of(self, piece: int) -> ParameterState:
        """Return the optimizer's state of a piece, and its master if that differs."""
        master = self._masters[piece]
        state = ParameterState.of(self._optimizer.state.get(master, {}), master)
        if self._has_master[piece]:
            state.by_element[MASTER] = master.reshape(-1)
        return state

    def set_state(self, piece: int, state: ParameterState) -> None:
        """Set the optimizer's state of a piece, and its master."""
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

    def _follow(self, piece: int) -> None:
        """Take over weights that somebody else has written."""
        weights, master = self._weights[piece], self._masters[piece]
        if weights is master:
            return
        is_own = master.to(weights.dtype) == weights
        if not is_own.all():
            master.copy_(torch.where(is_own, master, weights.to(master.dtype)))

    def _round(self, piece: int) -> None:
        weights, master = self._weights[piece], self._masters[piece]
        if weights is not master:
            weights.copy_(master)
            self._has_master[piece] = True


def _as_wide_as(master: torch.Tensor, line: torch.Tensor) -> torch.Tensor:
    is_float = master.is_floating_point() and line.is_floating_point()
    return line.to(master.device, master.dtype if is_float else line.dtype)
