"""All decisions of one server: handle(event) returns the actions to carry out. Pure.

| what | decided in |
|---|---|
| which requests are carried out, kept, or sent to another server | Core, core.migration |
| pushes, reads and what waits, of one unit | core.unit |
| rounds | core.rounds |
| steps of workers, places in rounds | core.worker_clocks |
| snapshots | core.snapshot_moments |
| moves | core.migration, control.commands |
| whose turn it is: moves, or pauses | control.move_lock |
| commands, which all who live carry out | control.agreement, control.commands |
| what follows when a rank leaves, dies or joins | core.departures |
| who takes the place of one that died | placement.replacement_workers |

Whatever this server owns for a rank (a pause, a moment, moves, a request that waits, a place in a
round) ends with Left, or with Died: each part has leave(rank), and some have die(rank).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from ringcomm.ps.control.agreement import Agreement, Member
from ringcomm.ps.control.commands import Follow, Migrate, Recovered, StandBy
from ringcomm.ps.control.move_lock import MoveLock
from ringcomm.ps.placement.replacement_workers import Newcomer, Newcomers, Present, WorkerMembers
from ringcomm.ps.protocol.frames import FrameKind
from ringcomm.ps.server.core import events as on
from ringcomm.ps.server.core.actions import (
    Action,
    Carry,
    End,
    Hold,
    Key,
    Notify,
    Open,
    Redirect,
    Reply,
    Retry,
)
from ringcomm.ps.server.core.core_table import ServedTable
from ringcomm.ps.server.core.departures import Departures
from ringcomm.ps.server.core.migration import Migration
from ringcomm.ps.server.core.snapshot_moments import Moments
from ringcomm.ps.server.core.unit import Unit
from ringcomm.ps.server.core.worker_clocks import WorkerProgress

_PARTINGS: Final = frozenset((on.Left, on.Died, on.ProcessDied))
_OF_VALUES: Final = frozenset(  # no command waits for one of these
    (
        on.Arrived, on.Initialized, on.Assigned, on.Contributed, on.Released, on.Read, on.Decided,
        on.Entered, on.Joined, on.Ticked, on.ClockAwaited,
    )
)  # fmt: skip


class Core:
    """The decisions of one server, and the state that they depend on.

    Args:
        index: of this server.
        members: returns who takes part at first.

    Attributes:
        name: of the job; see Server.job.
        tables: by number.
        newcomers: who has joined, or is going to.
        left: ranks that ask nothing more.
        dead: those of them that died.
        rested: workers that complete no more steps.
        progress: how far the workers are.
        clocks: of the workers.
        moments: that are held.
        migration: what moves here.
        move_lock: whose turn it is, if it leads.
        departures: what follows when somebody leaves.
        agreement: the commands that it runs, if it leads.
        recovered: the last recovery that was done.
    """

    def __init__(self, index: int, members: Callable[[], WorkerMembers]) -> None:
        self._index, self.newcomers, self.name = index, Newcomers(), ""
        self._now = 0.0
        present = Present(members, self.newcomers)
        self._members: Callable[[], Present] = lambda: present
        self.tables: dict[int, ServedTable] = {}
        self._begin()
        self.recovered: Recovered | None = None
        self.agreement = Agreement(self, lambda: present.n_losses)

    def _begin(self) -> None:
        index, members = self._index, self._members
        self.moments = Moments()
        self.progress = WorkerProgress(
            index, members().workers, lambda: self.live_workers, self.tables
        )
        self.clocks = self.progress.clocks
        self.migration = Migration(index, self.tables, self)
        self.move_lock = MoveLock(lambda: self._now)
        self.departures = departures = Departures(
            members, self.tables, progress=self.progress, migration=self.migration, units=self,
            newcomers=self.newcomers,
        )  # fmt: skip
        self.left, self.dead, self.rested = departures.left, departures.dead, departures.rested
        self._handlers: dict[type, Callable[[Any, float], Iterable[Action]]] = {
            **self.migration.handlers,
            **self.progress.handlers,
            on.Arrived: self._on_arrived,
            on.Initialized: self._on_initialized,
            on.Assigned: lambda event, _: self.unit_of(event.key).assign(
                event.request, event.payload
            ),
            on.Contributed: self._on_pushed,
            on.Released: self._on_released,
            on.Read: lambda event, _: self.unit_of(event.key).read(event.request, self.clocks),
            on.Decided: self._on_decided,
            on.Loaded: self._on_loaded,
            on.Stopped: lambda event, _: [
                Reply(event.request, content=self.moments.stop(event.number, self.units()))
            ],
            on.Held: self._on_held,
            on.MomentEnded: self._on_let,
            on.Asked: self._on_command,
            on.Begun: self._on_command,
            on.Answered: self._on_command,
            on.StepDone: self._on_command,
            on.ProcessDied: lambda event, _: [],
            on.TimePassed: self._on_time_passed,
            **departures.handlers,
        }

    def handle(self, event: on.Event, now: float) -> list[Action]:
        """Return the actions that follow from an event, in order.

        Args:
            event: see ringcomm.ps.server.core.events.
            now: the time in seconds, which never goes back.

        Raises:
            KeyError, ValueError: the request makes no sense here; nothing has changed.
        """
        if self.dead and self.departures.voids(event):
            return []
        self._now = now
        if type(event) in _PARTINGS and not getattr(event, "still_asks", False):
            self.agreement.lose(Member(event.rank))  # type: ignore[union-attr]
        actions = self._handlers[type(event)](event, now)
        done = actions if type(actions) is list else list(actions)
        if self.agreement.is_running and type(event) not in _OF_VALUES:
            done = done + self.agreement.due()
        return done

    def restart(self) -> None:
        """Know no table, nor anything that is under way; who is gone is still gone."""
        left, dead, rested = {*self.left}, {*self.dead}, {*self.rested}
        follow = self.agreement.asked(Follow)
        gives_up = [
            x for x in follow if isinstance(x.command, Follow) and not x.command.keeps_place
        ]
        self.newcomers.restart({each.request.source for each in gives_up})
        self.agreement.forget_tables()
        self.tables.clear()
        self._begin()
        self.departures.lose(left, dead, rested)
        self.departures.count_newcomers()

    @property
    def awaits_time(self) -> bool:
        """True if TimePassed may have a consequence."""
        return self.migration.awaits_time or self.move_lock.awaits_time

    def _on_time_passed(self, event: on.TimePassed, now: float) -> Iterator[Action]:
        del event
        self.move_lock.look()
        yield from self.migration.look(now)

    # --- tables ---------------------------------------------------------------------------------
    def add_table(self, table: ServedTable) -> None:
        """Know a table; add_unit() follows for what this server has of it."""
        self.tables[table.number] = table

    def add_unit(self, unit: Unit) -> list[Action]:
        table = self.tables[unit.key[0]]
        table.units[unit.key[1]] = unit
        self.departures.apply_to(unit)
        if unit.rounds is not None:
            unit.rounds.without = table.without
        self.moments.stop_new(unit)
        self.migration.add_unit(unit)
        return [] if unit.stands_still else [Open(unit.key, table.epoch_of(unit.key))]

    def drop_table(self, number: int) -> None:
        del self.tables[number]
        self.progress.forget(number)

    def units(self) -> Iterator[Unit]:
        for table in self.tables.values():
            yield from table.units.values()

    def unit_of(self, key: Key) -> Unit:
        return self.tables[key[0]].units[key[1]]

    @property
    def live_workers(self) -> set[int]:
        return {*self._members().workers} - self.left - self.rested

    def clients(self) -> list[int]:
        members = self._members()
        return sorted({*members.workers, *members.evaluators} - self.left)

    # --- commands, see ringcomm.ps.control.commands.Job -------------------------------------------
    @property
    def workers(self) -> set[int]:
        return {*self._members().workers} - self.left

    @property
    def evaluators(self) -> set[int]:
        return {*self._members().evaluators} - self.left

    @property
    def standing_by(self) -> set[int]:
        return {*self._members().waiting} - self.left - self.dead

    @property
    def ranks(self) -> set[int]:
        return {*self._members().ranks} - self.left - self.dead

    @property
    def server_numbers(self) -> tuple[int, ...]:
        return self._members().server_numbers

    def next_newcomer(self) -> Newcomer | None:
        """Return who gets the next place, if one is free and somebody waits for it."""
        if not self.newcomers.fallen:
            return None  # as a rule
        waiting = {
            each.request.source: each.command.evaluates
            for each in self.agreement.asked(StandBy)
            if isinstance(each.command, StandBy)
        }
        return self.newcomers.next(waiting, self._members())

    @property
    def following(self) -> set[int]:
        """The ranks that wait for others to recover; a newcomer that has not begun does."""
        return {each.request.source for each in self.agreement.asked(Follow)}

    @property
    def other_servers(self) -> list[int]:
        return [n for n in self._members().server_numbers if n != self._index]

    def _on_command(
        self, event: on.Asked | on.Begun | on.Answered | on.StepDone, _: float
    ) -> list[Action]:
        if isinstance(event, on.Asked):
            self.agreement.ask(*event)
        elif isinstance(event, on.Begun):
            self.agreement.ask(None, event.command)
        elif isinstance(event, on.Answered):
            self.agreement.answered(*event)
        else:
            self.agreement.performed(*event)
        return []  # due() follows

    @property
    def changes_places(self) -> bool:
        """True while partitions leave servers that have no place any more; for the leader."""
        moves = (each for each in self.agreement.commands() if isinstance(each, Migrate))
        return any(each.changes_places for each in moves)

    def notices(self) -> list[Action]:
        """Return what tells clients of the moves that they have not noted; for the leader."""
        if self._members().leader != self._index:
            return []
        keys = {key for key, _, _ in self.migration.state()}
        keys -= {self.move_lock.moving}  # the command tells them once it is over
        return [Notify(self.clients(), key) for key in sorted(keys)]

    def clocks_of(self, unit: Unit) -> dict[int, int]:
        """Return how many steps of each worker are in a unit for sure."""
        return {w: min(clock, unit.fence.get(w, clock)) for w, clock in self.clocks.all().items()}

    @property
    def n_waiting(self) -> int:
        waiting = sum(len(unit.waiting) for unit in self.units())
        waiting += self.progress.n_waiting + self.migration.n_waiting
        asked = self.agreement.asked()
        return waiting + sum(not isinstance(each.command, StandBy) for each in asked)

    # --- requests for a unit --------------------------------------------------------------------
    def admits(self, key: Key, view: int) -> bool:
        """Return True if Arrived would say Carry, and no more: that is so for most requests."""
        table = self.tables[key[0]]
        is_here = key[1] in table.units and view == table.epochs.get(key[1], 0)
        return is_here and not self.migration.is_busy

    def _on_arrived(self, event: on.Arrived, _: float) -> list[Action]:
        request, key = event.request, event.key
        table = self.tables[key[0]]
        epoch = table.epoch_of(key)
        is_old = request.header.view < epoch  # it would hold up those that are not
        if not is_old and self.migration.keeps(key, request, round_of=event.round_of):
            return []
        unit = table.units.get(key[1])
        if unit is None or request.header.view != epoch:
            is_push = request.header.kind == FrameKind.PUSH
            if unit is not None and is_push and unit.came_before(request):
                return unit.answer_again(request)
            return [Redirect(request)]
        return [Carry(request)]

    def flow(self, unit: Unit, actions: list[Action]) -> list[Action]:
        """Return actions, with what the end of a round or new values let go."""
        if not actions and not len(unit.waiting):
            return actions  # as a rule
        flowing: list[Action] = []
        for action in actions:
            flowing.append(action)
            if type(action) is End and self.moments.are_held:
                flowing += self.moments.on_end(unit.key, action.number)
            if type(action) in (End, Hold) and self.migration.is_busy:
                flowing += self.migration.on_progress(unit.key)
        return flowing + unit.due(self.clocks)

    def _on_initialized(self, event: on.Initialized, _: float) -> list[Action]:
        unit = self.unit_of(event.key)
        return self.flow(unit, unit.initialize(event.request, event.payload))

    def _on_pushed(self, event: on.Contributed, _: float) -> list[Action]:
        key, request, payload, is_held, lets_in = event
        unit = self.unit_of(key)
        return self.flow(unit, unit.push(request, payload, is_held=is_held, lets_in=lets_in))

    def _on_released(self, event: on.Released, _: float) -> list[Action]:
        unit = self.unit_of(event.key)
        return self.flow(unit, unit.release(event.request, event.payload, drops=event.drops))

    def _on_decided(self, event: on.Decided, _: float) -> Iterator[Action]:
        unit, request = self.unit_of(event.key), event.request
        if not unit.is_ready:  # what it is about waits, too
            unit.waiting.add(0, Retry(request))
            return
        assert unit.rounds is not None
        header = request.header
        decided = unit.rounds.decide(header.origin, header.clock, is_in=event.is_in)
        yield from self.flow(unit, decided)
        yield Reply(request, clock=unit.rounds.current)

    def _on_loaded(self, event: on.Loaded, _: float) -> Iterator[Action]:
        unit = self.unit_of(event.key)
        unit.is_ready = True
        yield from unit.due(self.clocks)

    # --- snapshots ------------------------------------------------------------------------------
    def _on_held(self, event: on.Held, _: float) -> Iterator[Action]:
        yield from self.moments.hold(event.number, event.request, self.units(), event.rounds)
        yield from self.resume(event.number)

    def _on_let(self, event: on.MomentEnded, _: float) -> Iterator[Action]:
        yield from self.moments.release(event.number, keeps_copies=event.keeps_copies)
        yield from self.resume(event.number)
        yield Reply(event.request)

    def resume(self, *numbers: int) -> Iterator[Action]:
        """Yield what follows if moments stop rounds no more."""
        resumed = self.moments.resume(*numbers)
        for unit in [*self.units()] if resumed else ():
            if unit.rounds is not None:
                yield from self.flow(unit, unit.rounds.unlimit(*resumed))
        if not self.live_workers:
            yield from self.moments.take_as_they_are()
