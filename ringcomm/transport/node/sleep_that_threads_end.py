"""A sleep that other threads, and events of a descriptor, can end."""

from __future__ import annotations

import contextlib
import os
import select
import threading

from ringcomm.open_errors import needed_for

_EPOLL_S = 1e-3  # epoll counts whole milliseconds


class Parking:
    """Sleeps until the time is over, another thread calls wake(), or a descriptor has an event.

    Events of the descriptor `news` end only sleeps of at least 1 ms. Raises OSError if `ulimit -n`
    allows no more descriptors.
    """

    def __init__(self, news: int) -> None:
        self._short = threading.Lock()  # for sleeps of less than 1 ms: wake() releases it
        self._short.acquire()
        with needed_for("what wakes this rank (epoll, eventfd)"):
            self._poller = select.epoll()
            self._long = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # for longer sleeps
            self._poller.register(news, select.EPOLLIN)
            self._poller.register(self._long, select.EPOLLIN)

    def sleep(self, seconds: float) -> None:
        """Sleep for at most `seconds`."""
        if seconds < _EPOLL_S:
            self._short.acquire(timeout=seconds)
            return
        if any(fd == self._long for fd, _ in self._poller.poll(seconds)):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._long)

    def wake(self) -> None:
        """End the sleep of another thread, or else the next sleep. Any thread may call this."""
        with contextlib.suppress(RuntimeError):  # released already
            self._short.release()
        with contextlib.suppress(OSError, ValueError):  # closed: no thread sleeps any more
            os.eventfd_write(self._long, 1)

    def close(self) -> None:
        self._poller.close()
        os.close(self._long)
        self._long = -1
