"""Data-parallel training with torch: two lines around an existing optimizer.

    import ringcomm.torch as hvd
    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

The collectives of ringcomm itself (`import ringcomm as rc`) take torch CPU tensors as they are.
"""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "ringcomm.torch needs torch: pip install 'ringcomm[torch]'", name="torch"
    ) from error

from ringcomm import run
from ringcomm.collectives.op import AVERAGE as Average
from ringcomm.collectives.op import SUM as Sum
from ringcomm.engine.world import (
    cross_rank,
    cross_size,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from ringcomm.torch.checkpoint import Checkpoint, Restored
from ringcomm.torch.metrics import Metrics, average_metrics
from ringcomm.torch.optimizer import DistributedOptimizer
from ringcomm.torch.schedules import WarmupLR, scaled_lr
from ringcomm.torch.state import broadcast_optimizer_state, broadcast_parameters
from ringcomm.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Average",
    "Checkpoint",
    "DistributedOptimizer",
    "Metrics",
    "Restored",
    "Sum",
    "SyncBatchNorm",
    "WarmupLR",
    "average_metrics",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "run",
    "scaled_lr",
    "shutdown",
    "size",
]
