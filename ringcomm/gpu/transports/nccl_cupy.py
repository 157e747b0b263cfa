"""NCCL as cupy binds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cupy.cuda import nccl

from ringcomm.config import environment
from ringcomm.errors import ConfigError, RingcommError
from ringcomm.gpu.transports.nccl import SHARES_FROM, Communicator
from ringcomm.nvidia.presence import nccl_problem
from ringcomm.nvidia.probing import probe


class CupyProvider:
    """Provider over cupy.cuda.nccl.

    Raises:
        ConfigError: NCCL cannot be used; the text says why.
    """

    name = "cupy"

    def __init__(self) -> None:
        problem = nccl_problem(probe())
        if problem is not None:
            raise ConfigError(problem)
        self.version: int = _checked("ncclGetVersion", nccl.get_version)
        is_wanted = environment().get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        self.shares_gpus = is_wanted and self.version >= SHARES_FROM

    def unique_id(self) -> bytes:
        """See Provider."""
        return bytes(_checked("ncclGetUniqueId", nccl.get_unique_id))

    def connect(self, unique_id: bytes, rank: int, size: int) -> Communicator:
        """See Provider."""
        return CupyCommunicator(
            _checked("ncclCommInitRank", nccl.NcclCommunicator, size, unique_id, rank)
        )


class CupyCommunicator:
    """Communicator over a cupy.cuda.nccl.NcclCommunicator."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def call(self, function: str, *arguments: int) -> None:
        """See Communicator. ncclAllReduce is comm.allReduce, ncclCommAbort is comm.abort."""
        of = nccl if "Group" in function else self._comm
        name = function.removeprefix("nccl").removeprefix("Comm")
        _checked(function, getattr(of, name[0].lower() + name[1:]), *arguments)


def _checked(what: str, call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except (nccl.NcclError, KeyError) as error:  # KeyError of a code that cupy has no name for
        raise RingcommError(
            f"{what} failed: {error}. NCCL_DEBUG=WARN in the environment says more"
        ) from error
