"""A communication hook for DistributedDataParallel: reduces buckets in the node's shared memory."""

import functools
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.utils.weak import WeakTensorKeyDictionary

from ringcomm.collectives.operators import AVERAGE, ReductionOptions
from ringcomm.engine.api.registered_arrays import empty
from ringcomm.engine.core.group import Group
from ringcomm.engine.operations.allreduce import plan_allreduce
from ringcomm.torch.distributed.compat import c10d
from ringcomm.torch.distributed.group.arguments import call_options
from ringcomm.torch.distributed.group.base import BaseGroup
from ringcomm.torch.untraced import untraced

# Memory for each bucket, by the bucket's first parameter. Each step uses it again, because
# page faults of new memory would cost more than the communication.
_memory: Any = WeakTensorKeyDictionary()


# DDP checks that these annotations are classes: no `from __future__ import annotations` here.
@untraced
def node_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return a Future of a bucket's average over all ranks.

        ddp_model.register_comm_hook(None, ringcomm.torch.node_hook)

    The hook copies the bucket into memory that all ranks of the node map, and averages it there in
    one pass. That saves a copy. The memory is as large as the gradients, and lives as long as the
    model.

    Args:
        state: a process group of ringcomm; None: the default group.
        bucket: a bucket of gradients, as c10d's GradBucket.

    Raises:
        TypeError: the process group has another backend.
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
    call, options = call_options(None), ReductionOptions(AVERAGE)
    plan = functools.partial(plan_allreduce, in_place=True)
    work = pg.start(call, "allreduce_", [shared], plan, None, shared, options)
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(_first_tensor)
    return future


def _memory_for(first: torch.Tensor, like: torch.Tensor, group: Group) -> torch.Tensor:
    """Return memory for a bucket; DDP has already copied the previous step's result out of it."""
    known: torch.Tensor | None = _memory.get(first)
    if known is None or known.numel() != like.numel() or known.dtype != like.dtype:
        memory = torch.from_numpy(empty(like.nbytes, "uint8", group=group))
        known = _memory[first] = memory.view(like.dtype)
    return known


def _first_tensor(future: Any) -> torch.Tensor:
    tensor: torch.Tensor = future.value()[0]
    return tensor
