"""The interface to NCCL."""

from __future__ import annotations

from typing import Protocol


class Communicator(Protocol):
    def __call__(self, function: str, *arguments: int) -> None:
        """Call a function of NCCL such as "ncclAllReduce".

        Args:
            function: the name. All functions but ncclCommAbort and ncclCommDestroy enqueue work on
                a stream and return.
            arguments: the function's arguments, without the communicator.

        Raises:
            RingcommError: NCCL reports an error.
        """


class NcclBinding(Protocol):
    """A Python binding of NCCL.

    Attributes:
        version: NCCL's version, such as 22703.
        shares_gpus: several ranks of a communicator may use one GPU.
    """

    version: int
    shares_gpus: bool

    def unique_id(self) -> bytes:
        """Return the id of a new communicator, which all its ranks need. See ncclGetUniqueId."""
        ...

    def connect(self, unique_id: bytes, rank: int, size: int) -> Communicator:
        """Return a communicator; blocks until all ranks call this. See ncclCommInitRank.

        Raises:
            RingcommError: NCCL reports an error.
        """
        ...
