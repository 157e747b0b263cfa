"""Collective communication for training on MPI clusters.

    import ringcomm as rc
    rc.init()
    total = rc.allreduce(x)         # numpy, torch, cupy

Run with `mpirun -np 4 python train.py`. For torch: `import ringcomm.torch as hvd`.
"""

import os
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ringcomm._version import __version__

if "RINGCOMM_RANK_PROCESS" in os.environ:  # a child of a rank, such as a worker of a pool
    from ringcomm.status.child_signals import hold_with_rank

    hold_with_rank()

if TYPE_CHECKING:
    from ringcomm import codec, data, elastic
    from ringcomm.collectives.operators import AVERAGE, BAND, BOR, BXOR, MAX, MIN, PRODUCT, SUM, Op
    from ringcomm.engine.api.collectives import *
    from ringcomm.engine.api.explain import explain
    from ringcomm.engine.api.grid import Grid
    from ringcomm.engine.api.init_rank_size import *
    from ringcomm.engine.api.log_metrics import log, log_to, note_event
    from ringcomm.engine.api.point_to_point import (
        irecv,
        isend,
        recv,
        recv_object,
        send,
        send_object,
        sendrecv,
    )
    from ringcomm.engine.api.program_parameters import Params, live
    from ringcomm.engine.api.registered_arrays import empty, node_memory, zeros
    from ringcomm.engine.api.steps import on_checkpoint, should_stop, step
    from ringcomm.engine.core.group import Group
    from ringcomm.engine.core.handle import Handle, wait_all
    from ringcomm.errors import *
    from ringcomm.launch.run import run
    from ringcomm.transport.base import ANY_SOURCE, PROC_NULL

__all__ = [
    "ANY_SOURCE", "AVERAGE", "BAND", "BOR", "BXOR", "MAX", "MIN", "PROC_NULL", "PRODUCT", "SUM",
    "CodecError", "CommTimeoutError", "ConfigError", "Grid", "Group", "Handle", "MismatchError",
    "NotInitializedError", "Op", "Params", "PeerFailedError", "RingcommError", "ServerLostError",
    "__version__", "allgather", "allgather_async", "allgather_object", "allreduce", "allreduce_",
    "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async", "barrier", "barrier_async",
    "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "broadcast_object", "codec",
    "cross_rank", "cross_size", "data", "elastic", "empty", "explain", "exscan", "exscan_async",
    "gather", "gather_async", "gather_object", "grouped_allgather", "grouped_allgather_async",
    "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async",
    "grouped_allreduce_async_", "grouped_reduce_scatter", "grouped_reduce_scatter_async", "init",
    "irecv", "is_initialized", "isend", "join", "live", "local_rank", "local_size", "log", "log_to",
    "node_memory", "note_event", "on_checkpoint", "rank", "recv", "recv_object", "reduce",
    "reduce_", "reduce_async", "reduce_async_", "reduce_scatter", "reduce_scatter_",
    "reduce_scatter_async", "reduce_scatter_async_", "run", "scan", "scan_async", "scatter",
    "scatter_async", "scatter_object", "send", "send_object", "sendrecv", "should_stop", "shutdown",
    "size", "split", "start_timeline", "step", "stop_timeline", "wait_all", "zeros",
]  # fmt: skip

# The modules of the public names. Each is imported when one of its names is first used, because
# many programs and worker processes import ringcomm but never communicate.
_HOMES = (
    "errors",
    "collectives.operators",
    "transport.base",
    "engine.api.init_rank_size",
    "engine.core.group",
    "engine.core.handle",
    "engine.api.collectives",
    "engine.api.point_to_point",
    "engine.api.grid",
    "engine.api.registered_arrays",
    "engine.api.explain",
    "engine.api.log_metrics",
    "engine.api.steps",
    "engine.api.program_parameters",
    "launch.run",
)


def _print_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    try:
        from ringcomm.status.error_printer import print_error
    except Exception:  # noqa: BLE001 - as at the end of Python: the error is more important
        sys.__excepthook__(kind, error, trace)
    else:
        print_error(kind, error, trace)


if sys.excepthook is sys.__excepthook__:  # nobody else shows errors in his way
    sys.excepthook = _print_error


def __getattr__(name: str) -> Any:
    from ringcomm.late_names import find

    homes = () if name in ("codec", "data", "elastic") else _HOMES
    value = globals()[name] = find(__name__, name, __all__, homes)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
