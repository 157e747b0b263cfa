"""The sum of sparse tensors, whose ranks have values in different places."""

from __future__ import annotations

from typing import Any

import torch

from ringcomm.collectives.op import AVERAGE, SUM
from ringcomm.engine.core.execution import Plan
from ringcomm.engine.core.group import Group
from ringcomm.engine.operations.allgather import plan_allgather
from ringcomm.torch.distributed.group.collectives import grouped, then
from ringcomm.torch.distributed.group.options import CallOptions


def allreduce_sparse(g: Group, x: torch.Tensor, call: CallOptions) -> Plan[Any]:
    """Plan to replace a sparse x by the sum, or mean, over all ranks; its result is coalesced."""
    if x.layout is not torch.sparse_coo:
        raise TypeError(f"cannot reduce a {x.layout} tensor: use .to_sparse_coo() or .to_dense()")
    if call.reduction.op not in (SUM, AVERAGE) or call.reduction.factor is not None:
        raise ValueError("sparse tensors can be reduced by ReduceOp.SUM and ReduceOp.AVG alone")
    mine = x.detach().coalesce()
    places = plan_allgather(g, None, mine.indices().t().contiguous())
    values = plan_allgather(g, None, mine.values().contiguous())
    divisor = call.reduction.op.divisor(g.size)

    def add_up(found: list[torch.Tensor]) -> None:
        indices, parts = found
        total = torch.sparse_coo_tensor(indices.t(), parts, x.shape, check_invariants=False)
        total = total.coalesce()
        # Into x itself: c10d's reducer looks at it, and a detached alias of a sparse tensor is
        # another tensor. Ranks would keep their own values, in silence.
        with torch.no_grad():
            x.copy_(total / divisor if divisor != 1 else total)

    return then(grouped("sparse_allreduce", [places, values]), add_up)
