"""A hook for DistributedDataParallel that takes its buckets through the node's shared memory."""

import functools
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.utils.weak import WeakTensorKeyDictionary

from ringcomm.collectives.op import AVERAGE, ReductionOptions
from ringcomm.engine.api.registered import empty
from ringcomm.engine.core.group import Group
from ringcomm.engine.operations.allreduce import plan_allreduce
from ringcomm.torch.distributed.compat import c10d, untraced
from ringcomm.torch.distributed.group.base import BaseGroup
from ringcomm.torch.distributed.group.options import call_options

# By the first parameter of a bucket: memory for the bucket, used anew in each step. What is made
# for each step costs its page faults, on all ranks: more than the communication.
_memory: Any = WeakTensorKeyDictionary()


# DDP looks at these annotations, and wants classes: no `from __future__ import annotations` here.
@untraced
def node_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return the Future of a bucket's average over all ranks.

        ddp_model.register_comm_hook(None, ringcomm.torch.node_hook)

    The bucket is copied into memory that all ranks of the node map, and averaged there in one pass.
    DDP copies gradients out of the result anyway, so one copy is saved. The memory is as large as
    the gradients, and kept as long as the model.

    Args:
        state: the process group of the ranks; None: the default one. Of ringcomm.
        bucket: c10d's GradBucket.

    Raises:
        TypeError: the group is not of ringcomm.
    """
    pg = c10d.group.WORLD if state is None else state
    if not isinstance(pg, BaseGroup):
        raise TypeError(
            f"node_hook needs a process group of ringcomm, not {type(pg).__name__}: "
            'init_process_group("ringcomm")'
        )
    gradients = bucket.buffer()
    shared = _memory_for(bucket.parameters()[0], gradients, pg.group)
    shared.copy_(gradients)
    call = call_options(None)
    plan = functools.partial(plan_allreduce, in_place=True)
    work = pg.start(call, "allreduce_", [shared], plan, None, shared, ReductionOptions(AVERAGE))
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(_first)
    return future


def _memory_for(first: torch.Tensor, like: torch.Tensor, group: Group) -> torch.Tensor:
    """Return memory for a bucket; DDP has copied the results of the step before out of it."""
    known: torch.Tensor | None = _memory.get(first)
    if known is None or known.numel() != like.numel() or known.dtype != like.dtype:
        memory = torch.from_numpy(empty(like.nbytes, "uint8", group=group))
        known = _memory[first] = memory.view(like.dtype)
    return known


def _first(future: Any) -> torch.Tensor:
    tensor: torch.Tensor = future.value()[0]
    return tensor
