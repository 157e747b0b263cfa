"""NCCL through nccl4py; written for version 0.6."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from typing import Any, Final

from ringcomm.errors import ConfigError
from ringcomm.gpu.transports.nccl_base import Communicator, NcclBinding
from ringcomm.nvidia.find_software import loaded, probe
from ringcomm.nvidia.judge_software import Nccl, nccl_paths, require_nccl

_ID_NBYTES: Final = 128  # NCCL_UNIQUE_ID_BYTES


class Nccl4py(NcclBinding):
    """The binding nccl.bindings.

    Raises:
        ConfigError: NCCL cannot be used; the text says why.
    """

    def __init__(self) -> None:
        stack = probe()
        try:
            from nccl.bindings import nccl

            version: int = nccl.get_version()
        except Exception as error:  # NCCLError, or an error of the module that loads libnccl
            raise ConfigError(
                f"RINGCOMM_NCCL is nccl4py, which cannot be used ({error}): pip install nccl4py "
                "cuda-bindings, or set RINGCOMM_NCCL to cupy"
            ) from error
        found = Nccl(version=version, paths=nccl_paths(loaded()))
        require_nccl(replace(stack, nccl=found))
        super().__init__(version, nccl.NCCLError)
        self._nccl: Any = nccl

    def unique_id(self) -> bytes:
        """See NcclBinding."""
        made = self._checked("ncclGetUniqueId", self._nccl.get_unique_id)
        return ctypes.string_at(made.ptr, _ID_NBYTES)

    def connect(self, unique_id: bytes, rank: int, size: int) -> Communicator:
        """See NcclBinding."""
        nccl = self._nccl
        # This form of ncclCommInitRank takes several ids, here 1. The 0 means no configuration.
        arguments = (size, rank, 1, bytearray(unique_id), 0)
        comm = self._checked("ncclCommInitRank", nccl.comm_init_rank_scalable, *arguments)

        def call(function: str, *arguments: int) -> None:
            # ncclAllReduce is all_reduce, ncclCommAbort is comm_abort.
            name = re.sub(r"\B(?=[A-Z])", "_", function.removeprefix("nccl")).lower()
            comms = () if "Group" in function else (comm,)
            passed = (*arguments[:-1], *comms, *arguments[-1:])  # the stream, if any, is the last
            self._checked(function, getattr(nccl, name), *passed)

        return call
