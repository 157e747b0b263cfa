"""Decides what follows when a rank leaves, rests, dies or joins. Pure.

| event | what the rank has pushed | its requests, pauses, moments and moves | its steps |
|---|---|---|---|
| Left, still_asks | counts | go on | nobody waits for more |
| Left | counts | end | nobody waits for more |
| Died | counts if it has been carried out: its step never ended | end | nobody waits for more |
| TookPlace | counts in rounds from a given one on | | all wait for its next |

A mean that is held has what had come. The server that decides who is in a round of ps.FirstOf says
to all servers in which rounds a dead worker was (the order WITHOUT). Nobody is let in for it:
its gradient may count in some blocks already, and nobody else may count in a part of them alone.

Servers hear of a death at different times: one may have ended a round with the gradient that
another drops. While a worker lives, the round waits for it on all of them. If none does, reads take
the values as they are, and a server whose rows move ends the round without an update.

A worker that joins begins on all servers in the same round; see
ringcomm.ps.placement.replacement_workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from ringcomm.ps.control.commands import WITHOUT
from ringcomm.ps.placement.replacement_workers import Beginning, Newcomers, WorkerMembers
from ringcomm.ps.server.core import events as on
from ringcomm.ps.server.core.actions import Action, Reply, Tell
from ringcomm.ps.server.core.core_table import ServedTable
from ringcomm.ps.server.core.migration import Migration
from ringcomm.ps.server.core.unit import Unit
from ringcomm.ps.server.core.worker_clocks import WorkerProgress


class DepartureUnits(Protocol):
    """The units of a server, and what follows for them."""

    def units(self) -> Iterator[Unit]: ...

    def flow(self, unit: Unit, actions: list[Action]) -> list[Action]: ...

    def resume(self, *numbers: int) -> Iterator[Action]: ...


class Departures:
    """The ranks that are gone, for one server.

    Args:
        members: returns who takes part.
        tables: by number.
        progress: how far the workers are.
        migration: what moves.
        units: see above.
        newcomers: who has joined.

    Attributes:
        left: ranks that ask nothing more.
        dead: those of them that died.
        rested: workers that complete no more steps.
        handlers: of the events above.
    """

    def __init__(
        self,
        members: Callable[[], WorkerMembers],
        tables: Mapping[int, ServedTable],
        *,
        progress: WorkerProgress,
        migration: Migration,
        units: DepartureUnits,
        newcomers: Newcomers,
    ) -> None:
        self._members, self._tables, self._units = members, tables, units
        self._newcomers = newcomers
        self._progress, self._migration = progress, migration
        self.left: set[int] = set()
        self.dead: set[int] = set()
        self.rested: set[int] = set()
        self.handlers: dict[type, Callable[[Any, float], Iterable[Action]]] = {
            on.Left: self._on_left,
            on.Died: lambda event, now: self._die(event.rank, now),
            on.Without: self._on_without,
            on.TookPlace: self._on_took_place,
            on.Retracted: self._on_retracted,
            on.HowFar: self._on_how_far,
        }

    def lose(self, left: Iterable[int], dead: Iterable[int], rested: Iterable[int]) -> None:
        """Know who is gone from the start, before there is a table."""
        self.left.update(left)
        self.dead.update(dead)
        self.rested.update(rested)
        for rank in self.left | self.rested:
            self._progress.rest(rank)

    def voids(self, event: on.Event) -> bool:
        request = getattr(event, "request", None)
        return request is not None and request.source in self.dead

    def apply_to(self, unit: Unit) -> None:
        """Exempt a new unit from waiting for ranks that are gone."""
        for rank, beginning in self._newcomers.began.items():
            unit.join(rank, beginning.rounds)
        for rank in self.left:
            (unit.die if rank in self.dead else unit.leave)(rank)
        for rank in self.rested:
            unit.rest(rank)

    def _on_left(self, event: on.Left, now: float) -> Iterator[Action]:
        rank, rests = event.rank, event.still_asks
        (self.rested if rests else self.left).add(rank)
        self._newcomers.is_ending |= rank in self._members().workers
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
        members = self._members()
        if rank not in {*members.workers, *members.evaluators}:
            return  # a server, see commands.Recover; or one that stood by
        self._newcomers.fallen[rank] = None
        self.left.add(rank)
        for table, rounds in self._progress.die(rank).items():
            for server in self._members().server_numbers:
                yield Tell(server, True, WITHOUT, [table, rank, rounds])
        for unit in [*self._units.units()]:
            yield from self._flow(unit, unit.die(rank))
        yield from self._end_what_it_owned(rank, now)

    def _end_what_it_owned(self, rank: int, now: float) -> Iterator[Action]:
        yield from self._units.resume()
        yield from self._progress.advance()
        yield from self._migration.leave(rank, now, is_dead=rank in self.dead)

    # --- newcomers ------------------------------------------------------------------------------
    @property
    def is_over(self) -> bool:
        """True once all clients have left, and nobody comes in the place of one that died."""
        left = self.left
        if not left:  # as a rule; servers ask this at each poll
            return False
        members = self._members()
        if not left.issuperset(members.workers) or not left.issuperset(members.evaluators):
            return False
        return not self._newcomers.may_come({*members.waiting} - left - self.dead)

    def keep(self, taken: Iterable[Iterable[Any]]) -> None:
        """Count these newcomers and no others, as the leader does, once all begin anew."""
        for rank in self._newcomers.workers:
            self._progress.rest(rank)
        self._newcomers.keep(taken)
        self.count_newcomers()

    def load_newcomers(self, state: dict[str, Any]) -> None:
        self._newcomers.load(state)
        self.count_newcomers()

    def count_newcomers(self) -> None:
        """Await the steps of the newcomers that live."""
        for rank, beginning in self._newcomers.began.items():
            if rank not in self.left | self.rested:
                self._progress.join(rank, beginning.clock, beginning.rounds)

    def _on_took_place(self, event: on.TookPlace, _: float) -> Iterator[Action]:
        newcomer, beginning = event.newcomer, event.beginning
        rank = newcomer.rank
        is_late = event.beside in self.left or rank in self.dead
        if is_late or not self._may_begin(beginning):
            yield Reply(event.request, content={"is_late": True})
            return
        self._newcomers.take(newcomer, beginning)
        if beginning is not None:
            self._progress.join(rank, beginning.clock, beginning.rounds)
            for unit in [*self._units.units()]:
                yield from self._flow(unit, unit.join(rank, beginning.rounds))
        yield Reply(event.request)

    def _may_begin(self, beginning: Beginning | None) -> bool:
        """Return True if no round is over, or its mean is held, that a newcomer is to be in."""
        return beginning is None or all(
            unit.rounds is None
            or unit.mode.name == "first_of"  # it may be late, as any worker
            or unit.rounds.at <= (beginning.rounds.get(unit.key[0], 0), False)
            for unit in self._units.units()
        )

    def _on_retracted(self, event: on.Retracted, now: float) -> Iterator[Action]:
        rank = event.rank
        self._newcomers.retract(rank)
        self._progress.rest(rank)
        for unit in [*self._units.units()]:
            yield from self._flow(unit, unit.rest(rank))
        yield from self._end_what_it_owned(rank, now)
        yield Reply(event.request)

    def _on_how_far(self, event: on.HowFar, now: float) -> Iterator[Action]:
        for rank in event.dead:  # first: what they have sent counts no more
            yield from self._die(rank, now)
        most = self._progress.clocks.most
        begins = Beginning(most, self._rounds(), most, most).to_json()
        is_ending = self._newcomers.is_ending  # a worker has left here before it died
        yield Reply(event.request, content={"begins": None if is_ending else begins})

    def _rounds(self) -> dict[int, int]:
        """Return how many rounds are over, by table."""
        rounds: dict[int, int] = {}
        for unit in self._units.units():
            if unit.rounds is not None:
                table = unit.key[0]
                rounds[table] = max(rounds.get(table, 0), unit.rounds.current)
        return rounds

    def _on_without(self, event: on.Without, now: float) -> Iterator[Action]:
        yield from self._die(event.worker, now)  # first: what it has sent counts no more
        table = self._tables.get(event.table)  # None: it was closed meanwhile
        if table is None:
            return
        for number in event.rounds:
            table.without.setdefault(number, set()).add(event.worker)
        for unit in [*table.units.values()]:
            if unit.rounds is not None:
                yield from self._flow(unit, unit.rounds.advance())

    def _flow(self, unit: Unit, actions: list[Action]) -> Iterator[Action]:
        yield from self._units.flow(unit, actions)
        yield from self._migration.on_progress(unit.key)
