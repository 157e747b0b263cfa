"""The loss that LBFGS searches by: ranks that searched by their own losses would go apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from ringcomm.collectives.operators import AVERAGE, Op
from ringcomm.engine.api import collectives
from ringcomm.engine.core.group import Group


def goes_by_loss(optimizer: Optimizer) -> bool:
    """Return True if steps of the optimizer depend on what a closure returns."""
    return isinstance(optimizer, torch.optim.LBFGS)


def loss_of_all_ranks(
    loss: Any, samples: float | None, name: str, group: Group, op: Op = AVERAGE
) -> Any:
    """Return the loss of all ranks' batches: a tensor if `loss` is one, else a float. Collective.

    Args:
        loss: what this rank's closure has returned.
        samples: its weight in the mean; None: it has no weight.
        op: AVERAGE or SUM, if it has no weight.
    """
    own = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
    if samples is None:
        total = collectives.allreduce(np.array([own]), op, name=name, group=group)
    else:  # the mean of an empty batch is NaN
        weighed = np.array([own * samples if samples else 0.0, samples])
        sums = collectives.allreduce(weighed, name=name, group=group)
        total = sums[:1] / sums[1:]
    whole = float(total[0])
    return torch.full_like(loss.detach(), whole) if isinstance(loss, torch.Tensor) else whole
