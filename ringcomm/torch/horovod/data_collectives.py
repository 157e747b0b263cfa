"""Collectives that move torch tensors, with the names, arguments and defaults of Horovod.

The contracts are those of ringcomm.engine.api.collectives; this face translates. Forms that end in
`_` overwrite their argument, `grouped_` ones gather several tensors as one operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ringcomm.collectives.op import AVERAGE, ReductionOptions
from ringcomm.engine.api import collectives
from ringcomm.engine.api.world import engine
from ringcomm.engine.core.execution import Plan
from ringcomm.engine.core.group import Group
from ringcomm.engine.operations.allgather import plan_allgather
from ringcomm.engine.operations.allreduce import plan_allreduce
from ringcomm.engine.operations.alltoall import plan_alltoall
from ringcomm.engine.operations.barrier import plan_barrier
from ringcomm.engine.operations.broadcast import plan_broadcast
from ringcomm.engine.operations.grouped import plan_grouped_allgather
from ringcomm.torch.horovod import autograd_functions
from ringcomm.torch.horovod.forms import AWAITED, Form, async_form, begin, document, in_place_form
from ringcomm.torch.horovod.handles import Handle
from ringcomm.torch.horovod.process_sets import ProcessSet, global_process_set, prepare

Tensor = torch.Tensor
Tensors = Sequence[Tensor]


# --- allgather ----------------------------------------------------------------------------------
@document
def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the tensors of all ranks, one after another along the first dimension, a new tensor.

    Gradients flow through it: each rank gets its rows of the mean of the ranks' gradients.

    Args:
        tensor: at least one dimension; the same dtype on every rank, and the same shape but for the
            first dimension.
    """
    (result,) = autograd_functions.apply(
        lambda xs: [_allgather(AWAITED, xs[0], name, process_set).wait()],
        lambda grads, xs: _rows_of_mean(grads, xs, process_set),
        [tensor],
    )
    return result


@document
def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Return of each tensor those of all ranks, one after another along the first dimension.

    Gradients flow through it: each rank gets its rows of the mean of the ranks' gradients.

    Args:
        tensors: a list, as long on every rank, of tensors as allgather() takes them; they travel as
            one operation.
    """
    return autograd_functions.apply(
        lambda xs: _grouped_allgather(AWAITED, xs, name, process_set).wait(),
        lambda grads, xs: _rows_of_mean(grads, xs, process_set),
        autograd_functions.tensor_list(tensors),
    )


def _allgather(
    form: Form,
    tensor: Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Tensor]:
    return begin(form, "allgather", name, process_set, plan_allgather, tensor)


def _grouped_allgather(
    form: Form,
    tensors: Tensors,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[Tensor]]:
    kind, plan, xs = (
        "grouped_allgather",
        plan_grouped_allgather,
        autograd_functions.tensor_list(tensors),
    )
    return begin(form, kind, name, process_set, plan, xs, lane="grouped")


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
    """Return root's tensor, a new one.

    Gradients flow through it: root gets the mean of the ranks' gradients, the others zeros.

    Args:
        tensor: the same shape and dtype on every rank.
    """
    (result,) = autograd_functions.apply(
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
) -> Handle[Tensor]:
    def plan(group: Group, name: str | None) -> Plan[Tensor]:
        root = process_set.root(root_rank)  # within the plan, so that all ranks learn of a mistake
        return plan_broadcast(group, name, tensor, root, in_place=form.in_place)

    kind = "broadcast_" if form.in_place else "broadcast"
    return begin(form, kind, name, process_set, plan, lane="broadcast")


broadcast_async = async_form(_broadcast, broadcast)
broadcast_ = in_place_form(_broadcast, broadcast, "Overwrite `tensor` with root's, and return it.")
broadcast_async_ = async_form(_broadcast, broadcast, in_place=True)


# --- alltoall -----------------------------------------------------------------------------------
@document
def alltoall(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the rows that each rank has for this one, one after another in rank order.

    Gradients flow through it, back to where each row came from.

    Args:
        tensor: at least one dimension; the same dtype on every rank, and the same shape but for the
            first dimension.
        splits: how many rows go to each rank, integers; None: as many to each.

    Returns:
        The rows; with splits, and from alltoall_async() in any case, a pair: the rows, and an int32
        tensor of how many came from each rank.
    """
    counts: list[Tensor] = []

    def forward(xs: Tensors) -> list[Tensor]:
        rows, received = _alltoall(AWAITED, xs[0], splits, name, process_set).wait()
        counts.append(received)
        return [rows]

    def backward(grads: Tensors, _: Any) -> list[Tensor]:
        return [alltoall(grads[0], counts[0], process_set=process_set)[0]]

    (rows,) = autograd_functions.apply(forward, backward, [tensor])
    return rows if splits is None else (rows, counts[0])


def _alltoall(
    form: Form,
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[tuple[Tensor, Tensor]]:
    def plan(group: Group, name: str | None) -> Plan[Any]:
        if isinstance(splits, Tensor) and splits.is_floating_point():
            raise ValueError(
                f"alltoall: splits={splits.tolist()} must be {group.size} integers, one per rank, "
                f"not {splits.dtype}"
            )
        rows = splits.tolist() if hasattr(splits, "tolist") else splits
        return plan_alltoall(group, name, tensor, rows, True)

    handle = begin(form, "alltoall", name, process_set, plan)
    return Handle([handle], lambda pair: (pair[0], torch.tensor(pair[1], dtype=torch.int32)))


alltoall_async = async_form(_alltoall, alltoall)


# --- the others ---------------------------------------------------------------------------------
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank has called it; operations under way with a name may be overtaken."""
    ProcessSet.require(process_set)
    lane = process_set.lane("object")
    engine().execute("barrier", None, lambda g: plan_barrier(g, None), lane)


def join(device: int = -1) -> int:
    """Take part in what the others do until all ranks have called this; blocks.

    For ranks that have fewer batches than others: this one contributes what changes no result, to
    operations of any process set; an Average is still divided by the number of all ranks.

    A rank that joined makes no step() meanwhile, so its weights and optimizer stay as they were.
    Before all go on, bring them up to date from the last rank, which has made every step:

        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)

    Args:
        device: ignored: what stands in for this rank's tensors is where those of the others are.

    Returns:
        The last rank that joined, the same on all.
    """
    del device
    prepare()  # what is made at the first operation, all ranks must make
    return collectives.join()


def _rows_of_mean(grads: Tensors, xs: Tensors, process_set: ProcessSet) -> list[Tensor]:
    """Return of each gathered gradient's mean the rows that this rank had contributed."""
    found = []
    for grad, x in zip(grads, xs, strict=True):
        mean = _mean(grad, process_set)
        rows = allgather(torch.tensor([len(x)]), process_set=process_set)
        start = int(rows[: process_set.rank()].sum())
        found.append(mean[start : start + len(x)])
    return found


def _mean_at_root(grads: Tensors, root_rank: int, process_set: ProcessSet) -> list[Tensor]:
    means = [_mean(grad, process_set) for grad in grads]
    is_root = engine().rank == root_rank
    return means if is_root else [torch.zeros_like(mean) for mean in means]


def _mean(grad: Tensor, process_set: ProcessSet) -> Tensor:
    mean: Tensor = begin(
        AWAITED, "allreduce", None, process_set, plan_allreduce, grad, ReductionOptions(AVERAGE)
    ).wait()
    return mean


# --- objects -------------------------------------------------------------------------------------
@document
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return root's object on every rank, pickled on the way; on root it is `obj` itself.

    Unpickling runs code that root chose: the ranks of a job must trust each other.

    Args:
        obj: anything that can be pickled; looked at on root only.
    """
    ProcessSet.require(process_set)
    group = process_set.lane("object") if name is None else process_set.group
    return collectives.broadcast_object(obj, process_set.root(root_rank), name=name, group=group)


@document
def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return every rank's object, in rank order, pickled on the way; this rank's is `obj` itself.

    Unpickling runs code that the others chose: the ranks of a job must trust each other.

    Args:
        obj: anything that can be pickled.
    """
    ProcessSet.require(process_set)
    group = process_set.lane("object") if name is None else process_set.group
    return collectives.allgather_object(obj, name=name, group=group)
