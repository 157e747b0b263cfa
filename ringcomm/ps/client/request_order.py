"""Decides when each request of one rank leaves, and for which server. Pure.

Requests, replies and news of moves go in; the requests to send come out. Client calls this under
its lock. Requests of one rank to one server arrive in the order in which they were sent.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from ringcomm.ps.placement.partitions import Partition, PlacementView
from ringcomm.ps.protocol.frame_meta import owners_of
from ringcomm.ps.protocol.frames import FrameKind

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes


class Leaving(Protocol):
    """A request, with what decides when it leaves: see Request and PlainPush."""

    server: int

    @property
    def kind(self) -> FrameKind: ...
    @property
    def partition(self) -> Partition | None: ...
    @property
    def table(self) -> int: ...
    @property
    def turn(self) -> int: ...
    @property
    def body(self) -> Bytes: ...
    @property
    def future(self) -> object: ...


R = TypeVar("R", bound=Leaving)


# --- order while a partition moves ----------------------------------------------------------------
class RequestOrder:
    """One rank's requests to one partition, by their ascending sequence numbers.

    When a partition moves, the old server returns the requests that it has not carried out, perhaps
    while the rank makes new ones. Nothing is sent to the new server until everything that was sent
    to the old one was answered or returned. Then all leave in the order in which they were made.

    Args:
        epoch: number of the view in which the partition came to its server, as far as is known.
    """

    __slots__ = ("_n_old", "_sent", "_waiting", "epoch")

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch
        self._sent: dict[int, int] = {}  # sequence -> epoch
        self._n_old = 0  # of those: with another epoch than the present one
        self._waiting: list[int] = []

    @property
    def is_settled(self) -> bool:
        """True if all requests under way are on their way to the present server."""
        return not self._n_old

    @property
    def is_empty(self) -> bool:
        return not (self._sent or self._waiting)

    def add(self, sequence: int) -> bool:
        """Add a new request; return True if it is to be sent now."""
        if self._n_old:
            self._waiting.append(sequence)
            return False
        self._sent[sequence] = self.epoch
        return True

    def sent_in(self, sequence: int) -> int | None:
        """Return the epoch in which a request under way was sent; None: it waits."""
        return self._sent.get(sequence)

    def answered(self, sequence: int) -> list[int]:
        """Remove a request that was carried out or refused; return those to send now."""
        self._n_old -= self._sent.pop(sequence) != self.epoch
        return self._due()

    def moved(self, epoch: int) -> list[int]:
        """The partition has moved, in the view of this number; return the requests to send now."""
        if epoch > self.epoch:
            self.epoch = epoch
            self._n_old = len(self._sent)
        return self._due()

    def returned(self, sequence: int, epoch: int) -> list[int]:
        """A request was returned, for the partition has moved; return those to send now.

        Raises:
            ValueError: it was sent to the server that owns the partition in that view.
        """
        sent_in = self._sent[sequence]
        if epoch <= sent_in:
            raise ValueError(f"a request of epoch {sent_in} came back with epoch {epoch}")
        self.moved(epoch)
        del self._sent[sequence]
        self._n_old -= 1
        bisect.insort(self._waiting, sequence)
        return self._due()

    def _due(self) -> list[int]:
        if self._n_old or not self._waiting:
            return []
        due, self._waiting = self._waiting, []
        self._sent.update(dict.fromkeys(due, self.epoch))
        return due


class PartitionOwners:
    """The view of this rank, and the order of its requests to each partition.

    Attributes:
        view: the owners of partitions.
        orders: of this rank's requests, by partition.
        notices: moves that servers have announced, by partition and epoch, to be confirmed.
        confirmed: the last move that was, by partition; of a hash table by 0.
    """

    def __init__(self) -> None:
        self.view = PlacementView()
        self.orders: dict[Partition, RequestOrder] = {}
        self.notices: list[tuple[Partition, int]] = []
        self.confirmed: dict[Partition, int] = {}

    def add_table(self, number: int, owners: list[int], epochs: Mapping[int, int]) -> None:
        """Learn the owners of a table's partitions.

        Args:
            number: of the table.
            owners: by partition.
            epochs: of partitions that have moved.
        """
        changes = {}
        for part, owner in enumerate(owners):
            partition, epoch = (number, part), epochs.get(part, 0)
            order = self.orders.get(partition)
            if order is None:
                self.orders[partition] = RequestOrder(epoch)
            elif epoch <= order.epoch:
                continue
            else:  # the server before returns what was sent to it
                order.moved(epoch)
            changes[partition] = (owner,)
        self.view = self.view.with_(changes)

    def forget_table(self, number: int) -> None:
        """Know a table no more, to which no request is under way."""
        for partition in [each for each in self.orders if each[0] == number]:
            del self.orders[partition]
        for partition in [each for each in self.confirmed if each[0] == number]:
            del self.confirmed[partition]
        chains = {part: chain for part, chain in self.view.chains.items() if part[0] != number}
        self.view = PlacementView(self.view.number + 1, chains)

    def note_move(self, partition: Partition, meta: bytes, epoch: int) -> list[int]:
        """A server has announced a move, to be confirmed; return the requests to send now."""
        self.notices.append((partition, epoch))
        if partition not in self.orders:
            return []
        return self.orders[partition].moved(self._learn(partition, meta))

    def returned(self, partition: Partition, sequence: int, meta: bytes) -> list[int]:
        """A server has returned a request; return the requests to send now."""
        return self.orders[partition].returned(sequence, self._learn(partition, meta))

    def _learn(self, partition: Partition, meta: bytes) -> int:
        epoch, owners = owners_of(meta)
        if epoch > self.orders[partition].epoch:
            self.view = self.view.with_({partition: (int(owners[0]),)})
        return epoch

    def take_confirmed(self) -> list[tuple[Partition, int]]:
        """Return the moves, by partition and epoch, of which the server before awaits no more."""
        waiting: list[tuple[Partition, int]] = []
        confirmed: list[tuple[Partition, int]] = []
        for partition, epoch in self.notices:
            order = self.orders.get(partition)
            is_settled = order is None or order.is_settled
            (confirmed if is_settled else waiting).append((partition, epoch))
        self.notices = waiting
        return confirmed

    def lose(self) -> None:
        """Know of no request: all have failed, for a server died."""
        self.notices.clear()
        self.confirmed.clear()
        for partition, order in self.orders.items():
            self.orders[partition] = RequestOrder(order.epoch)

    @property
    def is_settled(self) -> bool:
        return all(order.is_settled for order in self.orders.values())


# --- requests that wait for credit ----------------------------------------------------------------
class SendQueue(Generic[R]):
    """Requests that wait for credit, by server and table, in the order of their calls.

    Attributes:
        n_waiting: requests.
    """

    def __init__(self, has_credit: Callable[[R], bool]) -> None:
        self._has_credit = has_credit
        self.n_waiting = 0
        self._queues: dict[tuple[int, int], deque[R]] = {}
        self._tables: Counter[int] = Counter()
        self._partitions: dict[Partition, tuple[int, int]] = {}  # the server, and how many wait
        self._calls: Counter[object] = Counter()

    def add(self, request: R) -> None:
        """Append a request.

        If its partition has moved it stays behind the earlier ones of that partition.
        """
        self._queue_of(request).append(request)

    def add_behind(self, request: R) -> None:
        """Insert a request, which gives credit back, right behind the last one of its partition.

        There is one: see has().
        """
        queue = self._queue_of(request)
        last = max(k for k, each in enumerate(queue) if each.partition == request.partition)
        queue.insert(last + 1, request)

    def _queue_of(self, request: R) -> deque[R]:
        """Count a request; return where it waits."""
        server, n, table = request.server, 0, request.table
        if request.partition is not None:
            server, n = self._partitions.get(request.partition, (server, 0))
            self._partitions[request.partition] = server, n + 1
        self._tables[table] += 1
        self._calls[request.future] += 1
        self.n_waiting += 1
        return self._queues.setdefault((server, table), deque())

    def due(self) -> Iterator[R]:
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

    def take_all(self) -> list[R]:
        """Return all requests, which are not going to be sent, and forget them."""
        requests = [request for queue in self._queues.values() for request in queue]
        for request in requests:
            self._discount(request)
        self._queues.clear()
        return requests

    def _discount(self, request: R) -> None:
        self.n_waiting -= 1
        self._tables[request.table] -= 1
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

    def n_of(self, future: object) -> int:
        return self._calls.get(future, 0)

    def of(self, future: object) -> Iterator[R]:
        for queue in self._queues.values():
            yield from (each for each in queue if each.future is future)


# --- credit ---------------------------------------------------------------------------------------
CREDIT_NBYTES: Final = 64 << 20  # of bodies under way from one rank to one server
CREDIT_REQUESTS: Final = 4096  # likewise
_PUSH: Final = FrameKind.PUSH  # looked up once: each request needs it
_CONTROL: Final = frozenset(
    (
        FrameKind.ASK,
        FrameKind.ENTER,
        FrameKind.SERVER,
    )
)


class Turns:
    """The turns of pushes that are under way; finds the least without a look at all."""

    def __init__(self) -> None:
        self._present: set[int] = set()
        self._heap: list[int] = []  # those, and some that have gone since; the first has not

    def add(self, turn: int) -> None:
        """Add one, perhaps again after discard()."""
        self._present.add(turn)
        heapq.heappush(self._heap, turn)

    def discard(self, turn: int) -> None:
        self._present.discard(turn)
        while self._heap and self._heap[0] not in self._present:
            heapq.heappop(self._heap)

    def least(self) -> float:
        return self._heap[0] if self._heap else math.inf


class InFlight:
    """Requests under way to one server: bytes of bodies, requests, and pushes by table."""

    __slots__ = ("n", "n_bytes", "n_pushes")

    def __init__(self) -> None:
        self.n = self.n_bytes = 0
        self.n_pushes: dict[int, int] = {}


class Credit:
    """Bounds what is under way: bytes of bodies, and requests, of all tables together.

    Requests that control the job are small and rare, and need no credit: a rank that leaves must
    not wait, nor Client.send_control(), which brings credit back.

    Beyond that each table may have one push under way to each server. Pushes of a round wait at the
    server for those of other workers, who may push their tables in another order: if waiting pushes
    could keep out those of another table, two workers could wait for each other. So could two
    workers one of which has sent a later block before that moved to the server of the earlier one:
    so a push that was called before all others of its table that are under way may always leave.
    """

    def __init__(self) -> None:
        self._in_flight: defaultdict[int, InFlight] = defaultdict(InFlight)  # by server
        self._turns: defaultdict[int, Turns] = defaultdict(Turns)  # of pushes, by table

    @property
    def n_bytes(self) -> dict[int, int]:
        return {server: each.n_bytes for server, each in self._in_flight.items()}

    def busy(self) -> set[int]:
        return {server for server, each in self._in_flight.items() if each.n}

    def count(self, request: Leaving, sign: int) -> None:
        """Count a request that leaves (1), or that is not under way any more (-1)."""
        there = self._in_flight[request.server]
        there.n_bytes += sign * request.body.nbytes
        there.n += sign
        if request.kind is _PUSH:
            table = request.table
            there.n_pushes[table] = there.n_pushes.get(table, 0) + sign
            if request.turn:
                (self._turns[table].add if sign > 0 else self._turns[table].discard)(request.turn)

    def allows(self, request: Leaving) -> bool:
        there = self._in_flight[request.server]
        if not there.n:  # as with each push that is waited for before the next one
            return True
        held, n = there.n_bytes, request.body.nbytes
        is_small = not (n and held) or held + n <= CREDIT_NBYTES
        if (is_small and there.n < CREDIT_REQUESTS) or request.kind in _CONTROL:
            return True
        if request.kind is not _PUSH:
            return False
        table = request.table
        is_first = 0 < request.turn < self._turns[table].least()
        return is_first or not there.n_pushes.get(table, 0)
