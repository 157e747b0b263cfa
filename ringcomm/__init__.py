"""Collective communication for training on MPI clusters.

    import ringcomm as rc
    rc.init()
    total = rc.allreduce(x)         # numpy arrays and torch CPU tensors

Run with `mpirun -np 4 python train.py`. For torch: `import ringcomm.torch as hvd`.
"""

from ringcomm._version import __version__
from ringcomm.collectives.op import AVERAGE, BAND, BOR, BXOR, MAX, MIN, PRODUCT, SUM, Op
from ringcomm.engine.ops import (
    allgather,
    allgather_object,
    allreduce,
    allreduce_,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    broadcast_object,
    gather,
    grouped_allgather,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_reduce_scatter,
    reduce,
    reduce_,
    reduce_scatter,
    reduce_scatter_,
    scatter,
)
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
    start_timeline,
    stop_timeline,
)
from ringcomm.errors import (
    CommTimeoutError,
    ConfigError,
    MismatchError,
    NotInitializedError,
    PeerFailedError,
    RingcommError,
    ServerLostError,
)

__all__ = [
    "AVERAGE",
    "BAND",
    "BOR",
    "BXOR",
    "MAX",
    "MIN",
    "PRODUCT",
    "SUM",
    "CommTimeoutError",
    "ConfigError",
    "MismatchError",
    "NotInitializedError",
    "Op",
    "PeerFailedError",
    "RingcommError",
    "ServerLostError",
    "__version__",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "cross_rank",
    "cross_size",
    "gather",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reduce_scatter",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "reduce",
    "reduce_",
    "reduce_scatter",
    "reduce_scatter_",
    "scatter",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
