"""A hook for DistributedDataParallel that takes its buckets through the node's shared memory."""

from typing import Any

import torch
import torch.distributed as dist

from ringcomm.collectives.op import AVERAGE
from ringcomm.engine.async_ops import allreduce_async_
from ringcomm.engine.registered import empty
from ringcomm.torch.distributed.base import BaseGroup
from ringcomm.torch.distributed.compat import c10d, untraced
from ringcomm.torch.distributed.work import Work


# DDP looks at these annotations, and wants classes: no `from __future__ import annotations` here.
@untraced
def node_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return the Future of a bucket's average over all ranks.

        ddp_model.register_comm_hook(None, ringcomm.torch.node_hook)

    The bucket is copied into memory that all ranks of the node map, and averaged there in one pass.
    DDP copies gradients out of the result anyway, so one copy is saved.

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
    memory = empty(gradients.nbytes, "uint8", group=pg.group)
    shared = torch.from_numpy(memory).view(gradients.dtype)
    shared.copy_(gradients)
    handle = allreduce_async_(shared, AVERAGE, group=pg.group)
    return Work(handle, [shared]).get_future().then(_first)


def _first(future: Any) -> torch.Tensor:
    tensor: torch.Tensor = future.value()[0]
    return tensor
