"""Whose turn it is to carry out a rank's operations: one thread's at a time."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from ringcomm.engine.progress.task import Task
from ringcomm.errors import RingcommError
from ringcomm.transport.base import Transport


class Waiter:
    """One wait of one thread, for an operation or for the turn."""

    __slots__ = ("thread",)

    def __init__(self) -> None:
        self.thread = threading.get_ident()


class Turn:
    """Passes the turn to drive from thread to thread."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._loop = transport.loop
        self.lock = threading.Condition()  # notified when threads are to look at what they await
        self.driver: Waiter | None = None  # whose turn it is
        self.waiting: set[Waiter] = set()  # for a task
        self.n_watching = 0  # threads that wait for something else, and look by themselves
        self._n_news = 0  # changes whenever those are to look

    @property
    def is_own(self) -> bool:
        """True if it is this thread's, as in a callback, which must not wait."""
        return self.driver is not None and self.driver.thread == threading.get_ident()

    def refuse_own(self, what: str) -> None:
        """Raise RingcommError if this thread drives: its wait for `what` would never end."""
        if self.is_own:
            raise RingcommError(
                f"{what}: waited for by thread {threading.current_thread().name!r} while it "
                "carries out this rank's operations, so that the wait would never end. A callback "
                "of when_done() must not wait, nor may reading an array that is passed to a "
                "collective: wait before the call, or in another thread"
            )

    def request(self, waiter: Waiter, *, takes: bool = False) -> bool:
        """Wait for the turn from now on; return True if `takes`, and it was free."""
        with self.lock:
            self.waiting.add(waiter)
            if self.driver is not None:
                self.wake_driver()
            elif takes:
                self.driver = waiter
                return True
        return False

    def take(self, waiter: Waiter, task: Task, deadline: float) -> bool:
        """Return True if this thread is to drive now, False if it need not wait any more."""
        with self.lock:
            while not task.is_over:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                if self.driver is None:
                    self.driver = waiter
                    return True
                self.lock.wait(None if left == math.inf else left)
        return False

    def take_unless(self, waiter: Waiter, is_done: Callable[[], bool], deadline: float) -> bool:
        """Return True if this thread is to drive now, False if it is done, or too late."""
        n_seen = -1
        with self.lock:
            self.n_watching += 1
        try:
            while not is_done():  # without the lock, for it may take others
                with self.lock:
                    left = deadline - time.monotonic()
                    while self.driver is not None and self._n_news == n_seen and left > 0:
                        self.lock.wait(None if left == math.inf else left)
                        left = deadline - time.monotonic()
                    if self.driver is None:
                        self.driver = waiter
                        return True
                    if left <= 0:
                        return False
                    n_seen = self._n_news
            return False
        finally:
            with self.lock:
                self.n_watching -= 1

    def notify_watchers(self) -> None:
        """Wake the threads that wait for something other than a task; with the lock."""
        if self.n_watching:
            self._n_news += 1
            self.lock.notify_all()

    def give_back(
        self, waiter: Waiter, waits_in_cpp: Callable[[], bool], *, waits_on: bool = False
    ) -> None:
        """Leave the turn to others; any number of times. To wake one costs 10 us.

        waits_in_cpp: returns True if C++ wakes who is to take the turn. waits_on: this thread may
        want it once more.
        """
        with self.lock:
            if not waits_on:
                self.waiting.discard(waiter)
            if self.driver is waiter:
                self.driver = None
            if self.waiting:
                self.lock.notify_all()
                return
            self._loop.yield_turn()
            if not waits_in_cpp():
                self._loop.wake()

    def wake_driver(self) -> None:
        """End the nap of the thread that drives."""
        self._transport.wake()
        self._loop.wake()
