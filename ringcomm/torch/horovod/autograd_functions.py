"""Lets gradients flow through collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

_Tensors = Sequence[torch.Tensor]


def apply(
    forward: Callable[[_Tensors], list[torch.Tensor]],
    backward: Callable[[_Tensors, _Tensors], list[torch.Tensor]],
    tensors: _Tensors,
) -> list[torch.Tensor]:
    """Return forward(tensors), a collective; gradients come from backward(result's, tensors)."""
    for x in tensors:
        _require_tensor(x)
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return forward(tensors)
    return list(_Collective.apply(forward, backward, *tensors))  # type: ignore[no-untyped-call]


def tensor_list(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors as a list. Raises TypeError at the first that is none."""
    return [_require_tensor(x) for x in tensors]


def _require_tensor(x: torch.Tensor) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        raise TypeError(
            f"hvd's collectives take torch tensors, not {type(x).__qualname__}; those of ringcomm "
            "itself take numpy arrays, too"
        )
    return x


class _Collective(torch.autograd.Function):
    """The step of the graph."""

    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, *tensors: torch.Tensor) -> Any:
        ctx.backward_of_it = backward
        ctx.tensors = tuple(x.detach() for x in tensors)  # for their shapes
        return tuple(forward([x.detach() for x in tensors]))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, *ctx.backward_of_it(grads, ctx.tensors)
