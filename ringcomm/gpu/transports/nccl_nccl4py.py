"""NCCL as nccl4py binds it; written for 0.6."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from ringcomm.config import environment
from ringcomm.errors import ConfigError, RingcommError
from ringcomm.gpu.transports.nccl import SHARES_FROM, Communicator
from ringcomm.nvidia.presence import Nccl, nccl_paths, nccl_problem
from ringcomm.nvidia.probing import loaded, probe

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

    def call(self, function: str, *arguments: int) -> None:
        """See Communicator. ncclAllReduce is all_reduce, ncclCommAbort is comm_abort."""
        name = re.sub(r"\B(?=[A-Z])", "_", function.removeprefix("nccl")).lower()
        has_comm = () if "Group" in function else (self._comm,)
        passed = (*arguments[:-1], *has_comm, *arguments[-1:])  # the stream is the last
        self._checked(function, getattr(self._nccl, name), *passed)
