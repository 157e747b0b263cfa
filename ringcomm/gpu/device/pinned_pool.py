"""Blocks of host memory that a GPU can access, and that the ranks of the node share."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ringcomm.arrays.base import Bytes
from ringcomm.gpu.device.base import Device

PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")
_for_ever: list[Bytes] = []
_SMALLEST = 1 << 20  # bytes; registering memory of any size takes a millisecond


@dataclass(frozen=True)
class PinnedBlock:
    whole: Bytes
    nbytes: int  # the argument of take()

    @property
    def bytes(self) -> Bytes:
        return self.whole[: self.nbytes]


class HostPool:
    """Blocks that are registered with a GPU once and used many times.

    Args:
        device: the GPU.
        take: function that returns memory that the ranks of the node share, or None.
    """

    def __init__(self, device: Device, take: Callable[[int], Bytes | None]) -> None:
        self._device = device
        self._take = take
        self._lock = threading.Lock()
        self._free: dict[int, list[PinnedBlock]] = {}
        self._returned: deque[PinnedBlock] = (
            deque()
        )  # __del__ adds to it, maybe while the lock is held
        self._registered: set[int] = set()  # addresses of blocks
        self._all: list[Bytes] = []

    def take(self, nbytes: int) -> PinnedBlock:
        """Return uninitialised memory; calls no function of CUDA. Raises MemoryError."""
        size = max(_SMALLEST, 1 << max(nbytes - 1, 0).bit_length())
        with self._lock:
            while self._returned:
                given = self._returned.popleft()
                self._free.setdefault(given.whole.nbytes, []).append(given)
            kept = self._free.get(size)
            block = kept.pop() if kept else None
        if block is None:
            return self._new(size, nbytes)
        return PinnedBlock(block.whole, nbytes)

    def address(self, block: PinnedBlock) -> int:
        """Return the block's address on the GPU; registers a new block, which calls CUDA."""
        with self._lock:
            if block.whole.ctypes.data not in self._registered:
                self._registered.add(block.whole.ctypes.data)
                self._all.append(block.whole)
            return self._device.register(block.whole)

    def give_back(self, block: PinnedBlock) -> None:
        """Keep a block, which no stream uses any more, for a later take(). Takes no lock."""
        self._returned.append(block)

    def register(self, memory: Bytes) -> int:
        """Register whole pages of a caller until unregister() or close(); return their GPU address.

        Two callers may register the same pages at a time.
        """
        with self._lock:
            self._all.append(memory)
            return self._device.register(memory)

    def unregister(self, memory: Bytes) -> None:
        """Undo one register(); by now no stream of that caller may use the memory."""
        at = memory.ctypes.data
        with self._lock:
            users = [i for i, each in enumerate(self._all) if each.ctypes.data == at]
            del self._all[users[0]]
            if len(users) == 1:
                self._device.unregister(memory)

    def close(self, *, is_clean: bool) -> None:
        """Unregister all memory if `is_clean`: no stream uses it.

        Else the memory is never freed: no other memory may get its addresses.
        """
        if not is_clean:
            _for_ever.extend(self._all)
            return
        for memory in self._all:
            self._device.unregister(memory)

    def _new(self, size: int, nbytes: int) -> PinnedBlock:
        return PinnedBlock(whole_pages(size, self._take), nbytes)


def whole_pages(nbytes: int, take: Callable[[int], Bytes | None] = lambda _: None) -> Bytes:
    """Return memory of whole pages; memories that share a page cannot both be registered.

    Args:
        nbytes: a multiple of the page size.
        take: function that returns the memory; if it returns None, private memory is used.
    """
    taken = take(nbytes + PAGE_NBYTES)
    memory = np.empty(nbytes + PAGE_NBYTES, np.uint8) if taken is None else taken
    start = -memory.ctypes.data % PAGE_NBYTES
    return memory[start : start + nbytes]
