"""Sums of torch.sparse_coo tensors: each rank gathers all ranks' elements and adds them up."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringcomm.engine.core.group import Group
from ringcomm.engine.core.plan import Plan
from ringcomm.engine.operations.allgather_and_gather import plan_allgather
from ringcomm.engine.operations.grouped import plan_grouped

Tensor = torch.Tensor


def plan_elements(g: Group, name: str | None, x: Tensor) -> Plan[list[Tensor]]:
    """Plan to gather all ranks' elements: one row of indices per element, and the values."""
    mine = x.detach().coalesce()
    parts = mine.indices().t().contiguous(), mine.values().contiguous()
    return plan_grouped("sparse_allreduce", name, [plan_allgather(g, None, part) for part in parts])


def add_up(elements: Sequence[Tensor], shape: torch.Size, divisor: int) -> Tensor:
    indices, values = elements
    total = torch.sparse_coo_tensor(indices.t(), values, shape, check_invariants=True).coalesce()
    return total if divisor == 1 else total / divisor
