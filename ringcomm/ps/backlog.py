"""Requests that are going to be sent, all of them, and wait for credit."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ringcomm.ps.credit import table_of

if TYPE_CHECKING:
    from ringcomm.ps.client import Ask
    from ringcomm.ps.future import Future
    from ringcomm.ps.placement import Partition


class Backlog:
    """Requests that wait for credit, by server and table, in the order of their calls.

    Not safe by itself: the client's lock is held around each call.

    Args:
        has_credit: returns True if a request may be sent now.

    Attributes:
        n_waiting: requests.
    """

    def __init__(self, has_credit: Callable[[Ask], bool]) -> None:
        self._has_credit = has_credit
        self.n_waiting = 0
        self._queues: dict[tuple[int, int], deque[Ask]] = {}
        self._tables: Counter[int] = Counter()
        self._partitions: dict[Partition, tuple[int, int]] = {}  # where they wait, and how many
        self._calls: Counter[Future[Any]] = Counter()

    def add(self, ask: Ask) -> None:
        """Let a request wait, behind those that do.

        One whose partition has moved meanwhile stays behind the earlier ones of that partition.
        """
        server, n = ask.server, 0
        if ask.partition is not None:
            server, n = self._partitions.get(ask.partition, (server, 0))
            self._partitions[ask.partition] = server, n + 1
        table = table_of(ask)
        self._queues.setdefault((server, table), deque()).append(ask)
        self._tables[table] += 1
        self.n_waiting += 1
        self._calls[ask.future] += 1

    def add_behind(self, ask: Ask) -> None:
        """Let a request wait right behind the last one of its partition, which gives credit back.

        There is one: see has().
        """
        assert ask.partition is not None
        server, n = self._partitions[ask.partition]
        self._partitions[ask.partition] = server, n + 1
        queue = self._queues[server, table_of(ask)]
        behind = max(k for k, each in enumerate(queue) if each.partition == ask.partition)
        queue.insert(behind + 1, ask)
        self._tables[table_of(ask)] += 1
        self.n_waiting += 1
        self._calls[ask.future] += 1

    def due(self) -> Iterator[Ask]:
        """Take out the requests that may be sent now; each must be sent before the next is taken.

        None overtakes another of its server and table: what is pushed first arrives first.
        """
        for key, queue in tuple(self._queues.items()):
            while queue and self._has_credit(queue[0]):
                yield self._taken(queue.popleft())
            if not queue:
                del self._queues[key]

    def _taken(self, ask: Ask) -> Ask:
        self.n_waiting -= 1
        self._tables[table_of(ask)] -= 1
        self._calls[ask.future] -= 1
        if not self._calls[ask.future]:
            del self._calls[ask.future]
        if ask.partition is not None:
            server, n = self._partitions.pop(ask.partition)
            if n > 1:
                self._partitions[ask.partition] = server, n - 1
        return ask

    def has(self, partition: Partition | None) -> bool:
        """Return True if a request to a partition waits: later ones must not overtake it."""
        return partition in self._partitions

    def has_table(self, table: int) -> bool:
        """Return True if a request for a table waits."""
        return self._tables[table] > 0

    def n_of(self, future: Future[Any]) -> int:
        """Return how many requests of a call wait."""
        return self._calls[future]
