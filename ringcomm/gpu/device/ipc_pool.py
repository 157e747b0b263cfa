"""GPU memory that other processes of the host can map, used again and again; and theirs."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from collections import deque
from dataclasses import dataclass

from ringcomm.arrays.base import Span
from ringcomm.arrays.dtypes import DTYPES
from ringcomm.gpu.device.memory import NOWHERE, Address, Allocator, Memory

_BYTE = DTYPES["uint8"]
_GRAIN = 2 << 20  # bytes that the driver maps at once; exported allocations must not share them
_PER_THREAD = 2  # CUDA's handle of a stream that is another one in each thread


@dataclass(slots=True, eq=False)
class _Use:
    """One owner's use of an allocation."""

    stream: int | None  # may still use the memory after it is given back; None: none does
    keeps: object  # keeps that stream alive


class Regions:
    """Allocations of this process that can be exported.

    No allocation is freed before the process ends. The driver must not free memory that other
    processes may still map, and arrays outlive the engine that made them. So memory that is given
    back is kept for a later take(). Its stream may still use it for its former owner. A take() for
    that stream may have it at once, since what it then does with the memory comes later on the
    stream. For other streams a thread waits until the stream is through. Who takes memory must not
    wait for streams, because these may wait for other ranks, which may wait for that take.
    """

    def __init__(self, device: Allocator) -> None:
        self._device = device
        self._lock = threading.Condition(threading.Lock())  # notified when a waiter ends
        self._starts: list[tuple[int, int]] = []  # (address, serial number), ascending
        self._memories: dict[int, Memory] = {}
        self._exported: dict[int, bytes] = {}
        self._free: list[tuple[int, int]] = []  # (bytes, serial number), ascending
        self._uses: dict[int, _Use] = {}  # the present or last one, by serial number
        self._returned: deque[int] = deque()  # __del__ adds to it, maybe while the lock is held
        self._waiting: set[int] = set()  # streams for which threads wait

    def take(self, nbytes: int, stream: int | None, keeps: object = None) -> Span:
        """Return memory; the last reference to the span's owner gives it back.

        Args:
            nbytes: the size.
            stream: the only stream that may still use the memory when it is given back; None: no
                stream does.
            keeps: object that keeps the stream alive, until forget_stream().

        Raises:
            MemoryError: the GPU has no room.
        """
        wanted = max(_GRAIN, -(-nbytes // _GRAIN) * _GRAIN)
        use = _Use(-threading.get_ident() if stream == _PER_THREAD else stream, keeps)
        serial = self._take_kept(wanted, use) or self._take_new(wanted, use)
        return Span(self._memories[serial].address, nbytes, _BYTE, _Owner(self, serial))

    def forget_stream(self, stream: int) -> None:
        """Note that the work of a stream is done, and that it is about to be freed."""
        with self._lock:
            for use in self._uses.values():
                if use.stream == stream:
                    use.stream = None

    def _take_kept(self, wanted: int, use: _Use, *, waits: bool = False) -> int | None:
        """Return the number of an allocation that was given back, None if there is none to take.

        `waits`: blocks as long as there may be one soon.
        """
        with self._lock:
            found = self._find_kept(wanted, use)
            while waits and found is None and self._waiting:
                self._lock.wait()
                found = self._find_kept(wanted, use, begins=False)
            if found is None:
                return None
            former, self._uses[found] = self._uses[found], use
        del former  # without the lock: a stream that is dropped may call anything
        return found

    def _find_kept(self, wanted: int, use: _Use, *, begins: bool = True) -> int | None:
        while self._returned:
            serial = self._returned.popleft()
            insort(self._free, (self._memories[serial].nbytes, serial))
        start = bisect_left(self._free, (wanted, 0))
        fitting = [each for each in self._free[start:] if each[0] <= 2 * wanted]
        for nbytes, serial in fitting:
            if self._uses[serial].stream in (None, use.stream):
                self._free.remove((nbytes, serial))
                return serial
        if begins:
            self._begin_to_wait([self._uses[serial] for _, serial in fitting])
        return None

    def _take_new(self, wanted: int, use: _Use) -> int:
        try:
            with self._lock:
                return self._allocate(wanted, use)
        except MemoryError:
            kept = self._take_kept(wanted, use, waits=True)  # there is no other way to get memory
            if kept is None:
                raise
            return kept

    def _begin_to_wait(self, uses: list[_Use]) -> None:
        """Let memory that was given back be taken for any stream, once its own is through."""
        streams = {use.stream for use in uses if use.stream is not None and use.stream >= 0}
        for stream in streams - self._waiting:
            self._waiting.add(stream)
            mine = [use for use in uses if use.stream == stream]
            threading.Thread(
                target=self._wait, args=(stream, mine), name="ringcomm-gpu-memory", daemon=True
            ).start()

    def _wait(self, stream: int, uses: list[_Use]) -> None:
        try:
            with self._device.active():
                self._device.leave_captures_alone()
                self._device.finish(stream)
        except Exception:  # noqa: BLE001 - of CUDA: the stream captures, or the GPU has failed
            uses = []  # the next take() tries again
        with self._lock:
            for use in uses:
                use.stream = None
            self._waiting.remove(stream)
            self._lock.notify_all()

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

    def _allocate(self, nbytes: int, use: _Use) -> int:
        with self._device.active():
            memory = self._device.allocate(nbytes)
        serial = len(self._memories) + 1
        self._memories[serial], self._uses[serial] = memory, use
        insort(self._starts, (memory.address, serial))
        return serial

    def give_back(self, serial: int) -> None:
        """Keep an allocation for a later take(). Takes no lock."""
        self._returned.append(serial)


class _Owner:
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
        start = self._mapped.get(address.region)
        if start is None:
            start = self._mapped[address.region] = self._device.map(address.exported)
        return start + address.offset

    def close(self) -> None:
        for start in self._mapped.values():
            self._device.unmap(start)
        self._mapped.clear()
