"""Reductions of torch tensors, with the names, arguments and defaults of Horovod.

The contracts are those of ringcomm.engine.api.collectives; this face translates. Common to all:

- `name` matches operations of ranks that start them in different orders. Without one they are
  matched by their order among those of their kind, in each process set.
- `op` is Average by default. `average=True` or False is Horovod's older way to say Average or Sum.
- `prescale_factor` multiplies what is reduced, `postscale_factor` the result. Integers are
  truncated toward zero after each.
- `process_set`: the ranks that take part; every one of them must call. `root_rank` is a rank of the
  job among them.
- The forms that end in `_` overwrite their argument, `grouped_` ones take a list of tensors that
  are reduced or gathered as one operation, `_async` ones return a handle for poll() and
  synchronize(); until then, tensors passed in must not be changed. The others return the result,
  and gradients flow through them: a mean's gradient is the mean of the ranks' gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ringcomm.collectives.op import AVERAGE, SUM
from ringcomm.engine.core.execution import Plan
from ringcomm.engine.core.group import Group
from ringcomm.engine.operations import plans
from ringcomm.torch.compression import Compression, compressed
from ringcomm.torch.horovod import autograd_functions
from ringcomm.torch.horovod.dispatch import begin
from ringcomm.torch.horovod.handles import Handle
from ringcomm.torch.horovod.process_sets import ProcessSet, global_process_set
from ringcomm.torch.horovod.reduce_op import AnyOp, Reduction, op_of


# --- allreduce ----------------------------------------------------------------------------------
def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the reduction of `tensor` over the ranks: a new tensor of its shape and dtype.

    Args:
        tensor: any shape; the same shape and dtype on every rank.
        average: see above.
        name: see above.
        compression: what is sent: Compression.none, fp16 or bf16.
        op: Average, Sum, Min, Max, Product or Adasum.
        prescale_factor: see above.
        postscale_factor: see above.
        process_set: see above.
    """
    sent, ctx = compressed(compression, tensor)
    how = Reduction(op_of(op, average), prescale_factor, postscale_factor, process_set, name, True)
    (result,) = autograd_functions.apply(lambda xs: [how.start(xs[0]).wait()], how.backward, [sent])
    received: torch.Tensor = compression.decompress(result, ctx)
    return received


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Start allreduce(); gradients do not flow through it."""
    how = Reduction(op_of(op, average), prescale_factor, postscale_factor, process_set, name)
    return how.start(tensor)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrite `tensor` with its reduction, and return it."""
    how = Reduction(op_of(op, average), prescale_factor, postscale_factor, process_set, name, True)
    return how.start(tensor, in_place=True).wait()


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Start allreduce_()."""
    how = Reduction(op_of(op, average), prescale_factor, postscale_factor, process_set, name)
    return how.start(tensor, in_place=True)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Return the reduction of each tensor; see allreduce()."""
    pairs = [compressed(compression, tensor) for tensor in autograd_functions.listed(tensors)]
    how = Reduction(op_of(op, average), prescale_factor, postscale_factor, process_set, name, True)
    results = autograd_functions.apply(
        lambda xs: how.start_group(xs).wait(), how.backward, [sent for sent, _ in pairs]
    )
    return [
        compression.decompress(result, ctx) for result, (_, ctx) in zip(results, pairs, strict=True)
    ]


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[torch.Tensor]]:
    """Start grouped_allreduce()."""
    how = Reduction(op_of(op, average), prescale_factor, postscale_factor, process_set, name)
    return how.start_group(tensors)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Overwrite each tensor with its reduction, and return them."""
    how = Reduction(op_of(op, average), prescale_factor, postscale_factor, process_set, name, True)
    return how.start_group(tensors, in_place=True).wait()


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[torch.Tensor]]:
    """Start grouped_allreduce_()."""
    how = Reduction(op_of(op, average), prescale_factor, postscale_factor, process_set, name)
    return how.start_group(tensors, in_place=True)


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: AnyOp | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Start the reduction of a torch.sparse_coo tensor; the result is one, and coalesced.

    Args:
        tensor: the same shape and dtype on every rank; any number of elements.
        name: see above.
        op: Average or Sum.
        process_set: see above.
    """
    ProcessSet.require(process_set)
    kind, which = "sparse_allreduce", op_of(op, None)
    if which not in (AVERAGE, SUM):
        raise ValueError(f"sparse_allreduce_async: op is Average or Sum, not {which}")
    if not (isinstance(tensor, torch.Tensor) and tensor.is_sparse):
        raise TypeError(
            f"sparse_allreduce_async takes a torch.sparse_coo tensor, not {type(tensor).__name__}"
        )
    coalesced = tensor.detach().coalesce()
    # Gathered along the first dimension: one row per element.
    indices = coalesced.indices().t().contiguous()
    parts = [indices, coalesced.values()]
    divisor = process_set.size() if which is AVERAGE else 1

    def plan(g: Group, name: str | None) -> Plan[list[torch.Tensor]]:
        return plans.grouped(kind, name, [plans.allgather(g, None, part) for part in parts])

    def finish(gathered: list[torch.Tensor]) -> torch.Tensor:
        rows, values = gathered
        total = torch.sparse_coo_tensor(rows.t(), values, tensor.shape, check_invariants=True)
        total = total.coalesce()
        return total if divisor == 1 else total / divisor

    return Handle([begin(kind, name, process_set, "grouped", plan)], finish)


# --- reducescatter ------------------------------------------------------------------------------
def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: AnyOp = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's rows of the reduction; the first n % size ranks get one row more."""
    sent, ctx = compressed(compression, tensor)
    how = Reduction(op_of(op, None), prescale_factor, postscale_factor, process_set, name, True)
    (result,) = autograd_functions.apply(
        lambda xs: [how.start_scatter(xs[0]).wait()], how.backward_of_scatter, [sent]
    )
    received: torch.Tensor = compression.decompress(result, ctx)
    return received


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: AnyOp = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[torch.Tensor]:
    """Start reducescatter()."""
    how = Reduction(op_of(op, None), prescale_factor, postscale_factor, process_set, name)
    return how.start_scatter(tensor)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: AnyOp = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Return reducescatter() of each tensor."""
    pairs = [compressed(compression, tensor) for tensor in autograd_functions.listed(tensors)]
    how = Reduction(op_of(op, None), prescale_factor, postscale_factor, process_set, name, True)
    results = autograd_functions.apply(
        lambda xs: how.start_group_scatter(xs).wait(),
        how.backward_of_scatter,
        [sent for sent, _ in pairs],
    )
    return [
        compression.decompress(result, ctx) for result, (_, ctx) in zip(results, pairs, strict=True)
    ]


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: AnyOp = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[torch.Tensor]]:
    """Start grouped_reducescatter()."""
    how = Reduction(op_of(op, None), prescale_factor, postscale_factor, process_set, name)
    return how.start_group_scatter(tensors)
