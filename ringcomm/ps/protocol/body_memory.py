"""Memory of bodies that travel as messages, used again: new pages cost as much time as the wire."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes

KEPT_NBYTES: Final = 64 << 20  # of memory that nobody uses, in a process
_LEAST: Final = 128 << 10  # malloc has pages for less
_CACHE_LINE: Final = 64


class MemoryForBodies:
    """Gives memory, and takes it back once no array has it any more; any thread."""

    def __init__(self) -> None:
        # By size, of which there is some; the size that came back last is last.
        self._free: dict[int, list[Bytes]] = {}
        self._nbytes = 0
        self._lock = threading.Lock()
        # An array may end in the midst of a change of `_free`, where the garbage collector runs.
        self._ended: deque[Bytes] = deque()

    def take(self, nbytes: int) -> Bytes:
        """Return memory that holds anything, aligned as shared memory is."""
        if nbytes < _LEAST:
            return np.empty(nbytes, np.uint8)
        with self._lock:
            self._keep_ended()
            kept = self._free.get(nbytes)
            raw = kept.pop() if kept else None
            if raw is not None:
                self._nbytes -= nbytes
            if not kept:
                self._free.pop(nbytes, None)
        if raw is None:
            raw = np.empty(nbytes + _CACHE_LINE, np.uint8)
            start = -raw.ctypes.data % _CACHE_LINE
            raw = raw[start : start + nbytes]
        return np.asarray(_Lent(raw, self._take_back))

    def _take_back(self, raw: Bytes) -> None:
        self._ended.append(raw)
        while self._ended and self._lock.acquire(blocking=False):  # else who has it keeps it
            try:
                self._keep_ended()
            finally:
                self._lock.release()

    def _keep_ended(self) -> None:
        """Keep what has ended, up to the limit; with the lock."""
        while self._ended:
            raw = self._ended.popleft()
            self._free[raw.nbytes] = [*self._free.pop(raw.nbytes, ()), raw]
            self._nbytes += raw.nbytes
            while self._nbytes > KEPT_NBYTES:
                size = next(iter(self._free))
                self._free[size].pop()
                self._nbytes -= size
                if not self._free[size]:
                    del self._free[size]


class _Lent:
    """The base of all arrays that have a piece of memory: it ends with the last of them."""

    __slots__ = ("__array_interface__", "_raw", "_take_back")

    def __init__(self, raw: Bytes, take_back: Callable[[Bytes], None]) -> None:
        self.__array_interface__ = raw.__array_interface__
        self._raw, self._take_back = raw, take_back

    def __del__(self) -> None:
        self._take_back(self._raw)
