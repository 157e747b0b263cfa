"""GPU memory of this process that other processes of its host can map, and theirs in this one."""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections import deque

from ringcomm.arrays.base import Span
from ringcomm.arrays.dtypes import DTYPES
from ringcomm.gpu.device.memory import NOWHERE, Address, Allocator, Memory

_BYTE = DTYPES["uint8"]
_GRAIN = 2 << 20  # what the driver maps at once; exported allocations cannot share it


class Regions:
    """Allocations of this process that can be exported.

    What is given back is kept for the next allocation, for as long as the process lives: the driver
    must not free what others may still map, and arrays outlive the engine that made them.

    Args:
        device: whose memory it is.
    """

    def __init__(self, device: Allocator) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._starts: list[tuple[int, int]] = []  # (address, serial number), ascending
        self._memories: dict[int, Memory] = {}
        self._exported: dict[int, bytes] = {}
        self._free: list[tuple[int, int]] = []  # (bytes, serial number), ascending
        self._returned: deque[int] = deque()  # by __del__, which may run while the lock is held

    def take(self, nbytes: int) -> Span:
        """Return memory of its own; it is given back with the last reference to its owner.

        Raises:
            MemoryError: the GPU has no room.
        """
        wanted = max(_GRAIN, -(-nbytes // _GRAIN) * _GRAIN)
        with self._lock:
            while self._returned:
                serial = self._returned.popleft()
                insort(self._free, (self._memories[serial].nbytes, serial))
            at = bisect_right(self._free, (wanted, 0))
            is_kept = at < len(self._free) and self._free[at][0] <= 2 * wanted
            serial = self._free.pop(at)[1] if is_kept else self._allocate(wanted)
        if is_kept:
            self._device.synchronize()  # a stream may still use it for what it was before
        return Span(self._memories[serial].address, nbytes, _BYTE, _Owner(self, serial))

    def find(self, span: Span) -> Address:
        """Return where others find this memory, NOWHERE if they cannot."""
        with self._lock:
            at = bisect_right(self._starts, (span.address, 1 << 64)) - 1
            if at < 0:
                return NOWHERE
            start, serial = self._starts[at]
        memory = self._memories[serial]
        if span.end > start + memory.nbytes:
            return NOWHERE
        return Address(serial, span.address - start, self._export(serial))

    def _export(self, serial: int) -> bytes:
        """Return what others map this allocation by; the first time it costs a system call."""
        exported = self._exported.get(serial)
        if exported is None:
            with self._device.active():
                exported = self._device.export(self._memories[serial])
            self._exported[serial] = exported
        return exported

    def _allocate(self, nbytes: int) -> int:
        with self._device.active():
            memory = self._device.allocate(nbytes)
        serial = len(self._memories) + 1
        self._memories[serial] = memory
        insort(self._starts, (memory.address, serial))
        return serial

    def give_back(self, serial: int) -> None:
        """Keep an allocation for the next take(); takes no lock."""
        self._returned.append(serial)


class _Owner:
    """Owns an allocation."""

    def __init__(self, regions: Regions, serial: int) -> None:
        self._regions = regions
        self._serial = serial

    def __del__(self) -> None:
        self._regions.give_back(self._serial)


class Neighbour:
    """Memory of another rank, mapped by this process's device on first use."""

    def __init__(self, device: Allocator) -> None:
        self._device = device
        self._mapped: dict[int, int] = {}

    def find(self, address: Address) -> int:
        """Return its address in this process."""
        start = self._mapped.get(address.region)
        if start is None:
            start = self._mapped[address.region] = self._device.map(address.exported)
        return start + address.offset

    def close(self) -> None:
        """Unmap everything."""
        for start in self._mapped.values():
            self._device.unmap(start)
        self._mapped.clear()
