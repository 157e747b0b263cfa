"""Where a thread of this rank sleeps until there is news, or the time is over."""

from __future__ import annotations

import contextlib
import os
import select
import threading

from ringcomm.descriptors import needed_for

_EPOLL_S = 1e-3  # epoll counts whole milliseconds


class Parking:
    """A sleep that ends by wake(), from any thread, or by an event of `news`.

    Args:
        news: a descriptor; an event of it ends a sleep of at least 1 ms.

    Raises:
        OSError: there are no descriptors left.
    """

    def __init__(self, news: int) -> None:
        self._bell = threading.Lock()  # locked while nobody has called wake()
        self._bell.acquire()
        with needed_for("what wakes this rank (epoll, eventfd)"):
            self._poller = select.epoll()
            self._gong = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._poller.register(news, select.EPOLLIN)
            self._poller.register(self._gong, select.EPOLLIN)

    def sleep(self, seconds: float) -> None:
        """Return after that time, or as soon as there is news."""
        if seconds < _EPOLL_S:
            self._bell.acquire(timeout=seconds)
            return
        if any(fd == self._gong for fd, _ in self._poller.poll(seconds)):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._gong)

    def wake(self) -> None:
        """End the sleep."""
        with contextlib.suppress(RuntimeError):  # it rings already
            self._bell.release()
        with contextlib.suppress(OSError, ValueError):  # it is closed, and nobody sleeps any more
            os.eventfd_write(self._gong, 1)

    def close(self) -> None:
        """Give the descriptors back."""
        self._poller.close()
        os.close(self._gong)
        self._gong = -1
