"""Functions of Horovod's API about the job: its start, its timeline, its software."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ringcomm import config
from ringcomm.engine.api import init_rank_size
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.api.world import is_outside
from ringcomm.engine.core.current_engine import has_engine
from ringcomm.engine.operations.base import device_executor
from ringcomm.errors import ConfigError
from ringcomm.launched.launcher import command_for, is_launched_by_mpi
from ringcomm.torch.horovod import process_sets as sets

if TYPE_CHECKING:
    from ringcomm.gpu.executor.engine_gpus import Drivers

_log = logging.getLogger("ringcomm")


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Make this process a rank of its job; see ringcomm.init(). Collective.

    It reads these variables of Horovod (RINGCOMM_ variables take precedence over them):
    HOROVOD_FUSION_THRESHOLD, HOROVOD_TIMELINE, HOROVOD_STALL_CHECK_TIME_SECONDS,
    HOROVOD_STALL_CHECK_DISABLE, HOROVOD_STALL_SHUTDOWN_TIME_SECONDS and HOROVOD_LOG_LEVEL.

    Args:
        comm: an mpi4py communicator whose ranks take part; None: all ranks.
        process_sets: process sets to put into use, the same on every rank; "dynamic" means none.

    Raises:
        ValueError: comm is a list that lacks ranks of the job; or a process set has the same ranks
            as an earlier one or as the global one. None of process_sets is in use then.
    """
    if isinstance(process_sets, str) and process_sets.lower() == "dynamic":
        process_sets = ()
    members = comm if isinstance(comm, list | tuple | range) else None
    level = config.horovod_log_level()
    if level is not None:
        logging.getLogger("ringcomm").setLevel(level)
    was_there = has_engine()
    init_rank_size.start(config.horovod_settings, None if members is not None else comm)
    if members and sorted(members) != list(range(engine().size)):
        raise ValueError(
            f"init(comm={list(members)}): this job has ranks 0 to {engine().size - 1}. Pass a "
            "communicator, comm=MPI.COMM_WORLD.Split(...), or use process sets"
        )
    if (
        not was_there
        and engine().size == 1
        and not is_launched_by_mpi()
        and engine().settings.hints
    ):
        _log.warning(
            "1 process, which trains alone. Several ranks: %s (RINGCOMM_HINTS=0: not a word)",
            command_for("N"),
        )
    if not is_outside():  # a spare makes groups when it has a place
        sets.prepare(process_sets or ())
        if members is None and not was_there:
            sets.global_process_set.mpi_comm = comm


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record operations from now on in `<file_path>.<rank>.json`; see ringcomm.start_timeline().

    Args:
        file_path: a path without ".<rank>.json"; a ".json" at its end is removed.
        mark_cycles: ignored, because there are no cycles.
    """
    del mark_cycles
    if isinstance(file_path, str):  # ringcomm's function refuses other types
        file_path = file_path.removesuffix(".json")
    init_rank_size.start_timeline(file_path)


def is_homogeneous() -> bool:
    """Return True if every host has the same number of ranks."""
    current = engine()
    nodes = current.groups.default.ranks.nodes
    return len({nodes.count(node) for node in nodes}) == 1


def mpi_threads_supported() -> bool:
    """Return True if MPI lets several threads communicate; overlap needs that."""
    return engine().transport.is_threaded


def _always(name: str, answer: bool, why: str) -> Callable[[], bool]:
    def question() -> bool:
        return answer

    question.__name__ = question.__qualname__ = name
    question.__doc__ = f"Return {answer}: {why}."
    return question


mpi_built = _always("mpi_built", True, "this library is built on MPI")
mpi_enabled = _always("mpi_enabled", True, "MPI carries the messages")
gloo_built = _always("gloo_built", False, "gloo is not used")
gloo_enabled = _always("gloo_enabled", False, "gloo is not used")
rocm_built = _always("rocm_built", False, "only NVIDIA's GPUs are supported")
ddl_built = _always("ddl_built", False, "DDL is not used")
ccl_built = _always("ccl_built", False, "oneCCL is not used")


def nccl_built() -> int:
    """Return the version of the NCCL that this process can load, such as 22703; 0 if there is none.

    See cuda_built().
    """
    try:
        drivers = _drivers()
        drivers.require()
        return drivers.provider().version
    except ConfigError:
        return 0


def cuda_built() -> bool:
    """Return True if this process can reduce tensors on a GPU; see `ringcomm check`.

    Cost: imports cupy and starts NVIDIA's driver; processes forked later cannot use the driver.
    """
    try:
        _drivers().require()
    except ConfigError:
        return False
    return True


def _drivers() -> Drivers:
    device_executor()  # raises ConfigError if ringcomm.gpu is not installed
    from ringcomm.gpu.executor.engine_gpus import cuda_drivers

    return cuda_drivers()
