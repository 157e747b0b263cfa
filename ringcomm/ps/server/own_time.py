"""Measures how long a server works on requests, without the time in which it has no core.

`ringcomm top` tells by this a server that is slow by itself from one that the load makes slow.
"""

from __future__ import annotations

import threading
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
        self._began_ns = self._ended_ns = 0
        self._waited_ns = 0  # for a core, by the thread, when the look began

    def begin(self) -> None:
        """Note that a look begins."""
        now_ns, thread = monotonic_ns(), threading.get_ident()
        if now_ns - self._ended_ns > _LONG_NS or thread != self._thread:
            self._waited_ns = _time_in_run_queue()
        self._began_ns, self._thread = now_ns, thread

    def end(self, *, has_found: bool) -> None:
        """Count the look; a short one only if it has found something to do."""
        self._ended_ns = monotonic_ns()
        duration_ns = self._ended_ns - self._began_ns
        if duration_ns > _LONG_NS:
            waited_ns = _time_in_run_queue()
            duration_ns = max(duration_ns - (waited_ns - self._waited_ns), 0)
            self._waited_ns = waited_ns
        elif not has_found:
            return
        self.total_ns += duration_ns


def _time_in_run_queue() -> int:
    """Return how long this thread was ready and had no core; 0 where the kernel does not count."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            return int(file.read().split()[1])
    except OSError:
        return 0
