"""GPU memory: what allocates it, and its address as other processes find it. Pure."""

from __future__ import annotations

import struct
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from ringcomm.arrays.base import Span


@dataclass(frozen=True)
class Address:
    """The place of one rank's memory, as another can find it."""

    region: int  # serial number of the allocation, from 1 on; 0: it cannot be reached
    offset: int  # in bytes
    exported: bytes  # what maps the allocation

    _FORMAT = struct.Struct("<QQB119s")
    NBYTES = _FORMAT.size

    def pack(self) -> bytes:
        """Return 136 bytes."""
        return self._FORMAT.pack(self.region, self.offset, len(self.exported), self.exported)

    @classmethod
    def unpack(cls, packed: bytes) -> Address:
        """Read them."""
        region, offset, length, exported = cls._FORMAT.unpack(packed)
        return cls(region, offset, exported[:length])


NOWHERE = Address(0, 0, b"")


@dataclass(frozen=True)
class Memory:
    """Memory of a GPU that is its own allocation, so that it can be exported to other processes."""

    address: int
    nbytes: int


class MappableMemory(Protocol):
    """Memory of a GPU that other processes can map."""

    def take(self, nbytes: int) -> Span:
        """Return memory, which is used again once its owner is gone. Raises MemoryError."""

    def find(self, span: Span) -> Address:
        """Return where others find this memory, NOWHERE if they cannot."""


class Allocator(Protocol):
    """A GPU's memory. Any thread may call, inside `with active()`."""

    def active(self) -> AbstractContextManager[object]:
        """Return a context in which this is the calling thread's GPU."""

    def allocate(self, nbytes: int) -> Memory:
        """Return memory. Raises MemoryError."""

    def export(self, memory: Memory) -> bytes:
        """Return what other processes of this host need to map `memory`."""

    def map(self, exported: bytes) -> int:
        """Return the address at which this process maps memory of another one."""

    def unmap(self, address: int) -> None:
        """Give it back."""

    def synchronize(self) -> None:
        """Return once everything is done that any stream has been given."""
