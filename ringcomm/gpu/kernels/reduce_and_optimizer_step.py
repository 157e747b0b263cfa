"""The kernel that sums gradients, takes an optimizer step and writes the weights. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from ringcomm.arrays.dtypes import DType
from ringcomm.gpu.kernels.base import BLOCK, Argument, Kernel, address_table, number, require_counts

Rule = Literal["Sgd", "Momentum", "Adam"]
COMPUTED: Final = ("float16", "bfloat16", "float32")  # dtypes of arrays; computed in float32


@dataclass(frozen=True)
class UpdateKernel(Kernel):
    """Sums gradients in float32, takes an optimizer step, and writes the new weights.

    The formulas, and the order and fusion of operations, are those of torch.optim's loops over
    single tensors, in float32. All arrays have `count` elements. No two of them overlap, but a
    target may be the float32 master weights. There are at most 496 sources and targets.

    Attributes:
        sources: addresses of gradients, in the order in which they are summed.
        targets: addresses of weights.
        owned: addresses of float32 arrays, which are updated in place: the master weights, then the
            states of the rule. "Sgd" has none, "Momentum" has the momentum buffer, "Adam" has
            exp_avg and exp_avg_sq.
        gradient, weight: dtypes of the sources and of the targets; each is in COMPUTED.
        numbers: parameters of the rule for this step, from sgd_numbers() or adam_numbers().
        scale: factor of the sum of the gradients, rounded to float32.
    """

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    owned: tuple[int, ...]
    count: int
    gradient: DType
    weight: DType
    rule: Rule
    numbers: Argument
    scale: float

    def __post_init__(self) -> None:
        for dtype in (self.gradient, self.weight):
            if dtype.name not in COMPUTED:
                raise TypeError(f"this kernel takes {', '.join(COMPUTED)}, not {dtype}")
        require_counts(self.sources, self.targets)
        n_owned = 1 + ("Sgd", "Momentum", "Adam").index(self.rule)
        if len(self.owned) != n_owned:
            raise ValueError(f"{self.rule} owns {n_owned} arrays, not {len(self.owned)}")

    def _macros(self) -> dict[str, object]:
        return {
            "KERNEL": "UPDATE",
            "TYPE": f"{self.gradient.name}_t",
            "TARGET": f"{self.weight.name}_t",
            "RULE": self.rule,
            "SOURCES": len(self.sources),
            "TARGETS": len(self.targets),
        }

    def _arguments(self) -> tuple[Argument, ...]:
        owned = (*self.owned, 0, 0)[:3]
        tables = (address_table(each) for each in (self.sources, self.targets, owned))
        return (*tables, number("u8", self.count), number("f4", self.scale), self.numbers)

    def _n_blocks(self) -> int:
        return -(-self.count * min(self.gradient.itemsize, self.weight.itemsize) // (BLOCK * 16))


# Flags of kernels.cu.
_MAXIMIZES, _DECAYS, _IS_NESTEROV, _IS_FIRST = 1, 2, 4, 8


def sgd_numbers(
    step: int,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> Argument:
    """Return the numbers of the rule "Sgd" if momentum is 0, else of "Momentum".

    Step 1 sets the momentum buffer to the gradient. The other arguments are torch.optim.SGD's.
    """
    flags = _flags(maximize, weight_decay) | _IS_NESTEROV * nesterov | _IS_FIRST * (step == 1)
    if momentum == 0:
        return _numbers(decay=weight_decay, step=-lr, flags=flags)
    fresh = 1 - dampening
    return _numbers(decay=weight_decay, momentum=momentum, fresh=fresh, step=-lr, flags=flags)


def adam_numbers(
    step: int,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    maximize: bool = False,
    decoupled: bool = False,
) -> Argument:
    """Return the numbers of the rule "Adam"; steps count from 1.

    If `decoupled`, the weight decay is torch.optim.AdamW's. The other arguments are those of
    torch.optim.Adam.
    """
    beta1, beta2 = betas
    return _numbers(
        decay=weight_decay,
        shrink=1 - lr * weight_decay if decoupled else 1.0,
        weight=1 - beta1,
        keep=beta2,
        fresh=1 - beta2,
        step=-(lr / (1 - beta1**step)),
        root=(1 - beta2**step) ** 0.5,
        eps=eps,
        flags=_flags(maximize, 0.0 if decoupled else weight_decay),
    )


def _numbers(*, flags: int, **floats: float) -> Argument:
    fields = [(name, "f4") for name in floats]
    return np.array([(*floats.values(), flags)], np.dtype([*fields, ("flags", "u4")]))


def _flags(maximize: bool, weight_decay: float) -> int:
    return _MAXIMIZES * maximize | _DECAYS * (weight_decay != 0)
