"""Data-parallel training with torch, with Horovod's API.

    import ringcomm.torch as hvd
    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

The collectives of ringcomm itself (`import ringcomm as rc`) take torch tensors, too.
"""

from importlib.util import find_spec as _find_spec

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "ringcomm.torch needs torch: pip install 'ringcomm[torch]'", name="torch"
    ) from error

from ringcomm.collectives.operators import AVERAGE as Average
from ringcomm.collectives.operators import MAX as Max
from ringcomm.collectives.operators import MIN as Min
from ringcomm.collectives.operators import PRODUCT as Product
from ringcomm.collectives.operators import SUM as Sum
from ringcomm.engine.api.init_rank_size import (
    cross_rank,
    cross_size,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
    stop_timeline,
)
from ringcomm.errors import RingcommError as HorovodInternalError
from ringcomm.launch.run import run
from ringcomm.torch import elastic
from ringcomm.torch.compression import Compression
from ringcomm.torch.elastic import HostsUpdatedInterrupt
from ringcomm.torch.horovod.basics import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
    start_timeline,
)
from ringcomm.torch.horovod.data_collectives import (
    allgather,
    allgather_async,
    allgather_object,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    broadcast_object,
    grouped_allgather,
    grouped_allgather_async,
    join,
)
from ringcomm.torch.horovod.handles import poll, synchronize
from ringcomm.torch.horovod.process_sets import (
    ProcessSet,
    add_process_set,
    get_process_set_ids_and_ranks,
    global_process_set,
    process_set_by_id,
    remove_process_set,
)
from ringcomm.torch.horovod.reduce_op import Adasum
from ringcomm.torch.horovod.reductions import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
)
from ringcomm.torch.optimizer import DistributedOptimizer
from ringcomm.torch.sync_batch_norm import SyncBatchNorm
from ringcomm.torch.training.broadcast_states import broadcast_optimizer_state, broadcast_parameters
from ringcomm.torch.training.checkpoint import Checkpoint, Restored
from ringcomm.torch.training.grad_scaler import GradScaler
from ringcomm.torch.training.learning_rates import WarmupLR, scaled_lr
from ringcomm.torch.training.metrics import Metrics, average_metrics

__all__ = [
    "Adasum", "Average", "Checkpoint", "Compression", "DistributedOptimizer", "GradScaler",
    "HorovodInternalError", "HostsUpdatedInterrupt", "Max", "Metrics", "Min", "ProcessSet",
    "Product", "Restored", "Sum", "SyncBatchNorm", "WarmupLR", "add_process_set", "allgather",
    "allgather_async", "allgather_object", "allreduce", "allreduce_", "allreduce_async",
    "allreduce_async_", "alltoall", "alltoall_async", "average_metrics", "barrier", "broadcast",
    "broadcast_", "broadcast_async", "broadcast_async_", "broadcast_object",
    "broadcast_optimizer_state", "broadcast_parameters", "ccl_built", "cross_rank", "cross_size",
    "cuda_built", "ddl_built", "elastic", "get_process_set_ids_and_ranks", "global_process_set",
    "gloo_built", "gloo_enabled", "grouped_allgather", "grouped_allgather_async",
    "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async",
    "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async", "init",
    "is_homogeneous", "is_initialized", "join", "local_rank", "local_size", "mpi_built",
    "mpi_enabled", "mpi_threads_supported", "nccl_built", "poll", "process_set_by_id", "rank",
    "reducescatter", "reducescatter_async", "remove_process_set", "rocm_built", "run", "scaled_lr",
    "shutdown", "size", "sparse_allreduce_async", "start_timeline", "stop_timeline", "synchronize",
]  # fmt: skip

if _find_spec("ringcomm.torch.distributed") is not None:  # the other folders work without it
    from ringcomm.torch.distributed.ddp_comm_hook import node_hook
    from ringcomm.torch.distributed.entry import init_process_group, register

    register()
    __all__ += ["init_process_group", "node_hook"]
