"""Reduces sparse gradients: gathers the rows of all ranks, and adds them up."""

from __future__ import annotations

import torch

from ringcomm.collectives.operators import AVERAGE
from ringcomm.engine.api import collectives
from ringcomm.torch.optim.buckets import Scaling, wide
from ringcomm.torch.optim.gradient_slot import GradientSlot


class SparseSum:
    """The reduction of one parameter's sparse gradients, under way.

    Attributes:
        result: the sum or mean, coalesced, with the same bits on every rank; land() sets it.
    """

    def __init__(self, slot: GradientSlot, scaling: Scaling, suffix: str = "") -> None:
        parameter = slot.parameter
        self.index = slot.index
        self.result = torch.empty(0)
        self._shape, self._dtype = parameter.shape, parameter.dtype
        self._divisor = scaling.group.size if scaling.wire_op is AVERAGE else 1
        rows, values = _rows(parameter, parameter.grad if slot.has_sparse else None)
        if scaling.samples is not None:
            values = wide(values)  # zeros for an empty batch, whose mean is NaN
            values = values * scaling.samples if scaling.samples else torch.zeros_like(values)
        title = f"sparse gradient of {slot.name}{suffix}"
        self.handles = (
            collectives.allgather_async(rows, name=f"{title}: rows", group=scaling.group),
            collectives.allgather_async(values, name=f"{title}: values", group=scaling.group),
        )

    def land(self, total: float | None) -> None:
        """Wait for all rows, and set `result`; total: number of samples; None: no weights."""
        rows, values = (handle.wait() for handle in self.handles)
        gathered = torch.sparse_coo_tensor(
            rows.unsqueeze(0), wide(values), self._shape, check_invariants=True
        )
        mean = gathered.coalesce() / (self._divisor if total is None else total)
        self.result = mean.to(self._dtype)


def _rows(
    parameter: torch.Tensor, gradient: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row numbers, shape (n,), and the values, shape (n, *parameter.shape[1:])."""
    if gradient is None:
        rows = torch.empty(0, dtype=torch.int64, device=parameter.device)
        return rows, parameter.new_empty((0, *parameter.shape[1:]))
    if gradient.sparse_dim() != 1:
        gradient = gradient.to_dense().to_sparse(1)
    gradient = gradient.detach().coalesce()
    return gradient.indices()[0], gradient.values()
