"""The workers' clocks, and which workers are in a round of ps.FirstOf(k). Pure.

| event | consequence |
|---|---|
| Entered | a reply that says whether the worker is in the round |
| Joined | a reply with the round in which another table begins to share the rounds |
| Ticked | the worker's clock goes on; if it was the slowest, reads and ClockAwaited go on |
| ClockAwaited | a reply once the slowest worker has come so far, or no worker is left |
| a worker leaves, or dies | nobody waits for its steps, and it takes no place in a new round |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ringcomm.ps.server.core import events as on
from ringcomm.ps.server.core.actions import Action, CoreRequest, Reply
from ringcomm.ps.server.core.core_table import ServedTable
from ringcomm.ps.server.core.rounds import Clocks, Entries


class WorkerProgress:
    """The workers' clocks, and the requests that wait for a clock.

    Args:
        index: of this server.
        workers: those that count now.
        live_workers: returns those that have not left.
        tables: by number.

    Attributes:
        clocks: of the workers.
        handlers: of the events above.
    """

    def __init__(
        self, index: int, workers: Iterable[int], live_workers: Callable[[], Iterable[int]],
        tables: Mapping[int, ServedTable],
    ) -> None:  # fmt: skip
        self._index, self._live_workers, self._tables = index, live_workers, tables
        self._began: dict[int, Mapping[int, int]] = {}  # workers that joined: rounds, by table
        self.clocks = Clocks(workers)
        self._entries: dict[int, Entries] = {}  # by the table that stands for all that share them
        self._awaiting: list[tuple[float, CoreRequest]] = []  # steps of the slowest worker
        self.handlers: dict[type, Callable[[Any, float], Iterable[Action]]] = {
            on.Entered: self._on_entered,
            on.Joined: self._on_joined,
            on.Ticked: self._on_ticked,
            on.ClockAwaited: self._on_awaited,
        }

    @property
    def n_waiting(self) -> int:
        return len(self._awaiting)

    def requests(self) -> list[CoreRequest]:
        return [request for _, request in self._awaiting]

    def state(self) -> dict[str, Any]:
        entries = [(number, each.state()) for number, each in self._entries.items()]
        return {
            "clocks": [*self.clocks.all().items()], "most": self.clocks.most, "entries": entries,
        }  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        """Know what another server knew; who is gone, and the tables, are known already."""
        for worker, clock in state["clocks"]:
            self.clocks.tick(worker, clock)
        self.clocks.most = state["most"]
        for number, entries in state["entries"]:
            self._entries_of(number).load(entries)

    def missing(self, rank: int, chief: int) -> list[tuple[str, str, list[int]]]:
        """Return for what the requests of a rank wait: what, of which table, and which workers.

        Args:
            rank: whose requests.
            chief: the worker that sends initial values.
        """
        found = []
        for table in self._tables.values():
            for unit in table.units.values():
                waits = unit.missing(rank, self.clocks, chief)
                if waits is not None:
                    found.append((waits[0], table.name, sorted(waits[1])))
        wanted = [wanted for wanted, request in self._awaiting if request.source == rank]
        if wanted:
            found.append((f"step {min(wanted):g}", "", self.clocks.behind(min(wanted))))
        return [each for at, each in enumerate(found) if each not in found[:at]]

    def forget(self, number: int) -> None:
        self._entries.pop(number, None)

    def join(self, rank: int, clock: int, rounds: Mapping[int, int]) -> None:
        """Wait for steps of a worker, and for its entries in rounds from these on, by table."""
        self.clocks.join(rank, clock)
        self._began[rank] = rounds
        for number, entries in self._entries.items():
            entries.come(rank, rounds.get(number, 0))

    def leave(self, rank: int) -> None:
        """Wait for no step of a rank, and answer none of its requests; advance() follows."""
        self.rest(rank)
        self._awaiting = [each for each in self._awaiting if each[1].source != rank]

    def die(self, rank: int) -> dict[int, list[int]]:
        """Do as leave(); return the rounds of FirstOf that the rank was let into, by table."""
        rounds: dict[int, list[int]] = {}
        for first, entries in self._entries.items():
            let_in = entries.die(rank)
            for table, began in {first: 0, **entries.joined}.items() if let_in else ():
                rounds[table] = [number - began for number in let_in if number >= began]
        self.leave(rank)
        return rounds

    def rest(self, rank: int) -> None:
        """Wait for no step of a rank; advance() follows."""
        self.clocks.leave(rank)
        self._began.pop(rank, None)
        for entries in self._entries.values():
            entries.leave(rank)

    def advance(self) -> Iterator[Action]:
        """Yield the actions that the slowest worker's clock makes possible."""
        slowest = self.clocks.slowest
        for table in self._tables.values():
            for unit in table.units.values():
                yield from unit.due(self.clocks)
        due = [request for wanted, request in self._awaiting if slowest >= wanted]
        self._awaiting = [each for each in self._awaiting if each[0] > slowest]
        for request in due:
            none_left = slowest == math.inf
            yield Reply(request, clock=0 if none_left else int(slowest), is_late=none_left)

    def _on_entered(self, event: on.Entered, _: float) -> list[Action]:
        header = event.request.header
        entries = self._entries_of(header.table)
        is_in = entries.ask(header.origin, header.clock)
        return [Reply(event.request, clock=entries.current, is_late=not is_in)]

    def _on_joined(self, event: on.Joined, _: float) -> list[Action]:
        began = self._entries_of(event.request.header.table).join(event.table)
        return [Reply(event.request, clock=began)]

    def _entries_of(self, number: int) -> Entries:
        """Return the entries of a table. Raises KeyError, ValueError: it has none."""
        if number not in self._entries:
            table = self._tables.get(number)
            if table is None:
                raise KeyError(f"server {self._index} has no table {number}")
            if table.mode.name != "first_of":
                raise ValueError(f"{table.name}: nobody enters rounds of mode {table.mode}")
            self._entries[number] = Entries(self._live_workers(), table.mode.bound)
            for rank, rounds in self._began.items():
                self._entries[number].come(rank, rounds.get(number, 0))
        return self._entries[number]

    def _on_ticked(self, event: on.Ticked, _: float) -> Iterator[Action]:
        header, before = event.request.header, self.clocks.slowest
        self.clocks.tick(header.origin, header.clock)
        if self.clocks.slowest != before:
            yield from self.advance()
        yield Reply(event.request)

    def _on_awaited(self, event: on.ClockAwaited, _: float) -> Iterator[Action]:
        self._awaiting.append((event.request.header.clock, event.request))
        yield from self.advance()
