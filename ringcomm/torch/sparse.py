"""Sums of torch.sparse_coo tensors: the elements of all ranks are gathered, and added up."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringcomm.engine.core.execution import Plan
from ringcomm.engine.core.group import Group
from ringcomm.engine.operations.allgather import plan_allgather
from ringcomm.engine.operations.grouped import plan_grouped

Tensor = torch.Tensor


def plan_elements(g: Group, name: str | None, x: Tensor) -> Plan[list[Tensor]]:
    """Plan to gather the elements of all ranks' x: a row of indices for each, and the values."""
    mine = x.detach().coalesce()
    parts = mine.indices().t().contiguous(), mine.values().contiguous()
    return plan_grouped("sparse_allreduce", name, [plan_allgather(g, None, part) for part in parts])


def add_up(elements: Sequence[Tensor], shape: torch.Size, divisor: int) -> Tensor:
    """Return the sum of such elements, divided; coalesced."""
    indices, values = elements
    total = torch.sparse_coo_tensor(indices.t(), values, shape, check_invariants=True).coalesce()
    return total if divisor == 1 else total / divisor
