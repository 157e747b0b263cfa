"""GPU memory: its allocator, and its address as other processes find it. Pure."""

from __future__ import annotations

import struct
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Address:
    """The address of one rank's memory, as other ranks find it."""

    region: int  # serial number of the allocation, from 1 on; 0: other ranks cannot map it
    offset: int  # in bytes
    exported: bytes  # from Allocator.export()

    _FORMAT = struct.Struct("<QQB119s")
    NBYTES = _FORMAT.size

    def pack(self) -> bytes:
        return self._FORMAT.pack(self.region, self.offset, len(self.exported), self.exported)

    @classmethod
    def unpack(cls, packed: bytes) -> Address:
        region, offset, length, exported = cls._FORMAT.unpack(packed)
        return cls(region, offset, exported[:length])


NOWHERE = Address(0, 0, b"")


@dataclass(frozen=True)
class Memory:
    """An allocation of GPU memory, which can be exported as a whole."""

    address: int
    nbytes: int


class Allocator(Protocol):
    """The memory of a GPU. Any thread may call the methods inside `with active()`."""

    def active(self) -> AbstractContextManager[object]:
        """Return a context in which the calling thread uses this GPU."""

    def allocate(self, nbytes: int) -> Memory:
        """Return memory. Raises MemoryError."""

    def export(self, memory: Memory) -> bytes:
        """Return the bytes with which other processes of this host map `memory`."""

    def map(self, exported: bytes) -> int: ...

    def unmap(self, address: int) -> None: ...

    def finish(self, stream: int) -> None:
        """Wait until the stream's work so far is done; leaves captures of other streams alone.

        Raises RingcommError if the stream captures a CUDA graph.
        """

    def leave_captures_alone(self) -> None:
        """Keep calls of this thread from ending the capture of a CUDA graph by another thread."""
