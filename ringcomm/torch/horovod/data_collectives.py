"""Collectives that move torch tensors, with the names, arguments and defaults of Horovod.

The contracts are those of ringcomm.engine.api.collectives. Forms that end in `_` overwrite their
argument; `grouped_` forms gather several tensors as one operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ringcomm.collectives.operators import AVERAGE, ReductionOptions
from ringcomm.engine.api import collectives
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.plan import Plan
from ringcomm.engine.operations.allgather_and_gather import plan_allgather
from ringcomm.engine.operations.allreduce import plan_allreduce
from ringcomm.engine.operations.alltoall import plan_alltoall
from ringcomm.engine.operations.barrier import plan_barrier
from ringcomm.engine.operations.broadcast import plan_broadcast
from ringcomm.engine.operations.grouped import plan_grouped_allgather
from ringcomm.torch.horovod.autograd_functions import apply, tensor_list
from ringcomm.torch.horovod.call_forms import (
    AWAITED,
    Form,
    async_form,
    begin,
    carry_out,
    document,
    in_place_form,
)
from ringcomm.torch.horovod.handles import HorovodHandle
from ringcomm.torch.horovod.process_sets import ProcessSet, global_process_set, prepare

Tensor = torch.Tensor
Tensors = Sequence[Tensor]


# --- allgather ----------------------------------------------------------------------------------
@document
def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return a new tensor: the tensors of all ranks, concatenated along the first dimension.

    Gradients flow through it: a rank gets its own rows of the mean of the ranks' gradients.

    Args:
        tensor: a tensor of at least one dimension, with the same dtype on every rank, and the same
            shape except for the first dimension.
    """
    (result,) = apply(
        lambda xs: [_allgather(AWAITED, xs[0], name, process_set).wait()],
        lambda grads, xs: _rows_of_mean(grads, xs, process_set),
        [tensor],
    )
    return result


@document
def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Return for each tensor the tensors of all ranks, concatenated along the first dimension.

    Gradients flow through it: a rank gets its own rows of the mean of the ranks' gradients.

    Args:
        tensors: a list of tensors as allgather() takes them, the same number on every rank. All of
            them are in one operation.
    """
    return apply(
        lambda xs: _grouped_allgather(AWAITED, xs, name, process_set).wait(),
        lambda grads, xs: _rows_of_mean(grads, xs, process_set),
        tensors,
    )


def _allgather(
    form: Form,
    tensor: Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> HorovodHandle[Tensor]:
    done = carry_out(form, "allgather", name, process_set, tensor)
    return done or begin(form, "allgather", name, process_set, plan_allgather, tensor)


def _grouped_allgather(
    form: Form,
    tensors: Tensors,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> HorovodHandle[list[Tensor]]:
    xs, plan = tensor_list(tensors), plan_grouped_allgather
    return begin(form, "grouped_allgather", name, process_set, plan, xs, family="grouped")


allgather_async = async_form(_allgather, allgather)
grouped_allgather_async = async_form(_grouped_allgather, grouped_allgather)


# --- broadcast ----------------------------------------------------------------------------------
@document
def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return a new tensor with the root's values.

    Gradients flow through it: the root gets the mean of the ranks' gradients, the others get zeros.

    Args:
        tensor: a tensor of the same shape and dtype on every rank.
    """
    (result,) = apply(
        lambda xs: [_broadcast(AWAITED, xs[0], root_rank, name, process_set).wait()],
        lambda grads, _: _mean_at_root(grads, root_rank, process_set),
        [tensor],
    )
    return result


def _broadcast(
    form: Form,
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> HorovodHandle[Tensor]:
    def plan(group: Group, name: str | None, *, in_place: bool = False) -> Plan[Tensor]:
        root = process_set.root(root_rank)  # here, so that other ranks get the error, too
        return plan_broadcast(group, name, tensor, root, in_place=in_place)

    try:
        root = process_set.root(root_rank)
    except (AttributeError, ValueError):
        return begin(form, "broadcast", name, process_set, plan)
    done = carry_out(form, "broadcast", name, process_set, tensor, root=root)
    return done or begin(form, "broadcast", name, process_set, plan)


broadcast_async = async_form(_broadcast, broadcast)
broadcast_ = in_place_form(_broadcast, broadcast)
broadcast_async_ = async_form(_broadcast, broadcast, in_place=True)


# --- alltoall -----------------------------------------------------------------------------------
@document
def alltoall(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send some rows to each rank; return the rows that this rank receives, in rank order.

    Gradients flow through it: the gradient of a row goes back to the rank that sent the row.

    Args:
        tensor: a tensor of at least one dimension, with the same dtype on every rank, and the same
            shape except for the first dimension.
        splits: how many rows go to each rank, integers; None: the same number to each.

    Returns:
        The rows. With splits, and always from alltoall_async(), a pair: the rows, and an int32
        tensor with the number of rows from each rank.
    """
    counts: list[Tensor] = []

    def forward(xs: Tensors) -> list[Tensor]:
        rows, received = _alltoall(AWAITED, xs[0], splits, name, process_set).wait()
        counts.append(received)
        return [rows]

    def backward(grads: Tensors, _: Any) -> list[Tensor]:
        return [alltoall(grads[0], counts[0], process_set=process_set)[0]]

    has_gradient = torch.is_grad_enabled() and getattr(tensor, "requires_grad", True)
    if splits is None and not has_gradient:
        done = carry_out(AWAITED, "alltoall", name, process_set, tensor)
        if done is not None:
            rows: Tensor = done.wait()
            return rows
    (rows,) = apply(forward, backward, [tensor])
    return rows if splits is None else (rows, counts[0])


def _alltoall(
    form: Form,
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> HorovodHandle[tuple[Tensor, Tensor]]:
    def plan(group: Group, name: str | None) -> Plan[Any]:
        if isinstance(splits, Tensor) and splits.is_floating_point():
            raise ValueError(
                f"alltoall: splits={splits.tolist()} must be {group.size} integers, one per rank, "
                f"not {splits.dtype}"
            )
        rows = splits.tolist() if hasattr(splits, "tolist") else splits
        return plan_alltoall(group, name, tensor, rows, True)

    handle = begin(form, "alltoall", name, process_set, plan)
    return HorovodHandle([handle], lambda pair: (pair[0], torch.tensor(pair[1], dtype=torch.int32)))


alltoall_async = async_form(_alltoall, alltoall)


# --- the others ---------------------------------------------------------------------------------
@document
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank has called it. It does not wait for asynchronous operations."""
    if carry_out(AWAITED, "barrier", None, process_set, family="object") is None:
        begin(AWAITED, "barrier", None, process_set, plan_barrier, family="object")


def join(device: int = -1) -> int:
    """Take part in the operations of the other ranks until all ranks have called join(); blocks.

    It is for ranks that have fewer batches than others. To each operation, of any process set, this
    rank contributes values that do not change the result. Average still divides by the number of
    all ranks.

    This rank makes no step() in join(), so its weights and its optimizer stay as they are. Before
    the ranks go on, send them those of the last rank, which has made every step:

        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)

    Args:
        device: ignored; this rank contributes tensors on the device that the other ranks use.

    Returns:
        The last rank that called join(), the same on every rank.
    """
    del device
    prepare()  # makes the groups that other ranks make in their first operation
    return collectives.join()


def _rows_of_mean(grads: Tensors, xs: Tensors, process_set: ProcessSet) -> list[Tensor]:
    """Return, for each x, the rows of x in the mean of the ranks' gradients."""
    found = []
    for grad, x in zip(grads, xs, strict=True):
        mean = _mean(grad, process_set)
        rows = allgather(torch.tensor([len(x)]), process_set=process_set)
        start = int(rows[: process_set.rank()].sum())
        found.append(mean[start : start + len(x)])
    return found


def _mean_at_root(grads: Tensors, root_rank: int, process_set: ProcessSet) -> list[Tensor]:
    means = [_mean(grad, process_set) for grad in grads]
    if engine().rank == root_rank:
        return means
    # They keep the graph of the mean: to differentiate it takes every rank.
    return [mean.masked_fill(torch.ones_like(mean, dtype=torch.bool), 0) for mean in means]


def _mean(grad: Tensor, process_set: ProcessSet) -> Tensor:
    """Return the mean of the ranks' gradients, which can be differentiated again."""
    args = AWAITED, "allreduce", None, process_set, plan_allreduce
    (mean,) = apply(
        lambda xs: [begin(*args, xs[0], ReductionOptions(AVERAGE)).wait()],
        lambda grads, _: [_mean(each, process_set) for each in grads],
        [grad],
    )
    return mean


# --- objects -------------------------------------------------------------------------------------
@document
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return a copy of the root's object, made by pickle; on the root, return `obj` itself.

    Unpickling can run code of the root's choice: the ranks of a job must trust each other.

    Args:
        obj: anything that can be pickled; ignored on ranks other than the root.
    """
    group = _group_for_objects(name, process_set)
    return collectives.broadcast_object(obj, process_set.root(root_rank), name=name, group=group)


@document
def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return all ranks' objects in rank order: this rank's is `obj`, the others are pickled copies.

    Unpickling can run code of another rank's choice: the ranks of a job must trust each other.

    Args:
        obj: anything that can be pickled.
    """
    group = _group_for_objects(name, process_set)
    return collectives.allgather_object(obj, name=name, group=group)


def _group_for_objects(name: str | None, process_set: ProcessSet) -> Group:
    ProcessSet.require(process_set)
    return process_set.group_for("object") if name is None else process_set.group
