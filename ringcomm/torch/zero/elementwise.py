"""Refuses optimizers that cannot update a part of a parameter without the rest of it."""

from __future__ import annotations

from typing import Final

from torch import optim
from torch.optim import Optimizer

_KNOWN: Final = (
    optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam,
    optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD,
)  # fmt: skip


def require_elementwise(optimizer: Optimizer) -> None:
    """Raise TypeError for an optimizer whose update of an element may depend on other elements.

    torch's own that do not are known; another class says so of itself by `is_elementwise = True`.
    """
    kind = type(optimizer)
    if not getattr(kind, "is_elementwise", kind in _KNOWN):
        raise TypeError(
            f"DistributedOptimizer: with shard_state=1 each rank updates its part of a parameter, "
            f"and {kind.__name__} is not known to do with it what it would do with the whole: "
            "LBFGS, Adafactor, Muon and LAMB do not. Pass shard_state=0; or, if all that it "
            "computes and keeps is element by element, set is_elementwise = True on the class"
        )
