"""Credit: bounds the bytes and requests that one rank has under way to each server."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from ringcomm.ps.client.push_outcome import table_of
from ringcomm.ps.protocol.frames import Kind

if TYPE_CHECKING:
    from ringcomm.ps.client.push_outcome import AnyRequest

CREDIT_NBYTES: Final = 64 << 20  # of bodies under way from one rank to one server
CREDIT_REQUESTS: Final = 4096  # likewise
_PUSH: Final = Kind.PUSH  # looked up once: each request needs it
_CONTROL: Final = frozenset(
    (Kind.ENTER, Kind.LEAVE, Kind.MISSING, Kind.MOVE, Kind.SNAPSHOT, Kind.STATS)
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

    def count(self, request: AnyRequest, sign: int) -> None:
        """Count a request that leaves (1), or that is not under way any more (-1)."""
        there = self._in_flight[request.server]
        there.n_bytes += sign * request.body.nbytes
        there.n += sign
        if request.kind is _PUSH:
            table = table_of(request)
            there.n_pushes[table] = there.n_pushes.get(table, 0) + sign
            if request.turn:
                (self._turns[table].add if sign > 0 else self._turns[table].discard)(request.turn)

    def allows(self, request: AnyRequest) -> bool:
        there = self._in_flight[request.server]
        if not there.n:  # as with each push that is waited for before the next one
            return True
        held, n = there.n_bytes, request.body.nbytes
        is_small = not (n and held) or held + n <= CREDIT_NBYTES
        if (is_small and there.n < CREDIT_REQUESTS) or request.kind in _CONTROL:
            return True
        if request.kind is not _PUSH:
            return False
        table = table_of(request)
        is_first = 0 < request.turn < self._turns[table].least()
        return is_first or not there.n_pushes.get(table, 0)
