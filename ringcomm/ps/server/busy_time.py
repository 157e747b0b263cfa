"""Measures how long a server works on requests, without the time in which it has no core.

`ringcomm top` tells by this a server that is slow by itself from one that the load makes slow.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import Final

from ringcomm._core import monotonic_ns

_LONG_NS: Final = 500_000  # a shorter time has hardly been interrupted


class OwnTime:
    """Sums the looks of the thread that drives this rank.

    Attributes:
        total_ns: so far.
    """

    def __init__(self) -> None:
        self.total_ns = 0
        self._thread = 0
        self._run_queue = _RunQueue()  # of that thread
        self._began_ns = self._ended_ns = 0
        self._waited_ns = 0  # for a core, by the thread, when the look began

    def begin(self) -> None:
        now_ns, thread = monotonic_ns(), threading.get_ident()
        if thread != self._thread:
            self._thread, self._run_queue = thread, _RunQueue()
            self._waited_ns = self._run_queue.waited_ns()
        elif now_ns - self._ended_ns > _LONG_NS:
            self._waited_ns = self._run_queue.waited_ns()
        self._began_ns = now_ns

    def end(self, *, has_found: bool) -> None:
        """Count the look; a short one only if it has found something to do."""
        self._ended_ns = monotonic_ns()
        duration_ns = self._ended_ns - self._began_ns
        if duration_ns > _LONG_NS:
            waited_ns = self._run_queue.waited_ns()
            duration_ns = max(duration_ns - (waited_ns - self._waited_ns), 0)
            self._waited_ns = waited_ns
        elif not has_found:
            return
        self.total_ns += duration_ns


class _RunQueue:
    """Knows how long the thread that made it was ready and had no core.

    It keeps the file open: an idle server looks each millisecond.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            # Not when Python ends: a colocated server still looks then.
            weakref.finalize(self, os.close, self._file).atexit = False

    def waited_ns(self) -> int:
        """Return that time so far; 0 where the kernel does not count."""
        return 0 if self._file is None else int(os.pread(self._file, 100, 0).split()[1])
