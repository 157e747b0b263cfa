"""Makes gradients flow through collectives."""

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
    """Return forward(tensors), whose gradients backward(grads, tensors) computes."""
    tensors = tensor_list(tensors)
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return forward(tensors)
    return list(_Collective.apply(forward, backward, *tensors))  # type: ignore[no-untyped-call]


def tensor_list(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors as a list. Raises TypeError at the first that is no tensor."""
    listed = list(tensors)
    for x in listed:
        if not isinstance(x, torch.Tensor):
            raise TypeError(
                f"hvd's collectives take torch tensors, not {type(x).__qualname__}; those of "
                "ringcomm itself take numpy arrays, too"
            )
    return listed


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, *tensors: torch.Tensor) -> Any:
        ctx.run_backward = backward
        ctx.tensors = tuple(x.detach() for x in tensors)  # for their shapes
        return tuple(forward([x.detach() for x in tensors]))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, *ctx.run_backward(grads, ctx.tensors)
