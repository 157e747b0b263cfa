"""c10d's collectives as plans of the engine, which take flat tensors (called lines).

What follows the communication (a result that is copied into several tensors) belongs to the
operation: it is done before the operation is over.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ringcomm.collectives.op import AVERAGE, SUM, Op, ReductionOptions
from ringcomm.engine.core.execution import Plan
from ringcomm.engine.core.group import Group
from ringcomm.engine.operations.allgather import plan_gather
from ringcomm.engine.operations.allreduce import plan_allreduce
from ringcomm.engine.operations.barrier import plan_barrier
from ringcomm.engine.operations.broadcast import plan_broadcast
from ringcomm.engine.operations.grouped import plan_grouped, plan_grouped_allreduce
from ringcomm.engine.operations.into import (
    plan_allgather_into,
    plan_alltoall_into,
    plan_reduce_scatter_into,
)
from ringcomm.engine.operations.reduce import plan_reduce
from ringcomm.engine.operations.scatter import plan_scatter
from ringcomm.torch.distributed.group.flatten import (
    bytes_of,
    concatenate,
    flatten,
    unless_equal,
    write_back,
    write_parts,
)
from ringcomm.torch.distributed.group.options import Reduction
from ringcomm.torch.sparse import add_up, plan_elements
from ringcomm.transport.channel import Channel

Tensor = torch.Tensor
Tensors = Sequence[Tensor]


def then(plan: Plan[Any], after: Callable[[Any], object]) -> Plan[None]:
    """Return the plan with after(its result) as the last part of its operation."""
    run, finish = plan.run, plan.finish

    async def run_and_more(t: Channel) -> None:
        after(await run(t))

    if finish is None:
        return dataclasses.replace(plan, run=run_and_more)
    before = finish

    def finish_and_more(t: Channel | None = None) -> None:
        after(before(t))

    return dataclasses.replace(plan, run=run_and_more, finish=finish_and_more)


def grouped(kind: str, each: Sequence[Plan[Any]]) -> Plan[list[Any]]:
    """Return one plan for several; the ranks agree on all of them at once."""
    return plan_grouped(kind, None, list(each))


def require_one_each(what: str, xs: Tensors, size: int) -> None:
    """Raise ValueError unless the list has one tensor per rank."""
    if len(xs) != size:
        raise ValueError(
            f"{what} has {len(xs)} tensors, and the group has {size} ranks: pass one per rank"
        )


def scaled_(x: Tensor, reduction: Reduction) -> Op:
    """Multiply x by the factor of a PREMUL_SUM; return the operator that remains to be applied."""
    if reduction.factor is not None:
        with torch.no_grad():
            x.mul_(reduction.factor)
    return reduction.op


def _scaled(line: Tensor, reduction: Reduction) -> Tensor:
    return line if reduction.factor is None else line * reduction.factor


# --- reductions -----------------------------------------------------------------------------------
def allreduce(g: Group, x: Tensor, line: Tensor, op: Op) -> Plan[Any]:
    """Plan to replace x, whose flat form is `line`, by its reduction."""
    plan: Plan[Any] = plan_allreduce(g, None, line, ReductionOptions(op), in_place=True)
    if line is x or line.data_ptr() == x.data_ptr():
        return plan
    return then(plan, lambda _: write_back(x, line))


def allreduce_all(g: Group, xs: Tensors, reduction: Reduction) -> Plan[Any]:
    """Plan to replace each of xs by its reduction."""
    for x in xs:
        scaled_(x, reduction)
    lines = [flatten(x) for x in xs]

    options = ReductionOptions(reduction.op)

    def write_all(_: Any) -> None:
        for x, line in zip(xs, lines, strict=True):
            write_back(x, line)

    return then(plan_grouped_allreduce(g, None, lines, options, in_place=True), write_all)


def reduce(g: Group, x: Tensor, reduction: Reduction, root: int) -> Plan[Any]:
    """Plan to replace root's x by its reduction."""
    is_root = g.rank == root
    line = _scaled(flatten(x), reduction)
    options = ReductionOptions(reduction.op)
    plan = plan_reduce(g, None, line, options, root, in_place=True)
    return then(plan, lambda _: write_back(x, line) if is_root else None)


def reduce_scatter(g: Group, out: Tensor, parts: Tensors, reduction: Reduction) -> Plan[Any]:
    """Plan to fill `out` with the reduction of parts[rank]."""
    require_one_each("input_list", parts, g.size)
    counts = [part.numel() for part in parts]
    return _reduce_scatter(g, out, concatenate(parts), reduction, counts)


def reduce_scatter_single(g: Group, out: Tensor, x: Tensor, reduction: Reduction) -> Plan[Any]:
    """Plan to fill `out` with this rank's part of the reduction of x."""
    return _reduce_scatter(g, out, flatten(x), reduction, None)


def _reduce_scatter(
    g: Group, out: Tensor, x: Tensor, reduction: Reduction, counts: Sequence[int] | None
) -> Plan[Any]:
    target = flatten(out)
    source = _scaled(x, reduction)
    if counts is not None:
        counts = unless_equal(counts)
    options = ReductionOptions(reduction.op)
    plan: Plan[Any] = plan_reduce_scatter_into(g, None, target, source, options, counts=counts)
    return then(plan, lambda _: write_back(out, target))


def allreduce_sparse(g: Group, x: Tensor, reduction: Reduction) -> Plan[Any]:
    """Plan to replace a sparse x by the sum, or mean, over all ranks; its result is coalesced."""
    if x.layout is not torch.sparse_coo:
        raise TypeError(f"cannot reduce a {x.layout} tensor: use .to_sparse_coo() or .to_dense()")
    if reduction.op not in (SUM, AVERAGE) or reduction.factor is not None:
        raise ValueError("sparse tensors can be reduced by ReduceOp.SUM and ReduceOp.AVG alone")

    @torch.no_grad()
    def write(elements: Tensors) -> None:
        # Into x itself: c10d's reducer looks at it, and a detached alias of a sparse tensor is
        # another tensor. Ranks would keep their own values, in silence.
        x.copy_(add_up(elements, x.shape, reduction.op.divisor(g.size)))

    return then(plan_elements(g, None, x), write)


# --- copies ---------------------------------------------------------------------------------------
def broadcast(g: Group, x: Tensor, root: int) -> Plan[Any]:
    """Plan to replace x by the root's x."""
    line = flatten(x)
    plan: Plan[Any] = plan_broadcast(g, None, bytes_of(line), root, in_place=True)
    return then(plan, lambda _: write_back(x, line))


def room_for(outs: Tensors) -> Tensor:
    """Return memory for the elements of all outs, one after another."""
    dtype = outs[0].dtype if outs else None
    return torch.empty(sum(out.numel() for out in outs), dtype=dtype)


def allgather(g: Group, outs: Tensors, x: Tensor, whole: Tensor) -> Plan[Any]:
    """Plan to fill outs[r], and its part of `whole`, with rank r's x."""
    require_one_each("tensor_list", outs, g.size)
    line = flatten(x)
    counts = unless_equal([out.numel() * _width(x) for out in outs])
    plan: Plan[Any] = plan_allgather_into(g, None, bytes_of(whole), bytes_of(line), counts)
    return then(plan, lambda _: write_parts(outs, whole))


def allgather_single(g: Group, out: Tensor, x: Tensor) -> Plan[Any]:
    """Plan to fill `out` with all ranks' x, one after another."""
    target = flatten(out)
    plan: Plan[Any] = plan_allgather_into(g, None, bytes_of(target), bytes_of(flatten(x)))
    return then(plan, lambda _: write_back(out, target))


def gather(g: Group, outs: Tensors, x: Tensor, root: int) -> Plan[Any]:
    """Plan to fill root's outs[r] with rank r's x."""
    if g.rank == root:
        require_one_each("gather_list", outs, g.size)
    plan: Plan[Any] = plan_gather(g, None, bytes_of(flatten(x)), root)
    return then(
        plan, lambda whole: None if whole is None else write_parts(outs, whole.view(x.dtype))
    )


def scatter(g: Group, out: Tensor, parts: Tensors, root: int) -> Plan[Any]:
    """Plan to fill `out` with root's parts[rank], all of one size."""
    rows = None
    if g.rank == root:
        require_one_each("scatter_list", parts, g.size)
        for rank, part in enumerate(parts):
            if part.numel() != out.numel():
                raise ValueError(
                    f"scatter_list[{rank}] has {part.numel()} elements, and the output of rank "
                    f"{root}, the root, has {out.numel()}: pass tensors of one size"
                )
        rows = bytes_of(concatenate(parts)).view(g.size, -1)
    plan: Plan[Any] = plan_scatter(g, None, rows, root)

    def write(row: Tensor) -> None:
        elements = row.view(-1).view(out.dtype)
        if elements.numel() != out.numel():
            raise ValueError(
                f"scatter: root sent {elements.numel()} elements, and the output of rank {g.rank} "
                f"has {out.numel()}"
            )
        write_parts([out], elements)

    return then(plan, write)


def alltoall_single(
    g: Group, out: Tensor, x: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]
) -> Plan[Any]:
    """Plan to send rows of x to each rank, and to fill `out` with those that are received."""
    target = flatten(out)
    plan: Plan[Any] = plan_alltoall_into(
        g,
        None,
        bytes_of(target),
        bytes_of(flatten(x)),
        received=_elements(out, out_splits, g.size, "output"),
        sent=_elements(x, in_splits, g.size, "input"),
    )
    return then(plan, lambda _: write_back(out, target))


def alltoall(g: Group, outs: Tensors, xs: Tensors) -> Plan[Any]:
    """Plan to send xs[r] to rank r, and to fill outs[r] with what it sent."""
    require_one_each("output_tensor_list", outs, g.size)
    require_one_each("input_tensor_list", xs, g.size)
    whole = room_for(outs)
    plan: Plan[Any] = plan_alltoall_into(
        g,
        None,
        bytes_of(whole),
        bytes_of(concatenate(xs)),
        received=[out.numel() * _width(out) for out in outs],
        sent=[x.numel() * _width(x) for x in xs],
    )
    return then(plan, lambda _: write_parts(outs, whole))


def barrier(g: Group) -> Plan[Any]:
    """Plan a barrier, which moves no data: the agreement is the barrier."""
    return plan_barrier(g, None)


def _elements(x: Tensor, splits: Sequence[int], size: int, what: str) -> list[int]:
    """Return how many elements of the line go to, or come from, each rank."""
    rows = x.shape[0] if x.dim() else 1
    if not splits:
        if rows % size:
            raise ValueError(
                f"all_to_all_single: {rows} rows of the {what} cannot be shared evenly by {size} "
                "ranks: pass the splits"
            )
        splits = [rows // size] * size
    width = math.prod(x.shape[1:]) * _width(x)
    return [n * width for n in splits]


def _width(x: Tensor) -> int:
    """Return how many elements that the engine moves make up one element of x."""
    return 1 if bytes_of(x.new_empty(0)).dtype == x.dtype else x.element_size()
