"""The protocol by which partitions move from server to server while everybody works. Pure.

The leader carries out one migration at a time: partitions of one table that get a new owner in one
view. All messages go between servers, but for NOTICE and NOTED.

| message | from -> to | the receiver |
|---|---|---|
| freeze | leader -> participants | keeps requests for the unit from now on, and ends no round |
| answer to freeze | participant -> leader | how many rounds are over, who is in the next |
| drain | leader -> participants | goes as far as any: ends its rounds, holds the next mean |
| give | leader -> sources | sends its partitions to their new owners |
| take | source -> destination | installs a copy: values, state, whose pushes are in it |
| taken | destination -> source | |
| answer to give | source -> leader | which have moved, and why others have not |
| commit | leader -> all servers | notes the owners; sends back what was kept or waits |
| thaw | leader -> participants | instead, if nothing could move: goes on with what was kept |
| NOTICE | leader -> clients | send again what comes back |
| NOTED | client -> all servers | has done so: the source frees memory, clocks are believed again |

Participants are the servers whose units must be at one point: of a dense table the source and the
destination of a partition; of a hash table all servers, for each round is one of the whole table.
So a view begins between two rounds, on all of them at the same one. A contribution is either part
of a round in the view it was made in, everywhere, or it is made again in the next view.

The number of the view in which a unit moved last is its epoch. A request that names another epoch
is never carried out, so none overtakes those before it on its way round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from ringcomm.ps.placement.replacement_workers import WorkerMembers
from ringcomm.ps.server.core import events as on
from ringcomm.ps.server.core.actions import Action, Close, CoreRequest, Key, Notify, Open, Reply
from ringcomm.ps.server.core.core_table import ServedTable
from ringcomm.ps.server.core.migration_leader import Leader
from ringcomm.ps.server.core.migration_participant import Participant
from ringcomm.ps.server.core.unit import Unit


class MovableUnits(Protocol):
    """More that the core knows of units."""

    def clients(self) -> list[int]: ...

    def clocks_of(self, unit: Unit) -> dict[int, int]: ...

    def flow(self, unit: Unit, actions: list[Action]) -> list[Action]: ...


class Migration:
    """The events of moves and pauses, for one server.

    Args:
        index: of the server.
        members: returns who takes part.
        tables: by number.
        units: see above.
    """

    def __init__(
        self,
        index: int,
        members: Callable[[], WorkerMembers],
        tables: Mapping[int, ServedTable],
        units: MovableUnits,
    ) -> None:
        self._index, self._members, self._tables, self._units = index, members, tables, units
        self._settling: list[CoreRequest] = []
        self._leader = Leader(lambda: members().server_numbers, units.clients, tables)
        self._participant = Participant(index, lambda: members().leader, tables)
        self.keeps = self._participant.keeps
        self.add_unit = self._participant.add
        self.on_progress = self._participant.on_progress
        self.pause, self.resume = self._leader.pause, self._leader.resume
        self.handlers: dict[type, Callable[[Any, float], Iterable[Action]]] = {
            on.Settling: self._on_settling,
            on.MovesAsked: lambda event, _: self._leader.ask(
                event.request, event.moves, changes_places=event.changes_places
            ),
            on.Noted: self._on_noted,
            on.Taken: lambda event, _: self._participant.taken(*event),
            on.Finished: self._on_finished,
            on.TimePassed: lambda _, now: self.look(now),
        }

    @property
    def is_busy(self) -> bool:
        """True while a unit stands still here."""
        return self._participant.is_busy

    def notices(self) -> list[Action]:
        """Return what tells clients of the moves that they have not noted; for the leader."""
        if self._members().leader != self._index:
            return []
        keys = {key for key, _, _ in self._participant.state()}
        return [
            Notify(self._units.clients(), key)
            for key in sorted(keys)
            if not self._leader.is_moving(key)  # it tells them once it is over
        ]

    @property
    def is_quiet(self) -> bool:
        """True if nothing moves, and nobody has a pause; for the leader."""
        return self._leader.is_quiet

    @property
    def changes_places(self) -> bool:
        """True while partitions leave servers that have no place any more; for the leader."""
        return self._leader.changes_places

    @property
    def is_under_way(self) -> bool:
        return self.is_busy or self._participant.awaits_time or not self._leader.is_quiet

    def state(self) -> dict[str, Any]:
        """Return what is known of moves that are over, as load() takes it."""
        return {"epoch": self._leader.epoch, "unnoted": self._participant.state()}

    def load(self, state: dict[str, Any]) -> None:
        self._leader.epoch = state["epoch"]
        self._participant.load(state["unnoted"])

    def forget(self, number: int) -> None:
        self._leader.forget(number)

    @property
    def awaits_time(self) -> bool:
        return self._participant.awaits_time or self._leader.awaits_time

    @property
    def n_waiting(self) -> int:
        return len(self._settling)

    def look(self, now: float) -> Iterator[Action]:
        yield from self._participant.look(now, self._units.clocks_of)
        self._leader.look(now)

    def leave(self, rank: int, now: float, *, is_dead: bool) -> Iterator[Action]:
        """Keep nothing for a rank that has left, and wait for nothing of it."""
        if is_dead:
            self._participant.forget(rank)
        self._settling = [each for each in self._settling if each.source != rank]
        yield from self._participant.leave(rank)
        yield from self._leader.leave(rank)
        yield from self.look(now)

    def _on_settling(self, event: on.Settling, _: float) -> list[Action]:
        self._settling.append(event.request)
        return self._settled()

    def _settled(self) -> list[Action]:
        if self._participant.is_busy:
            return []
        settled, self._settling = self._settling, []
        return [Reply(each) for each in settled]

    def _on_noted(self, event: on.Noted, now: float) -> Iterator[Action]:
        yield from self._participant.noted(event.key, event.epoch, event.rank)
        table = self._tables.get(event.key[0])
        unit = None if table is None else table.units.get(event.key[1])
        if unit is not None:
            yield from self._units.flow(unit, [])
        yield from self._participant.look(now, self._units.clocks_of)

    def on_message(self, event: on.ServerMessage, now: float) -> Iterator[Action]:
        server, message = event
        key, what = (message["table"], message["unit"]), message["do"]
        if what == "answer":
            yield from self._leader.answered(server, message, now)
        elif what == "freeze":
            self._participant.freeze(key, now)
            yield Close(key)
            yield from self._participant.look(now, self._units.clocks_of)
        elif what == "drain":
            unit = self._tables[key[0]].units.get(key[1])
            rounds, is_held = message["at"]
            drained = self._participant.drain(key, (rounds, is_held))
            yield from drained if unit is None else self._units.flow(unit, drained)
        elif what == "give":
            yield from self._participant.give(key, message["moves"])
        elif what == "commit":
            yield from self._participant.commit(key, message, self._units.clients())
            yield from self._reopened(key)
        else:
            yield from self._participant.thaw(key)
            yield from self._reopened(key)
        yield from self._settled()

    def _reopened(self, key: Key) -> Iterator[Action]:
        table = self._tables[key[0]]
        if key[1] in table.units:
            yield Open(key, table.epoch_of(key))

    def _on_finished(self, event: on.Finished, _: float) -> Iterator[Action]:
        unit = self._tables[event.key[0]].units.get(event.key[1])
        if unit is not None:
            yield from self._units.flow(unit, self._participant.settled(unit))
