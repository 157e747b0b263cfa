"""Threads for callbacks, which may block: each callback at work has its own thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

_IDLE_S = 5.0  # after which a thread without a job ends
Job = Callable[[], object]


class ElasticPool:
    """Runs each job at once, in a thread that runs no other job.

    A pool of n threads would deadlock if n jobs waited for another job. Hooks of DDP wait in
    callbacks of collectives for further collectives.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_idle = 0  # threads that wait for a job, less the jobs that wait for a thread
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()

    def submit(self, job: Job) -> None:
        """Run `job` in an idle thread or a new one; never blocks."""
        self._jobs.put(job)
        with self._lock:
            has_idle = self._n_idle > 0
            self._n_idle -= has_idle
        if not has_idle:
            threading.Thread(target=self._work, name="ringcomm-callback", daemon=True).start()

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._n_idle > 0:
                        self._n_idle -= 1
                        return
                continue  # submit() counts on this thread
            job()
            del job  # and what it holds
            with self._lock:
                self._n_idle += 1


pool = ElasticPool()
