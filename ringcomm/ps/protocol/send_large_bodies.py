"""Bodies that are sent to other nodes, each as a message of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Protocol

from ringcomm._core import WireFault
from ringcomm.arrays.base import Bytes
from ringcomm.transport.base import Request, Transport


class BodiesToSend:
    """Sends bodies; MPI goes on with all of them at the same time.

    Args:
        transport: what carries them.
        survivable: ranks without which the job goes on if they die.

    Attributes:
        new: bodies that wait for go_on().
        under_way: those with which it has begun.
    """

    def __init__(self, transport: Transport, survivable: Collection[int]) -> None:
        self._transport, self._survivable = transport, survivable
        self.new: deque[_Sending] = deque()  # any thread appends
        self.under_way: list[_Sending] = []
        self._dead: set[int] = set()

    def add(
        self, body: Bytes, dest: int, tag: int, is_filled: Callable[[], bool] | None = None
    ) -> None:
        """Send a body to a rank; any thread. It leaves at the next go_on() once it is filled."""
        self.new.append(_Sending(self._transport, body, dest, tag, is_filled))

    def go_on(self) -> int:
        """Go on with all of them, as far as that is possible without waiting.

        Returns:
            How many have left.
        """
        while self.new:
            sending = self.new.popleft()
            if sending.dest not in self._dead:
                self.under_way.append(sending)
        may_die = self._survivable
        left = [each for each in self.under_way if not is_over(each, may_die=each.dest in may_die)]
        n_left = len(self.under_way) - len(left)
        self.under_way = left
        return n_left

    def forget(self, rank: int) -> list[Request]:
        """Send nothing to a dead rank any more; return what has begun, for abandon()."""
        self._dead.add(rank)
        for_it = [each.request for each in self.under_way if each.dest == rank]
        self.under_way = [each for each in self.under_way if each.dest != rank]
        return [request for request in for_it if request is not None]


class _Testable(Protocol):
    def test(self) -> bool: ...


class _Sending:
    """A message that the thread that drives the loop puts on the wire."""

    def __init__(
        self,
        transport: Transport,
        body: Bytes,
        dest: int,
        tag: int,
        is_filled: Callable[[], bool] | None,
    ) -> None:
        self._transport, self._body, self._tag = transport, body, tag
        self._is_filled = is_filled
        self.dest = dest
        self.request: Request | None = None

    def test(self) -> bool:
        if self.request is None:
            if self._is_filled is not None and not self._is_filled():
                return False
            self.request = self._transport.isend(self._body, self.dest, self._tag)
        return self.request.test()


def is_over(request: _Testable, *, may_die: bool) -> bool:
    """Test a request; if its rank dies, it is over with forget(), once that is known."""
    try:
        return request.test()
    except WireFault:
        if may_die:
            return False
        raise
