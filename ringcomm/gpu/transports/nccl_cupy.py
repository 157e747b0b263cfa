"""NCCL through cupy."""

from __future__ import annotations

from cupy.cuda import nccl

from ringcomm.gpu.transports.nccl_base import Communicator, NcclBinding
from ringcomm.nvidia.find_software import probe
from ringcomm.nvidia.judge_software import require_nccl


class CupyNccl(NcclBinding):
    """The binding cupy.cuda.nccl.

    Raises:
        ConfigError: NCCL cannot be used; the text says why.
    """

    def __init__(self) -> None:
        stack = probe()
        require_nccl(stack)
        # cupy raises KeyError for an error code for which it has no name.
        super().__init__(stack.nccl.version, nccl.NcclError, KeyError)

    def unique_id(self) -> bytes:
        """See NcclBinding."""
        return bytes(self._checked("ncclGetUniqueId", nccl.get_unique_id))

    def connect(self, unique_id: bytes, rank: int, size: int) -> Communicator:
        """See NcclBinding."""
        comm = self._checked("ncclCommInitRank", nccl.NcclCommunicator, size, unique_id, rank)

        def call(function: str, *arguments: int) -> None:
            owner = nccl if "Group" in function else comm
            # ncclAllReduce is comm.allReduce, ncclCommAbort is comm.abort.
            name = function.removeprefix("nccl").removeprefix("Comm")
            self._checked(function, getattr(owner, name[0].lower() + name[1:]), *arguments)

        return call
