"""The kernel that sums gradients, takes a step of an optimizer and writes weights. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ringcomm.arrays.dtypes import DType
from ringcomm.gpu.kernels.kernel import (
    BLOCK,
    COMPUTED,
    TYPES,
    Argument,
    Arguments,
    Kernel,
    address_table,
    number,
    require_counts,
    require_dtype,
)

Rule = Literal["Sgd", "Momentum", "Adam"]


@dataclass(frozen=True)
class UpdateKernel(Kernel):
    """Sums gradients in float32, takes a step of an optimizer, and pushes the new weights.

    Formulas and order of operations are those of torch.optim's loops over single tensors, fused
    products included, in float32.
    """

    gradient: DType  # float16, bfloat16 or float32; of the sources
    weight: DType  # likewise; of the targets
    rule: Rule  # what numbers it takes, sgd_numbers() and adam_numbers() say
    n_sources: int  # 1 or more
    n_targets: int  # 1 or more; together at most 496

    def __post_init__(self) -> None:
        require_dtype(self.gradient, COMPUTED)
        require_dtype(self.weight, COMPUTED)
        require_counts(self.n_sources, self.n_targets)

    def _values(self) -> dict[str, object]:
        return {
            "KERNEL": "UPDATE",
            "TYPE": TYPES[self.gradient.name],
            "TARGET": TYPES[self.weight.name],
            "RULE": self.rule,
            "SOURCES": self.n_sources,
            "TARGETS": self.n_targets,
        }

    def _elements_per_block(self) -> int:
        return BLOCK * 16 // min(self.gradient.itemsize, self.weight.itemsize)

    def pack_arguments(
        self,
        gradients: Sequence[int],
        weights: Sequence[int],
        owned: Sequence[int],
        numbers: Argument,
        *,
        hi: int,
        lo: int = 0,
        scale: float = 1.0,
    ) -> Arguments:
        """Return the arguments of a launch for elements [lo, hi).

        Args:
            gradients: addresses of element 0 of each, in the order in which they are summed.
            weights: likewise; where the new weights go.
            owned: addresses of float32 arrays of hi - lo elements, updated in place: the weights,
                then the rule's states, none for "Sgd", the momentum buffer, or exp_avg and
                exp_avg_sq. Apart from all others, but for float32 weights, which may be owned.
            numbers: of the rule, for this step.
            scale: the sum of the gradients is multiplied by it, rounded to float32.
        """
        n_owned = 1 + ("Sgd", "Momentum", "Adam").index(self.rule)
        if len(owned) != n_owned:
            raise ValueError(f"{self.rule} owns {n_owned} arrays, not {len(owned)}")
        tables = (address_table(gradients, self.n_sources), address_table(weights, self.n_targets))
        padded = address_table([*owned, *[0] * (3 - n_owned)], 3)
        return (*tables, padded, number("u8", lo), number("u8", hi), number("f4", scale), numbers)


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
    """Return the numbers of the rule "Sgd", or, where momentum is not 0, "Momentum".

    Args but the first are those of torch.optim.SGD.

    Args:
        step: 1 for the first, in which the momentum buffer becomes the gradient.
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
    """Return the numbers of the rule "Adam".

    Args but the first and the last are those of torch.optim.Adam.

    Args:
        step: 1 for the first.
        decoupled: weight decay is that of torch.optim.AdamW.
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
    """Return the numbers of a rule as one struct."""
    fields = [(name, "f4") for name in floats]
    return np.array([(*floats.values(), flags)], np.dtype([*fields, ("flags", "u4")]))


def _flags(maximize: bool, weight_decay: float) -> int:
    return _MAXIMIZES * maximize | _DECAYS * (weight_decay != 0)
