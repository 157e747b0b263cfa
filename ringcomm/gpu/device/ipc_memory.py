"""GPU memory that the processes of a host map from each other."""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections import deque

from ringcomm.arrays.base import Span
from ringcomm.arrays.dtypes import DTYPES
from ringcomm.gpu.device.memory_allocator_and_address import NOWHERE, Address, Allocator, Memory

_BYTE = DTYPES["uint8"]
_GRAIN = 2 << 20  # bytes that the driver maps at once; exported allocations must not share them


class Regions:
    """Allocations of this process that can be exported.

    No allocation is freed before the process ends. The driver must not free memory that other
    processes may still map, and arrays outlive the engine that made them. So memory that is given
    back is kept for a later take(), once the streams have done what they had then been given: some
    may still use it for its former owner. A thread of its own waits for that. Who takes memory
    must not wait for streams, because these may wait for other ranks, which may wait for that take.
    """

    def __init__(self, device: Allocator) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._starts: list[tuple[int, int]] = []  # (address, serial number), ascending
        self._memories: dict[int, Memory] = {}
        self._exported: dict[int, bytes] = {}
        self._free: list[tuple[int, int]] = []  # (bytes, serial number), ascending
        self._returned: deque[int] = deque()  # __del__ adds to it, maybe while the lock is held
        self._waiter: threading.Thread | None = None  # waits for the streams

    def take(self, nbytes: int) -> Span:
        """Return memory; the last reference to the span's owner gives it back.

        Raises:
            MemoryError: the GPU has no room.
        """
        wanted = max(_GRAIN, -(-nbytes // _GRAIN) * _GRAIN)
        serial = self._take_kept(wanted) or self._take_new(wanted)
        return Span(self._memories[serial].address, nbytes, _BYTE, _Owner(self, serial))

    def _take_kept(self, wanted: int) -> int | None:
        with self._lock:
            at = bisect_right(self._free, (wanted, 0))
            is_kept = at < len(self._free) and self._free[at][0] <= 2 * wanted
            serial = self._free.pop(at)[1] if is_kept else None
            if self._returned and self._waiter is None:
                self._waiter = threading.Thread(
                    target=self._await_streams, name="ringcomm-gpu-memory", daemon=True
                )
                self._waiter.start()
            return serial

    def _take_new(self, wanted: int) -> int:
        try:
            with self._lock:
                return self._allocate(wanted)
        except MemoryError:
            for _ in range(2):  # what was given back last is maybe not yet waited for
                waiter = self._waiter
                if waiter is not None:
                    waiter.join()  # there is no other way to get memory
                serial = self._take_kept(wanted)
                if serial is not None:
                    return serial
            raise

    def _await_streams(self) -> None:
        """Let memory that was given back be taken again, once no stream uses it."""
        returned = [self._returned.popleft() for _ in range(len(self._returned))]
        is_unused = False
        try:
            with self._device.active():
                self._device.leave_captures_alone()
                self._device.synchronize()
            is_unused = True
        except Exception:  # noqa: BLE001 - of CUDA: a stream captures, or the GPU has failed
            self._returned.extend(returned)  # for the next take()
        with self._lock:
            for serial in returned if is_unused else ():
                insort(self._free, (self._memories[serial].nbytes, serial))
            self._waiter = None

    def find(self, span: Span) -> Address:
        """Return the address of a span for other processes; NOWHERE if it is not from take()."""
        with self._lock:
            at = bisect_right(self._starts, (span.address, 1 << 64)) - 1
            if at < 0:
                return NOWHERE
            start, serial = self._starts[at]
        memory = self._memories[serial]
        if span.end > start + memory.nbytes:
            return NOWHERE
        exported = self._exported.get(serial)
        if exported is None:  # costs a system call
            with self._device.active():
                exported = self._exported[serial] = self._device.export(memory)
        return Address(serial, span.address - start, exported)

    def _allocate(self, nbytes: int) -> int:
        with self._device.active():
            memory = self._device.allocate(nbytes)
        serial = len(self._memories) + 1
        self._memories[serial] = memory
        insort(self._starts, (memory.address, serial))
        return serial

    def give_back(self, serial: int) -> None:
        """Keep an allocation for a later take(). Takes no lock."""
        self._returned.append(serial)


class _Owner:
    """Gives an allocation back when the last reference to this object goes."""

    def __init__(self, regions: Regions, serial: int) -> None:
        self._regions = regions
        self._serial = serial

    def __del__(self) -> None:
        self._regions.give_back(self._serial)


class PeerMemory:
    """Memory of another rank, which this process maps on first use."""

    def __init__(self, device: Allocator) -> None:
        self._device = device
        self._mapped: dict[int, int] = {}

    def find(self, address: Address) -> int:
        """Return the address in this process."""
        start = self._mapped.get(address.region)
        if start is None:
            start = self._mapped[address.region] = self._device.map(address.exported)
        return start + address.offset

    def close(self) -> None:
        """Unmap everything."""
        for start in self._mapped.values():
            self._device.unmap(start)
        self._mapped.clear()
