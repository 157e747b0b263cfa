"""NCCL as cupy binds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cupy.cuda import nccl

from ringcomm.config import environment
from ringcomm.errors import ConfigError, RingcommError
from ringcomm.gpu.stack.presence import nccl_problem
from ringcomm.gpu.stack.probing import probe
from ringcomm.gpu.transports.nccl import SHARES_FROM, Communicator


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

    def all_reduce(
        self, source: int, target: int, count: int, dtype: int, op: int, stream: int
    ) -> None:
        """See Communicator."""
        _checked("ncclAllReduce", self._comm.allReduce, source, target, count, dtype, op, stream)

    def reduce(
        self, source: int, target: int, count: int, dtype: int, op: int, root: int, stream: int
    ) -> None:
        """See Communicator."""
        arguments = (source, target, count, dtype, op, root, stream)
        _checked("ncclReduce", self._comm.reduce, *arguments)

    def reduce_scatter(
        self, source: int, target: int, count: int, dtype: int, op: int, stream: int
    ) -> None:
        """See Communicator."""
        arguments = (source, target, count, dtype, op, stream)
        _checked("ncclReduceScatter", self._comm.reduceScatter, *arguments)

    def all_gather(self, source: int, target: int, count: int, dtype: int, stream: int) -> None:
        """See Communicator."""
        _checked("ncclAllGather", self._comm.allGather, source, target, count, dtype, stream)

    def broadcast(
        self, source: int, target: int, count: int, dtype: int, root: int, stream: int
    ) -> None:
        """See Communicator."""
        arguments = (source, target, count, dtype, root, stream)
        _checked("ncclBroadcast", self._comm.broadcast, *arguments)

    def send(self, source: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """See Communicator."""
        _checked("ncclSend", self._comm.send, source, count, dtype, peer, stream)

    def receive(self, target: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """See Communicator."""
        _checked("ncclRecv", self._comm.recv, target, count, dtype, peer, stream)

    def begin_group(self) -> None:
        """See Communicator."""
        _checked("ncclGroupStart", nccl.groupStart)

    def end_group(self) -> None:
        """See Communicator."""
        _checked("ncclGroupEnd", nccl.groupEnd)

    def abort(self) -> None:
        """See Communicator."""
        _checked("ncclCommAbort", self._comm.abort)

    def destroy(self) -> None:
        """See Communicator."""
        _checked("ncclCommDestroy", self._comm.destroy)


def _checked(what: str, call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except (nccl.NcclError, KeyError) as error:  # KeyError of a code that cupy has no name for
        raise RingcommError(
            f"{what} failed: {error}. NCCL_DEBUG=WARN in the environment says more"
        ) from error
