"""How much of a rank's requests may be on its way to each server."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ringcomm.ps.frames import Kind

if TYPE_CHECKING:
    from ringcomm.ps.client import Ask
    from ringcomm.ps.pushing import PlainPush


_PUSH: Final = Kind.PUSH  # looked up once: each request asks for it
_STEERING: Final = frozenset((Kind.ENTER, Kind.LEAVE, Kind.MOVE, Kind.SNAPSHOT, Kind.STATS))


def table_of(ask: Ask | PlainPush) -> int:
    """Return the number of the table that a request is for."""
    return ask.table if ask.partition is None else ask.partition[0]


class Turns:
    """The turns of pushes that are on their way: which is the least, without a look at all."""

    def __init__(self) -> None:
        self._present: set[int] = set()
        self._heap: list[int] = []  # those, and some that have gone since; the first has not

    def add(self, turn: int) -> None:
        """Note one that leaves, which it may do again after discard()."""
        self._present.add(turn)
        heapq.heappush(self._heap, turn)

    def discard(self, turn: int) -> None:
        """Forget one."""
        self._present.discard(turn)
        while self._heap and self._heap[0] not in self._present:
            heapq.heappop(self._heap)

    def least(self) -> float:
        """Return the least; infinity if there is none."""
        return self._heap[0] if self._heap else math.inf


class OnTheirWay:
    """What is on its way to one server: bytes of bodies, requests, pushes by table."""

    __slots__ = ("n", "n_bytes", "n_pushes")

    def __init__(self) -> None:
        self.n = self.n_bytes = 0
        self.n_pushes: dict[int, int] = {}


class Credit:
    """Bounds what is on its way: bytes of bodies, and requests, of all tables together.

    What steers the job is small and rare, and waits for none: above all not who leaves, and not
    Client.post(), which brings some back.

    Beyond that each table may have one push on its way to each server. Pushes of a round wait there
    for those of other workers, who may push their tables in another order: if those that wait could
    keep a table's out, the two would wait for each other. So would two workers one of which has
    sent a later block first, before that one moved to the server of the earlier one: what is called
    before all pushes of its table that are on their way may always leave.

    Args:
        limits: returns how many bytes and requests may be on their way to one server.

    """

    def __init__(self, limits: Callable[[], tuple[int, int]]) -> None:
        self._limits = limits
        self._on_their_way: defaultdict[int, OnTheirWay] = defaultdict(OnTheirWay)  # by server
        self._turns: defaultdict[int, Turns] = defaultdict(Turns)  # of pushes, by table

    @property
    def n_bytes(self) -> dict[int, int]:
        """How many bytes of bodies are on their way, by server."""
        return {server: each.n_bytes for server, each in self._on_their_way.items()}

    def busy(self) -> set[int]:
        """Return the servers to which something is on its way."""
        return {server for server, each in self._on_their_way.items() if each.n}

    def note(self, ask: Ask | PlainPush, sign: int) -> None:
        """Take note that a request is on its way, or, with -1, that it is not any more."""
        there = self._on_their_way[ask.server]
        there.n_bytes += sign * ask.body.nbytes
        there.n += sign
        if ask.kind is _PUSH:
            table = table_of(ask)
            there.n_pushes[table] = there.n_pushes.get(table, 0) + sign
            if ask.turn:
                (self._turns[table].add if sign > 0 else self._turns[table].discard)(ask.turn)

    def allows(self, ask: Ask | PlainPush) -> bool:
        """Return True if a request may be sent now."""
        there = self._on_their_way[ask.server]
        if not there.n:  # as with each push that is waited for before the next one
            return True
        held, n = there.n_bytes, ask.body.nbytes
        most_nbytes, most_requests = self._limits()
        is_small = not (n and held) or held + n <= most_nbytes
        if (is_small and there.n < most_requests) or ask.kind in _STEERING:
            return True
        if ask.kind is not _PUSH:
            return False
        table = table_of(ask)
        is_first = 0 < ask.turn < self._turns[table].least()
        return is_first or not there.n_pushes.get(table, 0)
