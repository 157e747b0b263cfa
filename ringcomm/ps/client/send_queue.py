"""Requests that wait for credit before they are sent."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ringcomm.ps.client.push_outcome import table_of

if TYPE_CHECKING:
    from ringcomm.ps.client.future import Future
    from ringcomm.ps.client.push_outcome import AnyRequest
    from ringcomm.ps.client.request import Request
    from ringcomm.ps.placement.partition_places_and_moves import Partition


class SendQueue:
    """Requests that wait for credit, by server and table, in the order of their calls.

    Not safe by itself: the lock of Outstanding is held around each call.

    Attributes:
        n_waiting: requests.
    """

    def __init__(self, has_credit: Callable[[AnyRequest], bool]) -> None:
        self._has_credit = has_credit
        self.n_waiting = 0
        self._queues: dict[tuple[int, int], deque[Request]] = {}
        self._tables: Counter[int] = Counter()
        self._partitions: dict[Partition, tuple[int, int]] = {}  # the server, and how many wait
        self._calls: Counter[Future[Any]] = Counter()

    def add(self, request: Request) -> None:
        """Append a request.

        If its partition has moved it stays behind the earlier ones of that partition.
        """
        self._queue_of(request).append(request)

    def add_behind(self, request: Request) -> None:
        """Insert a request, which gives credit back, right behind the last one of its partition.

        There is one: see has().
        """
        queue = self._queue_of(request)
        last = max(k for k, each in enumerate(queue) if each.partition == request.partition)
        queue.insert(last + 1, request)

    def _queue_of(self, request: Request) -> deque[Request]:
        """Count a request; return where it waits."""
        server, n, table = request.server, 0, table_of(request)
        if request.partition is not None:
            server, n = self._partitions.get(request.partition, (server, 0))
            self._partitions[request.partition] = server, n + 1
        self._tables[table] += 1
        self._calls[request.future] += 1
        self.n_waiting += 1
        return self._queues.setdefault((server, table), deque())

    def due(self) -> Iterator[Request]:
        """Remove the requests that may be sent now; each must be sent before the next is taken.

        None overtakes another of its server and table: what is pushed first arrives first.
        """
        for key, queue in tuple(self._queues.items()):
            while queue and self._has_credit(queue[0]):
                request = queue.popleft()
                self._discount(request)
                yield request
            if not queue:
                del self._queues[key]

    def take_all(self) -> list[Request]:
        """Return all requests, which are not going to be sent, and forget them."""
        requests = [request for queue in self._queues.values() for request in queue]
        for request in requests:
            self._discount(request)
        self._queues.clear()
        return requests

    def _discount(self, request: Request) -> None:
        self.n_waiting -= 1
        self._tables[table_of(request)] -= 1
        self._calls[request.future] -= 1
        if not self._calls[request.future]:
            del self._calls[request.future]
        if request.partition is not None:
            server, n = self._partitions.pop(request.partition)
            if n > 1:
                self._partitions[request.partition] = server, n - 1

    def has(self, partition: Partition | None) -> bool:
        """Return True if a request to a partition waits: later ones must not overtake it."""
        return partition in self._partitions

    def has_table(self, table: int) -> bool:
        return self._tables[table] > 0

    def n_of(self, future: Future[Any]) -> int:
        return self._calls.get(future, 0)

    def of(self, future: Future[Any]) -> Iterator[Request]:
        for queue in self._queues.values():
            yield from (each for each in queue if each.future is future)
