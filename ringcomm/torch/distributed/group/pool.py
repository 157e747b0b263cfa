"""Threads for callbacks that may block: as many as there are callbacks at work."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

_IDLE_S = 5.0  # how long a thread waits for more work before it ends

Job = Callable[[], object]


class ElasticPool:
    """Runs each job at once, in a thread that no other job occupies.

    A pool of n threads dead-locks when n jobs wait for what the next one does: hooks of DDP wait
    for further collectives in the callbacks of the first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Job]] = []

    def submit(self, job: Job) -> None:
        """Run `job` in a thread that is free, or a new one; never blocks."""
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is not None:
            inbox.put(job)
            return
        threading.Thread(
            target=self._work, args=(job,), name="ringcomm-callback", daemon=True
        ).start()

    def _work(self, job: Job | None) -> None:
        inbox: queue.SimpleQueue[Job] = queue.SimpleQueue()
        while job is not None:
            job()
            job = None  # what it holds is free now, not when the next one comes
            with self._lock:
                self._idle.append(inbox)
            job = self._next(inbox)

    def _next(self, inbox: queue.SimpleQueue[Job]) -> Job | None:
        try:
            return inbox.get(timeout=_IDLE_S)
        except queue.Empty:
            pass
        with self._lock:
            if inbox in self._idle:
                self._idle.remove(inbox)
                return None
        return inbox.get()  # it was taken a moment ago, so a job is on its way


pool = ElasticPool()
