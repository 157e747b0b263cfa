"""Plans for c10d's collectives, made from plans of the engine for flat tensors ("lines").

An operation includes the copies from its lines into the caller's tensors, and ends after these.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ringcomm.arrays.torch import writing
from ringcomm.collectives.operators import AVERAGE, SUM, Op, ReductionOptions
from ringcomm.engine.core.agreement import gather_alike
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.plan import Deferred, Followed, Plan
from ringcomm.engine.operations.allgather_and_gather import plan_gather, plan_gather_into
from ringcomm.engine.operations.allreduce import plan_allreduce
from ringcomm.engine.operations.base import int_of
from ringcomm.engine.operations.broadcast import plan_broadcast
from ringcomm.engine.operations.grouped import plan_grouped_allreduce
from ringcomm.engine.operations.into_array import (
    plan_allgather_into,
    plan_alltoall_into,
    plan_reduce_scatter_into,
)
from ringcomm.engine.operations.reduce import plan_reduce
from ringcomm.engine.operations.scatter import plan_scatter
from ringcomm.errors import MismatchError
from ringcomm.torch.distributed.group.arguments import ReadReduction
from ringcomm.torch.distributed.group.flat_tensors import (
    bytes_of,
    concatenate,
    flatten,
    is_shared,
    line_for,
    line_over,
    unless_equal,
    write_back,
    write_parts,
)
from ringcomm.torch.sparse import add_up, plan_elements
from ringcomm.transport.channel import Channel

Tensor = torch.Tensor
Tensors = Sequence[Tensor]


def followed_by(plan: Plan[Any], after: Callable[[Any], object]) -> Plan[None]:
    """Return `plan` with after(result of `plan`) as the last part of the operation.

    On a GPU, that part is enqueued on the stream that is current when a caller waits.
    """

    def then(result: Any) -> Followed | None:
        if isinstance(result, Deferred):
            return Followed(result, after)
        after(result)
        return None

    async def run(t: Channel) -> Followed | None:
        return then(await plan.run(t))

    async def rest(t: Channel) -> Followed | None:
        assert plan.rest is not None
        return then(await plan.rest(t))

    def finish(t: Channel | None = None) -> None:
        assert plan.finish is not None
        after(plan.finish(t))

    return dataclasses.replace(plan, run=run, finish=plan.finish and finish, rest=rest)


def require_one_each(what: str, xs: Tensors, size: int) -> None:
    if len(xs) != size:
        raise ValueError(
            f"{what} has {len(xs)} tensors, and the group has {size} ranks: pass one per rank"
        )


def scaled_(x: Tensor, reduction: ReadReduction) -> Op:
    if reduction.factor is not None:
        with writing(x):
            x.mul_(reduction.factor)
    return reduction.op


def _scaled(line: Tensor, reduction: ReadReduction) -> Tensor:
    return line if reduction.factor is None else line * reduction.factor


# --- reductions -----------------------------------------------------------------------------------
def allreduce(g: Group, x: Tensor, line: Tensor, op: Op) -> Plan[Any]:
    plan: Plan[Any] = plan_allreduce(g, None, line, ReductionOptions(op), in_place=True)
    if line is x or line.data_ptr() == x.data_ptr():
        return plan
    return followed_by(plan, lambda _: write_back(x, line))


def allreduce_all(g: Group, xs: Tensors, reduction: ReadReduction) -> Plan[Any]:
    for x in xs:
        scaled_(x, reduction)
    lines, options = [flatten(x) for x in xs], ReductionOptions(reduction.op)

    def write_all(_: Any) -> None:
        for x, line in zip(xs, lines, strict=True):
            write_back(x, line)

    return followed_by(plan_grouped_allreduce(g, None, lines, options, in_place=True), write_all)


def reduce(g: Group, x: Tensor, reduction: ReadReduction, root: int) -> Plan[Any]:
    is_root = g.rank == root
    line = _scaled(flatten(x), reduction)
    options = ReductionOptions(reduction.op)
    plan = plan_reduce(g, None, line, options, root, in_place=True)
    return followed_by(plan, lambda _: write_back(x, line) if is_root else None)


def reduce_scatter(g: Group, out: Tensor, parts: Tensors, reduction: ReadReduction) -> Plan[Any]:
    require_one_each("input_list", parts, g.size)
    counts = unless_equal([part.numel() for part in parts])
    return _reduce_scatter(g, out, concatenate(parts), reduction, counts)


def reduce_scatter_single(g: Group, out: Tensor, x: Tensor, reduction: ReadReduction) -> Plan[Any]:
    return _reduce_scatter(g, out, flatten(x), reduction, None)


def _reduce_scatter(
    g: Group, out: Tensor, x: Tensor, reduction: ReadReduction, counts: Sequence[int] | None
) -> Plan[Any]:
    target, source, options = flatten(out), _scaled(x, reduction), ReductionOptions(reduction.op)
    plan: Plan[Any] = plan_reduce_scatter_into(g, None, target, source, options, counts=counts)
    return followed_by(plan, lambda _: write_back(out, target))


def allreduce_sparse(g: Group, x: Tensor, reduction: ReadReduction) -> Plan[Any]:
    """Plan to replace a sparse x by the coalesced sum or mean over all ranks."""
    if x.layout is not torch.sparse_coo:
        raise TypeError(f"cannot reduce a {x.layout} tensor: use .to_sparse_coo() or .to_dense()")
    if reduction.op not in (SUM, AVERAGE) or reduction.factor is not None:
        raise ValueError("sparse tensors can be reduced only by ReduceOp.SUM and ReduceOp.AVG")

    def write(elements: Tensors) -> None:
        # Write into x itself, which c10d's reducer reads. A detached alias of a sparse tensor is
        # another tensor: each rank would keep its own values without an error.
        with writing(x):
            x.copy_(add_up(elements, x.shape, reduction.op.divisor(g.size)))

    return followed_by(plan_elements(g, None, x), write)


# --- data -----------------------------------------------------------------------------------------
def broadcast(g: Group, x: Tensor, root: int) -> Plan[Any]:
    line = flatten(x)
    plan: Plan[Any] = plan_broadcast(g, None, bytes_of(line), root, in_place=True)
    return followed_by(plan, lambda _: write_back(x, line))


def allgather(g: Group, outs: Tensors, x: Tensor, whole: Tensor) -> Plan[Any]:
    require_one_each("tensor_list", outs, g.size)
    counts = unless_equal([out.numel() * _width(x) for out in outs])
    plan: Plan[Any] = plan_allgather_into(g, None, bytes_of(whole), bytes_of(flatten(x)), counts)
    return followed_by(plan, lambda _: write_parts(outs, whole))


def allgather_single(g: Group, out: Tensor, x: Tensor) -> Plan[Any]:
    target = flatten(out)
    plan: Plan[Any] = plan_allgather_into(g, None, bytes_of(target), bytes_of(flatten(x)))
    return followed_by(plan, lambda _: write_back(out, target))


def gather(g: Group, outs: Tensors, x: Tensor, root: int) -> Plan[Any]:
    if g.rank == root:
        require_one_each("gather_list", outs, g.size)
    expected, line = [out.numel() for out in outs] or [0] * g.size, bytes_of(flatten(x))
    if x.is_cpu:
        width, whole = _width(x), _memory_of(outs, x)
        due = [n * width for n in expected]
        plan: Plan[Any] = plan_gather_into(g, None, whole, line, root, due)
    else:
        plan = _gather_on_gpu(g, line, x.numel(), expected, root)
    return followed_by(
        plan, lambda whole: None if whole is None else write_parts(outs, whole.view(x.dtype))
    )


def _memory_of(outs: Tensors, x: Tensor) -> Tensor | None:
    """Return the memory of tensors as a line for elements of x; None if it is none."""
    line = line_over(outs) if outs else None
    return None if line is None or line.dtype != x.dtype or not line.is_cpu else bytes_of(line)


def _gather_on_gpu(g: Group, line: Tensor, n: int, expected: list[int], root: int) -> Plan[Any]:
    plan: Plan[Any] = plan_gather(g, None, line, root)

    async def run(t: Channel) -> Any:
        await _require_expected(n, expected, root, t)
        return await plan.carry_out(t)

    call = dataclasses.replace(plan.call, kind="gather_into")  # it begins in another way
    return dataclasses.replace(plan, call=call, run=run, step=None, finish=None)


async def _require_expected(n: int, expected: list[int], root: int, t: Channel) -> None:
    """Raise MismatchError on every rank if one sends n elements, and root expects another number.

    expected: on root, how many elements it expects of each rank.
    """
    rows = [
        np.frombuffer(each, np.int64)
        for each in await gather_alike(np.array([n, *expected], np.int64).tobytes(), t)
    ]
    for rank, (sent, *_) in enumerate(rows):
        if sent != (due := rows[root][1 + rank]):
            raise MismatchError(
                f"gather: rank {t.members[rank]} sends {sent} elements, and gather_list[{rank}] of "
                f"the root, rank {t.members[root]}, has {due}. Pass tensors of one size."
            )


def scatter(g: Group, out: Tensor, parts: Tensors, root: int) -> Plan[Any]:
    """Plan to fill `out` with root's parts[rank]; all parts have one size."""
    rows = None
    if g.rank == root:
        require_one_each("scatter_list", parts, g.size)
        for rank, part in enumerate(parts):
            if part.numel() != out.numel():
                raise ValueError(
                    f"scatter_list[{rank}] has {part.numel()} elements, and the output of rank "
                    f"{root}, the root, has {out.numel()}: pass tensors of one size"
                )
        line = bytes_of(concatenate(parts))
        rows = line.view(g.size, line.numel() // g.size)
    into = bytes_of(flatten(out)) if out.is_cpu else None
    if rows is not None and into is not None and is_shared(rows, into):
        into = None
    plan: Plan[Any] = plan_scatter(g, None, rows, root, due_of(out), into)
    return followed_by(plan, lambda row: write_parts([out], row.view(-1).view(out.dtype)))


def due_of(out: Tensor) -> tuple[str, tuple[int]]:
    """Return the dtype and shape on which the ranks of a scatter agree."""
    return str(out.dtype).removeprefix("torch."), (out.numel(),)


def alltoall_single(
    g: Group, out: Tensor, x: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]
) -> Plan[Any]:
    line = flatten(out)
    target, source = bytes_of(line), bytes_of(flatten(x))
    received = _elements(out, out_splits, g.size, "output")
    sent = _elements(x, in_splits, g.size, "input")
    plan: Plan[Any] = plan_alltoall_into(g, None, target, source, received=received, sent=sent)
    return followed_by(plan, lambda _: write_back(out, line))


def alltoall(g: Group, outs: Tensors, xs: Tensors) -> Plan[Any]:
    require_one_each("output_tensor_list", outs, g.size)
    require_one_each("input_tensor_list", xs, g.size)
    source = bytes_of(concatenate(xs))
    whole = line_for(outs, source)
    target = bytes_of(whole)
    received = [out.numel() * _width(out) for out in outs]
    sent = [x.numel() * _width(x) for x in xs]
    plan: Plan[Any] = plan_alltoall_into(g, None, target, source, received=received, sent=sent)
    return followed_by(plan, lambda _: write_parts(outs, whole))


def are_even(splits: Iterable[Sequence[int] | None]) -> bool:
    """Return True if all of them say that the rows are shared evenly."""
    return all(each is None or len(each) == 0 for each in splits)


def _elements(x: Tensor, splits: Sequence[int], size: int, what: str) -> list[int]:
    """Return how many elements of x's line go to each rank, or come from it."""
    rows = x.shape[0] if x.dim() else 1
    if are_even([splits]):
        if rows % size:
            raise ValueError(
                f"all_to_all_single: {rows} rows of the {what} cannot be shared evenly by {size} "
                "ranks: pass the splits"
            )
        splits = [rows // size] * size
    width = math.prod(x.shape[1:]) * _width(x)
    return [int_of(f"all_to_all_single: a split of the {what}", n) * width for n in splits]


def _width(x: Tensor) -> int:
    return bytes_of(x.new_empty(1)).numel()
