"""The job, as Horovod's names speak of it: start and end, ranks, and what was built in."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ringcomm import config
from ringcomm.engine.api import world
from ringcomm.engine.api.world import engine
from ringcomm.engine.executors.device import device_executor
from ringcomm.errors import ConfigError
from ringcomm.torch.horovod import process_sets as sets

if TYPE_CHECKING:
    from ringcomm.gpu.executor.gpus import Drivers

_log = logging.getLogger("ringcomm")


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Make this process a rank of its job; see ringcomm.init(). Collective.

    Horovod's variables are honoured where no RINGCOMM_ variable says otherwise:
    HOROVOD_FUSION_THRESHOLD, HOROVOD_TIMELINE, HOROVOD_STALL_CHECK_TIME_SECONDS,
    HOROVOD_STALL_CHECK_DISABLE, HOROVOD_STALL_SHUTDOWN_TIME_SECONDS and HOROVOD_LOG_LEVEL. There is
    no cycle, so HOROVOD_CYCLE_TIME has no meaning; process sets are always dynamic.

    Args:
        comm: an mpi4py communicator whose ranks take part; all by default.
        process_sets: process sets to put into use, the same on every rank; "dynamic" means none.

    Raises:
        ValueError: comm is a list of ranks other than all of them; or a process set has the ranks
            of one before it, as the global one has all: it alone is not in use then.
    """
    if isinstance(process_sets, str) and process_sets.lower() == "dynamic":
        process_sets = ()
    members = comm if isinstance(comm, list | tuple | range) else None
    level = config.horovod_log_level()
    if level is not None:
        _log.setLevel(level)
    world.start(config.horovod_settings, None if members is not None else comm)
    if members and sorted(members) != list(range(engine().size)):
        raise ValueError(
            f"init(comm={list(members)}): this job has ranks 0 to {engine().size - 1}. Pass a "
            "communicator, comm=MPI.COMM_WORLD.Split(...), or use process sets"
        )
    sets.prepare(process_sets or ())


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record operations from now on in `<file_path>.<rank>.json`; see ringcomm.start_timeline().

    Args:
        file_path: without ".<rank>.json"; a ".json" at its end is cut off.
        mark_cycles: ignored: there are no cycles.
    """
    del mark_cycles
    if isinstance(file_path, str):  # what is none is refused there
        file_path = file_path.removesuffix(".json")
    world.start_timeline(file_path)


def is_homogeneous() -> bool:
    """Return True if every host has as many ranks."""
    current = engine()
    nodes = current.groups.default.ranks.nodes
    return len({nodes.count(node) for node in nodes}) == 1


def mpi_threads_supported() -> bool:
    """Return True if MPI lets several threads communicate, as it must for overlap."""
    return engine().transport.is_threaded


def _always(name: str, answer: bool, why: str) -> Callable[[], bool]:
    def asked() -> bool:
        return answer

    asked.__name__ = asked.__qualname__ = name
    asked.__doc__ = f"Return {answer}: {why}."
    return asked


mpi_built = _always("mpi_built", True, "MPI is what this library stands on")
mpi_enabled = _always("mpi_enabled", True, "MPI carries the messages")
gloo_built = _always("gloo_built", False, "gloo is not used")
gloo_enabled = _always("gloo_enabled", False, "gloo is not used")
rocm_built = _always("rocm_built", False, "GPUs are NVIDIA's")
ddl_built = _always("ddl_built", False, "DDL is not used")
ccl_built = _always("ccl_built", False, "oneCCL is not used")


def nccl_built() -> int:
    """Return the version of the NCCL that this process can use, 22703; 0 if it can use none.

    Nothing is compiled for NCCL: it is looked for, and used where it is found. See cuda_built().
    """
    try:
        drivers = _drivers(config.settings().nccl)
        drivers.require()
        return drivers.provider().version
    except ConfigError:
        return 0


def cuda_built() -> bool:
    """Return True if tensors on a GPU can be reduced here; `ringcomm check` says what is missing.

    Cost: imports cupy, and starts NVIDIA's driver, which children forked later cannot use.
    """
    try:
        _drivers().require()
    except ConfigError:
        return False
    return True


def _drivers(nccl: str = "cupy") -> Drivers:
    device_executor()  # raises ConfigError in an installation without ringcomm.gpu
    from ringcomm.gpu.executor.gpus import cuda_drivers

    return cuda_drivers(nccl)
