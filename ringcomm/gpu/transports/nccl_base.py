"""The base of the Python bindings of NCCL."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final, Protocol

from ringcomm.config import environment
from ringcomm.errors import RingcommError

SHARES_FROM: Final = 23000  # ranks may share a GPU; experimental, needs NCCL_NVLS_ENABLE=0


class Communicator(Protocol):
    """One rank's end of a communicator."""

    def __call__(self, function: str, *arguments: int) -> None:
        """Call a function of NCCL such as "ncclAllReduce".

        Args:
            function: the name. All functions but ncclCommAbort and ncclCommDestroy enqueue work on
                a stream and return.
            arguments: the function's arguments, without the communicator.

        Raises:
            RingcommError: NCCL reports an error.
        """


class NcclBinding(ABC):
    """A Python binding of NCCL.

    Args:
        version: NCCL's version, such as 22703.
        errors: exceptions that the binding raises if NCCL reports an error.

    Attributes:
        version: NCCL's version.
        shares_gpus: several ranks of a communicator may use one GPU.
    """

    def __init__(self, version: int, *errors: type[Exception]) -> None:
        is_wanted = environment().get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        self.version = version
        self.shares_gpus = is_wanted and version >= SHARES_FROM
        self._errors = errors

    @abstractmethod
    def unique_id(self) -> bytes:
        """Return the id of a new communicator, which all its ranks need. See ncclGetUniqueId."""

    @abstractmethod
    def connect(self, unique_id: bytes, rank: int, size: int) -> Communicator:
        """Return a communicator; blocks until all ranks call this. See ncclCommInitRank.

        Raises:
            RingcommError: NCCL reports an error.
        """

    def _checked(self, function: str, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except self._errors as error:
            raise RingcommError(
                f"{function} failed: {error}. NCCL_DEBUG=WARN in the environment says more"
            ) from error
