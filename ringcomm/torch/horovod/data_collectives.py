"""Collectives that move torch tensors, with the names, arguments and defaults of Horovod.

The contracts are those of ringcomm.engine.api.collectives; this face translates. What is common to
all stands in reductions.py; gradients flow through the forms that do not end in `_` or `_async`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ringcomm.collectives.op import AVERAGE
from ringcomm.engine.api import collectives
from ringcomm.engine.api.world import engine
from ringcomm.engine.core.execution import Plan
from ringcomm.engine.core.group import Group
from ringcomm.engine.operations import plans
from ringcomm.torch.horovod import autograd_functions
from ringcomm.torch.horovod.dispatch import begin
from ringcomm.torch.horovod.handles import Handle
from ringcomm.torch.horovod.process_sets import ProcessSet, global_process_set, prepare


# --- allgather ----------------------------------------------------------------------------------
def allgather(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the tensors of all ranks, one after another along the first dimension, a new tensor.

    Args:
        tensor: at least one dimension; the same dtype on every rank, and the same shape but for the
            first dimension.
        name: see above.
        process_set: see above.
    """
    (result,) = autograd_functions.apply(
        lambda xs: [_allgather(xs[0], name, process_set, is_awaited=True).wait()],
        lambda grads, xs: _rows_of_mean(grads, xs, process_set),
        [tensor],
    )
    return result


def allgather_async(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Start allgather()."""
    return _allgather(tensor, name, process_set)


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Return allgather() of each tensor."""
    return autograd_functions.apply(
        lambda xs: _grouped_allgather(xs, name, process_set, is_awaited=True).wait(),
        lambda grads, xs: _rows_of_mean(grads, xs, process_set),
        autograd_functions.listed(tensors),
    )


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[torch.Tensor]]:
    """Start grouped_allgather()."""
    return _grouped_allgather(tensors, name, process_set)


def _allgather(
    x: torch.Tensor, name: str | None, process_set: ProcessSet, *, is_awaited: bool = False
) -> Handle[torch.Tensor]:
    plan = plans.allgather
    return begin("allgather", name, process_set, "allgather", plan, x, is_awaited=is_awaited)


def _grouped_allgather(
    xs: Sequence[torch.Tensor],
    name: str | None,
    process_set: ProcessSet,
    *,
    is_awaited: bool = False,
) -> Handle[list[torch.Tensor]]:
    kind, plan = "grouped_allgather", plans.grouped_allgather
    return begin(
        kind,
        name,
        process_set,
        "grouped",
        plan,
        autograd_functions.listed(xs),
        is_awaited=is_awaited,
    )


# --- broadcast ----------------------------------------------------------------------------------
def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return root's tensor, a new one.

    Args:
        tensor: the same shape and dtype on every rank.
        root_rank: the rank of the job whose values all get.
        name: see above.
        process_set: see above.
    """
    (result,) = autograd_functions.apply(
        lambda xs: [_broadcast(xs[0], root_rank, name, process_set, is_awaited=True).wait()],
        lambda grads, _: _mean_at_root(grads, root_rank, process_set),
        [tensor],
    )
    return result


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Start broadcast()."""
    return _broadcast(tensor, root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrite `tensor` with root's, and return it."""
    handle = _broadcast(tensor, root_rank, name, process_set, in_place=True, is_awaited=True)
    return handle.wait()


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Start broadcast_()."""
    return _broadcast(tensor, root_rank, name, process_set, in_place=True)


def _broadcast(
    x: torch.Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    *,
    in_place: bool = False,
    is_awaited: bool = False,
) -> Handle[torch.Tensor]:
    def plan(group: Group, name: str | None) -> Plan[torch.Tensor]:
        root = process_set.root(root_rank)  # within the plan, so that all ranks hear of a mistake
        return plans.broadcast(group, name, x, root, in_place=in_place)

    kind = "broadcast_" if in_place else "broadcast"
    return begin(kind, name, process_set, "broadcast", plan, is_awaited=is_awaited)


# --- alltoall -----------------------------------------------------------------------------------
def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the rows that each rank has for this one, one after another in rank order.

    Args:
        tensor: at least one dimension; the same dtype on every rank, and the same shape but for the
            first dimension.
        splits: how many rows go to each rank, integers; None: as many to each.
        name: see above.
        process_set: see above.

    Returns:
        The rows; with splits a pair: the rows, and an int32 tensor of how many came from each rank.
    """
    counts: list[torch.Tensor] = []

    def forward(xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        rows, received = _alltoall(xs[0], splits, name, process_set, is_awaited=True).wait()
        counts.append(received)
        return [rows]

    def backward(grads: Sequence[torch.Tensor], _: Any) -> list[torch.Tensor]:
        return [alltoall(grads[0], counts[0], process_set=process_set)[0]]

    (rows,) = autograd_functions.apply(forward, backward, [tensor])
    return rows if splits is None else (rows, counts[0])


def alltoall_async(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[tuple[torch.Tensor, torch.Tensor]]:
    """Start alltoall(); its result is the pair in any case, as in Horovod."""
    return _alltoall(tensor, splits, name, process_set)


def _alltoall(
    x: torch.Tensor,
    splits: Any,
    name: str | None,
    process_set: ProcessSet,
    *,
    is_awaited: bool = False,
) -> Handle[tuple[torch.Tensor, torch.Tensor]]:
    def plan(group: Group, name: str | None) -> Plan[Any]:
        if isinstance(splits, torch.Tensor) and splits.is_floating_point():
            raise ValueError(
                f"alltoall: splits={splits.tolist()} must be {group.size} integers, one per rank, "
                f"not {splits.dtype}"
            )
        rows = splits.tolist() if hasattr(splits, "tolist") else splits
        return plans.alltoall(group, name, x, rows, return_splits=True)

    handle = begin("alltoall", name, process_set, "alltoall", plan, is_awaited=is_awaited)
    return Handle([handle], lambda pair: (pair[0], torch.tensor(pair[1], dtype=torch.int32)))


# --- the others ---------------------------------------------------------------------------------
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank has called it; operations under way with a name may be overtaken."""
    ProcessSet.require(process_set)
    lane = process_set.lane("object")
    engine().execute("barrier", None, lambda g: plans.barrier(g, None), lane)


def join(device: int = -1) -> int:
    """Take part in what the others do until all ranks have called this; see ringcomm.join().

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


def _rows_of_mean(
    grads: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], process_set: ProcessSet
) -> list[torch.Tensor]:
    """Return of each gathered gradient's mean the rows that this rank had contributed."""
    found = []
    for grad, x in zip(grads, xs, strict=True):
        mean = _mean(grad, process_set)
        rows = allgather(torch.tensor([len(x)]), process_set=process_set)
        start = int(rows[: process_set.rank()].sum())
        found.append(mean[start : start + len(x)])
    return found


def _mean_at_root(
    grads: Sequence[torch.Tensor], root_rank: int, process_set: ProcessSet
) -> list[torch.Tensor]:
    means = [_mean(grad, process_set) for grad in grads]
    is_root = engine().rank == root_rank
    return means if is_root else [torch.zeros_like(mean) for mean in means]


def _mean(grad: torch.Tensor, process_set: ProcessSet) -> torch.Tensor:
    plan = plans.allreduce
    lane = "allreduce"
    handle = begin(lane, None, process_set, lane, plan, grad, AVERAGE, is_awaited=True)
    mean: torch.Tensor = handle.wait()
    return mean


# --- objects -------------------------------------------------------------------------------------
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return root's object; see ringcomm.broadcast_object()."""
    ProcessSet.require(process_set)
    group = process_set.lane("object") if name is None else process_set.group
    return collectives.broadcast_object(obj, process_set.root(root_rank), name=name, group=group)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return every rank's object, in rank order; see ringcomm.allgather_object()."""
    ProcessSet.require(process_set)
    group = process_set.lane("object") if name is None else process_set.group
    return collectives.allgather_object(obj, name=name, group=group)
