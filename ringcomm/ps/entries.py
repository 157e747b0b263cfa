"""Who is in which round of ps.FirstOf(k): what a server answers; see ringcomm.ps.entering."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringcomm.ps.frames import Entry, Status
from ringcomm.ps.rounds import Entries

if TYPE_CHECKING:
    from ringcomm.ps.link import Delivery
    from ringcomm.ps.serving import Server


class EntryRequests:
    """Requests of Kind.ENTER to one server.

    Args:
        server: that answers.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._entries: dict[int, Entries] = {}  # by the table that stands for all that share them
        self._joined: dict[tuple[int, int], int] = {}  # the round in which a later table began
        self._handlers = {
            Entry.ASK: self._ask,
            Entry.JOIN: self._join,
            Entry.IN: self._decide,
            Entry.OUT: self._decide,
        }

    def on_request(self, request: Delivery) -> None:
        """Do what a frame says."""
        self._handlers[Entry(request.header.option)](request)

    def leave(self, worker: int) -> None:
        """Wait no more for a worker."""
        for entries in self._entries.values():
            entries.leave(worker)

    def _ask(self, request: Delivery) -> None:
        header = request.header
        entries = self._of(header.table)
        is_in = entries.ask(header.origin, header.clock)
        status = Status.OK if is_in else Status.LATE
        self._server.reply(request, status=status, clock=entries.current)

    def _join(self, request: Delivery) -> None:
        """Tell in which round another table begins to share the rounds of one."""
        header = request.header
        pair = header.table, header.place
        self._server.reply(
            request, clock=self._joined.setdefault(pair, self._of(header.table).current)
        )

    def _decide(self, request: Delivery) -> None:
        """Let a block know whether a worker is in a round."""
        part = self._server.part_of(request)
        if part is None:
            return
        header = request.header
        partition = header.table, header.partition
        if not part.is_ready:  # what it is about waits, too
            self._server.waiters.wait(partition, 0, lambda: self._decide(request), request)
            return
        part.decide(header.origin, header.clock, is_in=header.option == Entry.IN)
        self._server.reply(request, clock=part.version)
        self._server.waiters.look_at(partition)

    def _of(self, number: int) -> Entries:
        """Return the entries of a table. Raises KeyError, ValueError: it has none."""
        if number not in self._entries:
            table = self._server.tables.get(number)
            if table is None:
                raise KeyError(f"server {self._server.index} has no table {number}")
            mode = table.spec.mode
            if mode.name != "first_of":
                raise ValueError(f"{table.spec.name}: nobody enters rounds of mode {mode}")
            self._entries[number] = Entries(self._server.live_workers(), mode.bound)
        return self._entries[number]
