"""GradScaler for optimizers that give each rank a part of the gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from ringcomm.torch.optim.averaging_optimizer import StateSharding


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler that skips the same steps and has the same scale on every rank.

    It is for a DistributedOptimizer with shard_state=1. With such an optimizer, unscale_() and
    step() of the scaler are collective.
    With other optimizers the scaler does the same as torch's GradScaler.
    """

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale; an infinity or NaN on one rank counts on all ranks."""
        if not (isinstance(optimizer, StateSharding) and self.is_enabled()):
            super().unscale_(optimizer)
            return

        def divide() -> Iterable[torch.Tensor]:
            super(GradScaler, self).unscale_(optimizer)
            return self._found_inf_per_device(optimizer).values()

        optimizer.unscale(divide)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Call optimizer.step() unless a gradient on any rank is infinite or NaN."""
        if isinstance(optimizer, StateSharding) and self.is_enabled() and not optimizer.is_unscaled:
            self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)
