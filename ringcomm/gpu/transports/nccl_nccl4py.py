"""NCCL as nccl4py binds it; written for 0.6."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from ringcomm.config import environment
from ringcomm.errors import ConfigError, RingcommError
from ringcomm.gpu.stack.presence import Nccl, nccl_paths, nccl_problem
from ringcomm.gpu.stack.probing import loaded, probe
from ringcomm.gpu.transports.nccl import SHARES_FROM, Communicator

_ID_NBYTES: Final = 128  # NCCL_UNIQUE_ID_BYTES


class Nccl4pyProvider:
    """Provider over nccl.bindings.

    Raises:
        ConfigError: NCCL cannot be used; the text says why.
    """

    name = "nccl4py"

    def __init__(self) -> None:
        stack = probe()
        try:
            from nccl.bindings import nccl

            self._nccl: Any = nccl
            self.version: int = nccl.get_version()
        except Exception as error:  # NCCLError is none of Python's; what loads libnccl has others
            raise ConfigError(
                f"RINGCOMM_NCCL is nccl4py, which cannot be used ({error}): pip install nccl4py "
                "cuda-bindings, or set it to cupy"
            ) from error
        found = Nccl(version=self.version, paths=nccl_paths(loaded()))
        problem = nccl_problem(replace(stack, nccl=found))
        if problem is not None:
            raise ConfigError(problem)
        is_wanted = environment().get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        self.shares_gpus = is_wanted and self.version >= SHARES_FROM

    def unique_id(self) -> bytes:
        """See Provider."""
        made = self._checked("ncclGetUniqueId", self._nccl.get_unique_id)
        return ctypes.string_at(made.ptr, _ID_NBYTES)

    def connect(self, unique_id: bytes, rank: int, size: int) -> Communicator:
        """See Provider."""
        # The form of ncclCommInitRank that takes several ids, here one; 0: no configuration.
        arguments = (size, rank, 1, bytearray(unique_id), 0)
        comm = self._checked("ncclCommInitRank", self._nccl.comm_init_rank_scalable, *arguments)
        return Nccl4pyCommunicator(self._nccl, self._checked, comm)

    def _checked(self, what: str, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except self._nccl.NCCLError as error:
            raise RingcommError(
                f"{what} failed: {error}. NCCL_DEBUG=WARN in the environment says more"
            ) from error


class Nccl4pyCommunicator:
    """Communicator over one of nccl.bindings.

    Args:
        nccl: the module.
        checked: makes a call of it, and raises RingcommError.
        comm: the communicator.
    """

    def __init__(self, nccl: Any, checked: Callable[..., Any], comm: Any) -> None:
        self._nccl, self._checked, self._comm = nccl, checked, comm

    def all_reduce(
        self, source: int, target: int, count: int, dtype: int, op: int, stream: int
    ) -> None:
        """See Communicator."""
        arguments = (source, target, count, dtype, op, self._comm, stream)
        self._checked("ncclAllReduce", self._nccl.all_reduce, *arguments)

    def reduce(
        self, source: int, target: int, count: int, dtype: int, op: int, root: int, stream: int
    ) -> None:
        """See Communicator."""
        arguments = (source, target, count, dtype, op, root, self._comm, stream)
        self._checked("ncclReduce", self._nccl.reduce, *arguments)

    def reduce_scatter(
        self, source: int, target: int, count: int, dtype: int, op: int, stream: int
    ) -> None:
        """See Communicator."""
        arguments = (source, target, count, dtype, op, self._comm, stream)
        self._checked("ncclReduceScatter", self._nccl.reduce_scatter, *arguments)

    def all_gather(self, source: int, target: int, count: int, dtype: int, stream: int) -> None:
        """See Communicator."""
        arguments = (source, target, count, dtype, self._comm, stream)
        self._checked("ncclAllGather", self._nccl.all_gather, *arguments)

    def broadcast(
        self, source: int, target: int, count: int, dtype: int, root: int, stream: int
    ) -> None:
        """See Communicator."""
        arguments = (source, target, count, dtype, root, self._comm, stream)
        self._checked("ncclBroadcast", self._nccl.broadcast, *arguments)

    def send(self, source: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """See Communicator."""
        self._checked("ncclSend", self._nccl.send, source, count, dtype, peer, self._comm, stream)

    def receive(self, target: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """See Communicator."""
        self._checked("ncclRecv", self._nccl.recv, target, count, dtype, peer, self._comm, stream)

    def begin_group(self) -> None:
        """See Communicator."""
        self._checked("ncclGroupStart", self._nccl.group_start)

    def end_group(self) -> None:
        """See Communicator."""
        self._checked("ncclGroupEnd", self._nccl.group_end)

    def abort(self) -> None:
        """See Communicator."""
        self._checked("ncclCommAbort", self._nccl.comm_abort, self._comm)

    def destroy(self) -> None:
        """See Communicator."""
        self._checked("ncclCommDestroy", self._nccl.comm_destroy, self._comm)
