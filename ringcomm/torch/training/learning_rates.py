"""Learning rates for several ranks: scaling with their number, and warm-up."""

from __future__ import annotations

from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR

from ringcomm.engine.api.init_rank_size import size

Rule = Literal["linear", "sqrt"]
_POWERS = {"linear": 1.0, "sqrt": 0.5}


def scaled_lr(lr: float, *, passes: int = 1, rule: Rule = "linear") -> float:
    """Return the learning rate for all ranks' batches together.

    Args:
        lr: the learning rate for one rank with its batch.
        passes: backward_passes_per_step if the script divides each loss by it; else 1.
        rule: "linear" for SGD (Goyal et al. 2017, arXiv:1706.02677), or "sqrt" for Adam and similar
            optimizers (Malladi et al. 2022, arXiv:2205.10287).

    Raises:
        ValueError: rule is not known, or passes is less than 1.
        NotInitializedError: init() has not run.
    """
    if rule not in _POWERS:
        raise ValueError(f"scaled_lr: rule is {' or '.join(_POWERS)}, not {rule!r}")
    if passes < 1:
        raise ValueError(f"scaled_lr: passes is at least 1, not {passes}")
    return float(lr * (size() * passes) ** _POWERS[rule])


def rescale_rates(optimizer: Optimizer, before: int, rule: Rule = "linear") -> None:
    """Scale an optimizer's learning rates from those for `before` ranks to those for size() ranks.

    For batches that keep their size on each rank; see scaled_lr(). A schedule that computes rates
    from their first values, such as LambdaLR, undoes it.

    Raises:
        ValueError: rule is not known.
        NotInitializedError: init() has not run.
    """
    factor = scaled_lr(1.0, rule=rule) / before ** _POWERS[rule]
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor


class WarmupLR(LinearLR):
    """A torch scheduler that raises the learning rate from lr / size() to lr in equal steps.

    lr is the optimizer's learning rate, such as the result of scaled_lr(); so training begins with
    the rate for one rank. The scheduler multiplies the rate, so other schedulers can change it too,
    or follow in a SequentialLR. It can be saved and restored, and keeps its start factor on another
    number of ranks.

    Args:
        optimizer: a DistributedOptimizer, or the optimizer that it wraps.
        steps: number of calls of the scheduler's step() until the rate is lr; at least 1.
        start_factor: first rate divided by lr, more than 0 and at most 1; None: 1 / size().
        last_epoch: see torch.optim.lr_scheduler.LinearLR.

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
