"""Learning rates for N ranks: scaled with their number, and reached gradually."""

from __future__ import annotations

from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR

from ringcomm.engine.api.world import size

Rule = Literal["linear", "sqrt"]
_POWERS = {"linear": 1.0, "sqrt": 0.5}


def scaled_lr(lr: float, *, passes: int = 1, rule: Rule = "linear") -> float:
    """Return the learning rate for batches `size()` times as large as those that `lr` is for.

    Args:
        lr: what is right for one rank with this rank's batch.
        passes: backward_passes_per_step, if each adds the gradient of a mean divided by it.
        rule: "linear", which suits SGD (Goyal et al. 2017, arXiv:1706.02677), or "sqrt", which
            suits Adam and its kin (Malladi et al. 2022, arXiv:2205.10287).

    Raises:
        ValueError: no such rule, or passes is less than 1.
        NotInitializedError: init() has not run.
    """
    if rule not in _POWERS:
        raise ValueError(f"scaled_lr: rule is {' or '.join(_POWERS)}, not {rule!r}")
    if passes < 1:
        raise ValueError(f"scaled_lr: passes is at least 1, not {passes}")
    return float(lr * (size() * passes) ** _POWERS[rule])


class WarmupLR(LinearLR):
    """A torch scheduler that takes the learning rate from lr / size() to lr, in equal steps.

    lr is the optimizer's, as scaled_lr() returns it: training begins with what is right for one
    rank. One of torch's own schedulers: it multiplies, so it can be chained with others (each of
    which step()s), put first in SequentialLR, saved and restored; a warm-up that is restored on
    another number of ranks goes on with the factor of the first.

    Args:
        optimizer: a DistributedOptimizer, or the one within.
        steps: calls of step() until lr is reached: batches or epochs, as you call it; at least 1.
        start_factor: of lr at the beginning, more than 0 and at most 1; None: 1 / size().
        last_epoch: as torch has it.

    Raises:
        ValueError: steps or start_factor is out of range.
        NotInitializedError: init() has not run, and start_factor is None.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        steps: int,
        *,
        start_factor: float | None = None,
        last_epoch: int = -1,
    ) -> None:
        if steps < 1:
            raise ValueError(f"WarmupLR: steps is at least 1, not {steps}")
        factor = 1 / size() if start_factor is None else start_factor
        if not 0 < factor <= 1:
            raise ValueError(f"WarmupLR: start_factor is more than 0 and at most 1, not {factor:g}")
        super().__init__(
            optimizer, start_factor=factor, end_factor=1.0, total_iters=steps, last_epoch=last_epoch
        )
