"""The operations of a rank over time, as a Chrome trace that Perfetto (ui.perfetto.dev) loads.

The file is a JSON array with one object per line. Each is written by one call, and the format needs
no closing bracket, so the file of a killed rank, which has none, can be read as well. Times are
microseconds of the host's wall clock.

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

from ringcomm.system_text import host_name
from ringcomm.transport.membership.view import View

_log = logging.getLogger("ringcomm")

PHASES = ("negotiation", "wait", "reduce", "copy")


class Lane:
    """The row of the timeline that shows one operation; operations in flight have a row each."""

    def __init__(self, timeline: Timeline, number: int) -> None:
        self._timeline = timeline
        self.number = number

    def end(self, outcome: str) -> None:
        """Record that the operation is "done", "refused", a "mismatch" or "failed"."""
        self._timeline.write("E", self.number, args={"outcome": outcome})
        self._timeline.free(self.number)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self.span(name, begin_ns, time.monotonic_ns())

    def span(self, name: str, begin_ns: int, end_ns: int) -> None:
        """Record one of PHASES that lasted from begin_ns to end_ns of time.monotonic_ns()."""
        fields = {"name": name, "cat": "phase", "dur": (end_ns - begin_ns) / 1000}
        self._timeline.write("X", self.number, begin_ns, **fields)


class Timeline:
    """The trace of one rank, in the file `<prefix>.<rank>.json`, which is replaced.

    If the job has lost ranks and gone on, the file is `<prefix>.<rank at first>.view<n>.json`.
    Raises OSError if the file cannot be made; its folder must exist.
    """

    def __init__(self, prefix: str | os.PathLike[str], rank: int, view: View | None = None) -> None:
        name = f"{rank}.json"
        if view is not None and view.number:
            name = f"{view.members[rank]}.view{view.number}.json"
        self.path = f"{os.fspath(prefix)}.{name}"
        self._rank = rank
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)  # it may be the link of another user
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(self.path, flags, 0o644)
        self._lock = threading.Lock()
        self._n_lanes = 0
        self._free: list[int] = []  # numbers of the free lanes, a heap
        self._offset_ns = time.time_ns() - time.monotonic_ns()
        self._before = "[\n"  # what separates the next event from what is there
        host = host_name()
        self.write("M", 0, name="process_name", args={"name": f"rank {rank}", "host": host})

    def begin(self, label: str, nbytes: int, **facts: str) -> Lane:
        """Record that an operation begins; Perfetto shows one without an end as unfinished.

        Args:
            label: of the operation.
            nbytes: of its payload.
            facts: "shape", as "float32[6, 2]", and "at", as "train.py:12", as far as they are
                known.
        """
        with self._lock:
            if self._free:
                number = heapq.heappop(self._free)
            else:
                number = self._n_lanes
                self._n_lanes += 1
        kind = label.partition("[")[0].partition(" ")[0]
        self.write("B", number, name=label, cat=kind, args={"nbytes": nbytes, **facts})
        return Lane(self, number)

    def free(self, number: int) -> None:
        with self._lock:
            heapq.heappush(self._free, number)

    @property
    def is_open(self) -> bool:
        """False once it has been closed, or a full disk has ended it."""
        return self._fd >= 0

    def close(self) -> None:
        """Close the array and the file; later events are dropped."""
        with self._lock:
            if self._fd >= 0:
                with contextlib.suppress(OSError):  # as on a full disk
                    os.write(self._fd, b"\n]\n")
                os.close(self._fd)
            self._fd = -1

    def write(self, phase: str, lane: int, at_ns: int | None = None, **fields: Any) -> None:
        """Write an event of the trace format; at_ns: its time.monotonic_ns(), None for now."""
        now_ns = time.monotonic_ns() if at_ns is None else at_ns
        at_us = (now_ns + self._offset_ns) / 1000
        event = {"pid": self._rank, "tid": lane, "ph": phase, "ts": at_us, **fields}
        text = json.dumps(event)
        try:
            with self._lock:
                if self._fd >= 0:
                    os.write(self._fd, (self._before + text).encode())
                    self._before = ",\n"
        except OSError as error:
            self.close()
            _log.warning("the timeline ends here: %s: %s. Training goes on", self.path, error)


def timeline_of(prefix: str, rank: int, view: View) -> Timeline | None:
    """Return the timeline of a rank in a view, None if there is to be none.

    In a view that follows, a file that cannot be made is a warning: an error would end this rank.

    Raises:
        OSError: the file cannot be made, as the job begins.
    """
    if not prefix:
        return None
    try:
        return Timeline(prefix, rank, view)
    except OSError as error:
        if view.number == 0:
            raise
        _log.warning("view %d has no timeline here: %s. Training goes on", view.number, error)
        return None
