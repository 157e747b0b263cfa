"""The wire as a server needs it: a Link, or that of a home, of which there is another copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.placement.partition_places_and_moves import Partition
    from ringcomm.ps.protocol.frames import Header
    from ringcomm.ps.protocol.memory_for_bodies import MemoryForBodies
    from ringcomm.ps.server.dense.partition import DensePartition


class Wire(Protocol):
    """Sends frames; see Link for each method."""

    @property
    def may_read(self) -> bool: ...  # noqa: D102
    @property
    def carried_out(self) -> tuple[int, int]: ...  # noqa: D102
    @property
    def n_queued(self) -> int: ...  # noqa: D102
    @property
    def memory_for_bodies(self) -> MemoryForBodies: ...  # noqa: D102
    def send(self, dest: int, header: Header, meta: bytes = ..., body: Bytes = ...) -> None: ...  # noqa: D102
    def shares_memory(self, rank: int) -> bool: ...  # noqa: D102
    def place_of(self, x: Bytes) -> int: ...  # noqa: D102
    def view(self, rank: int, place: int, nbytes: int) -> Bytes: ...  # noqa: D102
    def open(self, partition: Partition, epoch: int, part: DensePartition) -> None: ...  # noqa: D102
    def close(self, partition: Partition) -> None: ...  # noqa: D102
