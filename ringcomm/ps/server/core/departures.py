"""Decides what follows when a rank leaves, rests or dies. Pure.

| event | what the rank has pushed | its requests, pauses, moments and moves | its steps |
|---|---|---|---|
| Left, still_asks | counts | go on | nobody waits for more |
| Left | counts | end | nobody waits for more |
| Died | counts if it has been carried out: its step never ended | end | nobody waits for more |

A mean that is held has what had come. The server that decides who is in a round of ps.FirstOf says
to all servers in which rounds a dead worker was (the message "without"). Nobody is let in for it:
its gradient may count in some blocks already, and nobody else may count in a part of them alone.

Servers hear of a death at different times: one may have ended a round with the gradient that
another drops. While a worker lives, the round waits for it on all of them. If none does, reads take
the values as they are, and a server whose rows move ends the round without an update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from ringcomm.ps.server.core import events as on
from ringcomm.ps.server.core.actions import Action, Reply, Send
from ringcomm.ps.server.core.migration_roles import Members, Migration
from ringcomm.ps.server.core.snapshot_moments import Moments
from ringcomm.ps.server.core.table import Table
from ringcomm.ps.server.core.unit import Unit
from ringcomm.ps.server.core.worker_progress import Progress


class Units(Protocol):
    """The units of a server, and what follows for them."""

    def units(self) -> Iterator[Unit]:
        """Yield the units of this server."""
        ...

    def flow(self, unit: Unit, actions: list[Action]) -> list[Action]:
        """Return actions, with what the end of a round or new values let go."""
        ...

    def resume(self, *numbers: int) -> Iterator[Action]:
        """Yield what follows if moments stop rounds no more."""
        ...


class Departures:
    """The ranks that are gone, for one server.

    Args:
        members: returns who takes part.
        tables: by number.
        progress: how far the workers are.
        moments: that are held.
        migration: what moves.
        units: see above.

    Attributes:
        left: ranks that ask nothing more.
        dead: those of them that died.
        rested: workers that complete no more steps.
        handlers: of the events above.
    """

    def __init__(
        self,
        members: Callable[[], Members],
        tables: Mapping[int, Table],
        *,
        progress: Progress,
        moments: Moments,
        migration: Migration,
        units: Units,
    ) -> None:
        self._members, self._tables, self._units = members, tables, units
        self._progress, self._moments, self._migration = progress, moments, migration
        self.left: set[int] = set()
        self.dead: set[int] = set()
        self.rested: set[int] = set()
        self.handlers: dict[type, Callable[[Any, float], Iterable[Action]]] = {
            on.Left: self._on_left,
            on.Died: lambda event, now: self._die(event.rank, now),
            on.ServerMessage: self._on_message,
        }

    def lose(self, left: Iterable[int], dead: Iterable[int], rested: Iterable[int]) -> None:
        """Know who is gone from the start, before there is a table."""
        self.left.update(left)
        self.dead.update(dead)
        self.rested.update(rested)
        for rank in self.left | self.rested:
            self._progress.rest(rank)

    def voids(self, event: on.Event) -> bool:
        """Return True for a request of a rank that died."""
        request = getattr(event, "request", None)
        return request is not None and request.source in self.dead

    def apply_to(self, unit: Unit) -> None:
        """Exempt a new unit from waiting for ranks that are gone."""
        for rank in self.left:
            (unit.die if rank in self.dead else unit.leave)(rank)
        for rank in self.rested:
            unit.rest(rank)

    def _on_left(self, event: on.Left, now: float) -> Iterator[Action]:
        rank, rests = event.rank, event.still_asks
        (self.rested if rests else self.left).add(rank)
        (self._progress.rest if rests else self._progress.leave)(rank)
        for unit in [*self._units.units()]:
            yield from self._flow(unit, (unit.rest if rests else unit.leave)(rank))
        if rests:
            yield from self._progress.advance()
            yield from self._units.resume()
        else:
            yield from self._end_what_it_owned(rank, now)
        if event.request is not None:
            yield Reply(event.request)

    def _die(self, rank: int, now: float) -> Iterator[Action]:
        has_left = rank in self.left
        if rank in self.dead or has_left:
            self.dead.add(rank)
            return
        self.dead.add(rank)
        if rank not in {*self._members().workers, *self._members().evaluators}:
            return  # a server, whose part is lost; see core.recovery
        self.left.add(rank)
        for table, rounds in self._progress.die(rank).items():
            message = {"do": "without", "table": table, "worker": rank, "rounds": rounds}
            yield from (Send(server, message) for server in self._members().server_numbers)
        for unit in [*self._units.units()]:
            yield from self._flow(unit, unit.die(rank))
        yield from self._end_what_it_owned(rank, now)

    def _end_what_it_owned(self, rank: int, now: float) -> Iterator[Action]:
        owned = self._moments.owned_by(rank)
        for number in owned:
            yield from self._moments.release(number)
        yield from self._units.resume(*owned)
        yield from self._progress.advance()
        yield from self._migration.leave(rank, now, is_dead=rank in self.dead)

    def _on_message(self, event: on.ServerMessage, now: float) -> Iterator[Action]:
        message = event.message
        if message["do"] != "without":
            yield from self._migration.on_message(event, now)
            return
        yield from self._die(message["worker"], now)  # first: what it has sent counts no more
        table = self._tables.get(message["table"])  # None: it was closed meanwhile
        if table is None:
            return
        for number in message["rounds"]:
            table.without.setdefault(number, set()).add(message["worker"])
        for unit in [*table.units.values()]:
            if unit.rounds is not None:
                yield from self._flow(unit, unit.rounds.advance())

    def _flow(self, unit: Unit, actions: list[Action]) -> Iterator[Action]:
        yield from self._units.flow(unit, actions)
        yield from self._migration.on_progress(unit.key)
