"""How much of a rank's requests may be on its way to each server."""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ringcomm.ps.frames import Kind

if TYPE_CHECKING:
    from ringcomm.ps.client import Ask
    from ringcomm.ps.pushing import PlainPush


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

    Attributes:
        n_bytes: on their way, by server.
    """

    def __init__(self, limits: Callable[[], tuple[int, int]]) -> None:
        self._limits = limits
        self.n_bytes: Counter[int] = Counter()
        self._n_asked: Counter[int] = Counter()
        self._n_pushes: Counter[tuple[int, int]] = Counter()  # by server and table
        self._turns: defaultdict[int, Turns] = defaultdict(Turns)  # of pushes, by table

    def busy(self) -> set[int]:
        """Return the servers to which something is on its way."""
        return {server for server, n in self._n_asked.items() if n}

    def note(self, ask: Ask | PlainPush, sign: int) -> None:
        """Take note that a request is on its way, or, with -1, that it is not any more."""
        self.n_bytes[ask.server] += sign * ask.body.nbytes
        self._n_asked[ask.server] += sign
        if ask.kind == Kind.PUSH:
            table = table_of(ask)
            self._n_pushes[ask.server, table] += sign
            if ask.turn:
                (self._turns[table].add if sign > 0 else self._turns[table].discard)(ask.turn)

    def allows(self, ask: Ask | PlainPush) -> bool:
        """Return True if a request may be sent now."""
        if ask.kind in _STEERING:
            return True
        held, n = self.n_bytes[ask.server], ask.body.nbytes
        most_nbytes, most_requests = self._limits()
        is_small = not (n and held) or held + n <= most_nbytes
        if is_small and self._n_asked[ask.server] < most_requests:
            return True
        if ask.kind != Kind.PUSH:
            return False
        table = table_of(ask)
        is_first = 0 < ask.turn < self._turns[table].least()
        return is_first or not self._n_pushes[ask.server, table]
