"""NCCL through cupy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from cupy.cuda import nccl

from ringcomm.config import environment
from ringcomm.errors import RingcommError
from ringcomm.gpu.transports.nccl_base import Communicator
from ringcomm.nvidia.find_software import probe
from ringcomm.nvidia.judge_software import require_nccl

_SHARES_FROM: Final = 23000  # ranks may share a GPU; experimental, needs NCCL_NVLS_ENABLE=0
# cupy raises KeyError for an error code for which it has no name.
_ERRORS: Final = (nccl.NcclError, KeyError)


class CupyNccl:
    """The NcclBinding of cupy.cuda.nccl.

    Raises:
        ConfigError: NCCL cannot be used; the text says why.
    """

    def __init__(self) -> None:
        stack = probe()
        require_nccl(stack)
        is_wanted = environment().get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        self.version = stack.nccl.version
        self.shares_gpus = is_wanted and self.version >= _SHARES_FROM

    def unique_id(self) -> bytes:
        return bytes(_checked("ncclGetUniqueId", nccl.get_unique_id))

    def connect(self, unique_id: bytes, rank: int, size: int) -> Communicator:
        """See NcclBinding.

        The communicator blocks: cupy 14 binds ncclCommInitRank, but not ncclCommInitRankConfig, of
        which blocking=0 would let the connecting thread poll with a deadline and abort. So nothing
        can be aborted before this returns; see transport_setup.py::_Connecting.
        """
        comm = _checked("ncclCommInitRank", nccl.NcclCommunicator, size, unique_id, rank)

        def call(function: str, *arguments: int) -> None:
            owner = nccl if "Group" in function else comm
            # ncclAllReduce is comm.allReduce, ncclCommAbort is comm.abort.
            name = function.removeprefix("nccl").removeprefix("Comm")
            _checked(function, getattr(owner, name[0].lower() + name[1:]), *arguments)

        return call


def _checked(function: str, call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except _ERRORS as error:
        raise RingcommError(
            f"{function} failed: {error}. NCCL_DEBUG=WARN in the environment says more"
        ) from error
