"""Blocks of host memory that a GPU can reach, and that the ranks of the node map."""

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
_SMALLEST = 1 << 20  # to register memory takes a millisecond, however little it is


@dataclass(frozen=True)
class Block:
    """Memory of a pool, until it is given back, and where the GPU finds it."""

    whole: Bytes
    nbytes: int
    address: int

    @property
    def bytes(self) -> Bytes:
        """The memory, as large as was asked for."""
        return self.whole[: self.nbytes]


class HostPool:
    """Blocks that are registered once and used again and again.

    Args:
        device: that reaches them.
        take: returns memory that the node shares, None where nothing is shared.
    """

    def __init__(self, device: Device, take: Callable[[int], Bytes | None]) -> None:
        self._device = device
        self._take = take
        self._lock = threading.Lock()
        self._free: dict[int, list[Block]] = {}
        self._returned: deque[Block] = deque()  # by __del__, which may run while the lock is held
        self._all: list[Bytes] = []

    def take(self, nbytes: int) -> Block:
        """Return memory of undefined content. Raises MemoryError."""
        size = max(_SMALLEST, 1 << max(nbytes - 1, 0).bit_length())
        with self._lock:
            while self._returned:
                given = self._returned.popleft()
                self._free.setdefault(given.whole.nbytes, []).append(given)
            kept = self._free.get(size)
            block = kept.pop() if kept else None
        if block is None:
            return self._new(size, nbytes)
        return Block(block.whole, nbytes, block.address)

    def give_back(self, block: Block) -> None:
        """Keep it for the next take(); no stream uses it any more. Takes no lock."""
        self._returned.append(block)

    def register(self, memory: Bytes) -> int:
        """Return where the GPU finds whole pages of somebody else, until unregister() or close().

        The same pages may be registered for a second user before the first one unregisters them.
        """
        with self._lock:
            self._all.append(memory)
            return self._device.register(memory)

    def unregister(self, memory: Bytes) -> None:
        """Undo one register(); no stream uses the memory for whom it was made."""
        at = memory.ctypes.data
        with self._lock:
            users = [i for i, each in enumerate(self._all) if each.ctypes.data == at]
            del self._all[users[0]]
            if len(users) == 1:
                self._device.unregister(memory)

    def close(self, *, is_clean: bool) -> None:
        """Unregister everything if `is_clean`: no stream uses it.

        Else it stays for ever: a registered address must not become that of other memory.
        """
        if not is_clean:
            _for_ever.extend(self._all)
            return
        for memory in self._all:
            self._device.unregister(memory)

    def _new(self, size: int, nbytes: int) -> Block:
        whole = whole_pages(self._take, size)
        address = self._device.register(whole)
        self._all.append(whole)
        return Block(whole, nbytes, address)


def whole_pages(take: Callable[[int], Bytes | None], nbytes: int) -> Bytes:
    """Return memory that begins and ends with a page: two that share one cannot be registered.

    Args:
        take: returns memory, or None if there is none of that kind; then it is ordinary memory.
        nbytes: a multiple of the size of a page.
    """
    taken = take(nbytes + PAGE_NBYTES)
    memory = np.empty(nbytes + PAGE_NBYTES, np.uint8) if taken is None else taken
    start = -memory.ctypes.data % PAGE_NBYTES
    return memory[start : start + nbytes]
