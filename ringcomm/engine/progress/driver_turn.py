"""The turn to drive the progress loop: one thread has it at a time."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ringcomm.engine.progress.task import Task
from ringcomm.errors import RingcommError
from ringcomm.transport.base import Transport

_LOOK_S = 0.5  # of a thread that waits for the turn, at the one that has it


@dataclass(slots=True, eq=False)
class Waiter:
    """One wait of one thread: for a task, or for the turn."""

    thread: int = field(default_factory=threading.get_ident)


class Turn:
    """Passes the turn to drive from thread to thread."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._loop = transport.loop
        self.lock = threading.Condition()  # notified when waiting threads must look again
        self.driver: Waiter | None = None  # the waiter that has the turn
        self.waiting: set[Waiter] = set()
        self.n_watching = 0  # threads in take_unless()
        self._n_news = 0  # grows whenever these threads must call is_done()

    @property
    def is_own(self) -> bool:
        return self.driver is not None and self.driver.thread == threading.get_ident()

    def refuse_own(self, what: str) -> None:
        """Raise RingcommError if this thread drives, because a wait for `what` would never end."""
        if self.is_own:
            raise RingcommError(
                f"{what}: waited for by thread {threading.current_thread().name!r} while it "
                "carries out this rank's operations, so the wait would never end. A callback "
                "of when_done() must not wait, nor a signal handler or __del__ that interrupts a "
                "wait, and an array that is passed to a collective must not wait when it is read: "
                "wait before the call, or in another thread"
            )

    def request(self, waiter: Waiter, *, takes: bool = False) -> bool:
        """Register a waiter. With `takes`, take the turn and return True if it is free."""
        with self.lock:
            self.waiting.add(waiter)
            if self.driver is not None:
                self.wake_driver()
            elif takes:
                self.driver = waiter
                return True
        return False

    def take(self, waiter: Waiter, task: Task, deadline: float, look: Callable[[], object]) -> bool:
        """Wait for the turn. Return True if this thread has it, False once it need not wait.

        look() is called every _LOOK_S, with the lock held.
        """
        with self.lock:
            while not task.is_over:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                if self.driver is None:
                    self.driver = waiter
                    return True
                if not self.lock.wait(min(left, _LOOK_S)):
                    look()
        return False

    def take_unless(self, waiter: Waiter, is_done: Callable[[], bool], deadline: float) -> bool:
        """Wait for the turn. Return True if it came, False if is_done() or at the deadline."""
        n_seen = -1
        with self.lock:
            self.n_watching += 1
        try:
            while not is_done():  # without this lock, because is_done() may acquire others
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
        """Wake the threads in take_unless(); the caller holds the lock."""
        if self.n_watching:
            self._n_news += 1
            self.lock.notify_all()

    def give_back(
        self, waiter: Waiter, waits_in_cpp: Callable[[], bool], *, waits_on: bool = False
    ) -> None:
        """If this waiter has the turn, give it up, and wake a thread to take it.

        If waits_in_cpp(), C++ will wake a thread, so none is woken now. waits_on: the waiter may
        want the turn again.
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
        self._transport.wake()
        self._loop.wake()
