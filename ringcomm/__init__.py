"""Collective communication for training on MPI clusters.

    import ringcomm as rc
    rc.init()
    total = rc.allreduce(x)         # numpy arrays and torch CPU tensors

Run with `mpirun -np 4 python train.py`. For torch: `import ringcomm.torch as hvd`.
"""

from ringcomm._version import __version__
from ringcomm.collectives.op import AVERAGE, SUM, Op
from ringcomm.engine.ops import (
    allgather,
    allreduce,
    allreduce_,
    barrier,
    broadcast,
    broadcast_,
    broadcast_object,
    reduce_scatter,
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
    "allreduce",
    "allreduce_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "cross_rank",
    "cross_size",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "reduce_scatter",
    "shutdown",
    "size",
]
