"""The operations of a rank in time, as a Chrome trace that Perfetto (ui.perfetto.dev) loads.

One JSON object per line after an opening bracket, as the format allows: no closing bracket is
needed, and each line is written at once and whole, so what a killed rank leaves can be read. Times
are microseconds of the host's wall clock.

Source: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import contextlib
import heapq
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

_log = logging.getLogger("ringcomm")

PHASES = ("negotiation", "wait", "reduce", "copy")


class Lane:
    """One operation on the timeline: a row of its own, for others may be in flight."""

    def __init__(self, timeline: Timeline, number: int) -> None:
        self._timeline = timeline
        self.number = number

    def end(self, outcome: str) -> None:
        """Record that the operation is "done", "refused", a "mismatch" or "failed"."""
        self._timeline.end(self.number, outcome)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the block as one of PHASES within the operation."""
        begin_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self.span(name, begin_ns, time.monotonic_ns())

    def span(self, name: str, begin_ns: int, end_ns: int) -> None:
        """Record one of PHASES that is over; see time.monotonic_ns()."""
        self._timeline.span(self.number, name, begin_ns, end_ns)


class Timeline:
    """The trace of one rank.

    Args:
        prefix: the file is `<prefix>.<rank>.json`, overwritten; its folder must exist.
        rank: of this process.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, prefix: str | os.PathLike[str], rank: int) -> None:
        self.path = f"{os.fspath(prefix)}.{rank}.json"
        self._rank = rank
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(self.path, flags, 0o644)
        self._lock = threading.Lock()
        self._n_lanes = 0
        self._free: list[int] = []  # lanes, as a heap
        self._offset_ns = time.time_ns() - time.monotonic_ns()
        os.write(self._fd, b"[\n")
        self._write({"name": "process_name", "ph": "M", "args": {"name": f"rank {rank}"}})

    def begin(self, label: str, nbytes: int) -> Lane:
        """Record that an operation begins; one that never ends is shown as unfinished."""
        with self._lock:
            if self._free:
                number = heapq.heappop(self._free)
            else:
                number = self._n_lanes
                self._n_lanes += 1
        kind = label.partition("[")[0].partition(" ")[0]
        event = {"name": label, "cat": kind, "ph": "B", "args": {"nbytes": nbytes}}
        self._write(event | {"ts": self._us(), "tid": number})
        return Lane(self, number)

    def end(self, lane: int, outcome: str) -> None:
        """Record the end of what a lane shows, and use the lane again."""
        self._write({"ph": "E", "ts": self._us(), "tid": lane, "args": {"outcome": outcome}})
        with self._lock:
            heapq.heappush(self._free, lane)

    def span(self, lane: int, name: str, begin_ns: int, end_ns: int) -> None:
        """Record a phase between two times of time.monotonic_ns()."""
        event = {"name": name, "cat": "phase", "ph": "X", "ts": self._us(begin_ns), "tid": lane}
        self._write(event | {"dur": (end_ns - begin_ns) / 1000})

    def _us(self, monotonic_ns: int | None = None) -> float:
        """Return microseconds of the host's wall clock, which never runs backwards here."""
        now = time.monotonic_ns() if monotonic_ns is None else monotonic_ns
        return (now + self._offset_ns) / 1000

    def close(self) -> None:
        """Write nothing more."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1

    def _write(self, event: dict[str, Any]) -> None:
        line = json.dumps({"pid": self._rank, "tid": 0} | event) + ",\n"
        try:
            with self._lock:
                if self._fd >= 0:
                    os.write(self._fd, line.encode())
        except OSError as error:
            self.close()
            _log.warning("the timeline ends here: %s: %s. Training goes on", self.path, error)
