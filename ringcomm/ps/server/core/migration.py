"""One server's part in moves: units stand still, leave and arrive, while everybody works. Pure.

The server that leads carries out one migration at a time (ringcomm.ps.control.commands.Migrate):
partitions of one table that get a new owner in one view.

| message | from -> to | the receiver |
|---|---|---|
| FREEZE | leader -> participants | keeps requests for the unit from now on, and ends no round |
| its answer | participant -> leader | how many rounds are over, who is in the next |
| DRAIN | leader -> participants | goes as far as any: ends its rounds, holds the next mean |
| GIVE | leader -> sources | sends its partitions to their new owners |
| TAKE | source -> destination | installs a copy: values, state, whose pushes are in it |
| answer to GIVE | source -> leader | which have moved, and why others have not |
| COMMIT | leader -> all servers | notes the owners; sends back what was kept or waits |
| THAW | leader -> participants | instead, if nothing could move: goes on with what was kept |
| MOVED | leader -> clients | send again what comes back |
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
from dataclasses import dataclass, field
from typing import Any, Protocol

from ringcomm.ps.control.commands import COMMIT, DRAIN, FREEZE, GIVE
from ringcomm.ps.server.core import events as on
from ringcomm.ps.server.core.actions import (
    Action,
    Close,
    CoreRequest,
    Export,
    Forget,
    Free,
    Key,
    Moved,
    Open,
    Redirect,
    Reply,
    Retire,
    Retry,
    Settled,
)
from ringcomm.ps.server.core.core_table import ServedTable
from ringcomm.ps.server.core.rounds import Rounds
from ringcomm.ps.server.core.unit import Unit

_MOVE = 0  # in whose name rounds stop; moments have higher numbers
_NOWHERE = (0, False)
_FAIR_S = 0.5  # a client that computes for so long is not waited for


class MovableUnits(Protocol):
    """More that the core knows of units."""

    def clients(self) -> list[int]: ...

    def clocks_of(self, unit: Unit) -> dict[int, int]: ...

    def flow(self, unit: Unit, actions: list[Action]) -> list[Action]: ...


@dataclass
class _Frozen:
    """A unit that stands still.

    Attributes:
        kept: requests, in the order in which they came.
        origins: who has a request that is kept.
        at: how far to go: rounds that are over, and whether the next mean is held; None: nothing is
            carried out.
        order: to go so far.
    """

    kept: list[Any] = field(default_factory=list)
    origins: set[int] = field(default_factory=set)
    at: tuple[int, bool] | None = None
    order: CoreRequest | None = None


@dataclass
class _Giving:
    """Partitions on their way from here."""

    order: CoreRequest
    dests: dict[int, int]  # of those that have not been taken
    moved: list[tuple[int, int]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Migration:
    """The part of one server in migrations of units.

    Args:
        index: of the server.
        tables: by number.
        units: see above.
    """

    def __init__(self, index: int, tables: Mapping[int, ServedTable], units: MovableUnits) -> None:
        self._index, self._tables, self._units = index, tables, units
        self._settling: list[CoreRequest] = []
        self._frozen: dict[Key, _Frozen] = {}
        self._giving: dict[Key, _Giving] = {}
        self._unnoted: dict[tuple[Key, int], set[int]] = {}  # by epoch: clients
        self._postponed: list[tuple[float, Key, CoreRequest]] = []  # until when, at the latest
        self.handlers: dict[type, Callable[[Any, float], Iterable[Action]]] = {
            on.Settling: self._on_settling,
            on.MoveOrdered: self._on_ordered,
            on.Noted: self._on_noted,
            on.Taken: lambda event, _: self._taken(*event),
            on.Finished: self._on_finished,
        }

    @property
    def is_busy(self) -> bool:
        """True while a unit stands still here."""
        return bool(self._frozen)

    @property
    def is_under_way(self) -> bool:
        return self.is_busy or self.awaits_time

    @property
    def awaits_time(self) -> bool:
        return bool(self._postponed)

    @property
    def n_waiting(self) -> int:
        return len(self._settling)

    # --- what is known of moves that are over -----------------------------------------------------
    def state(self) -> list[tuple[Key, int, list[int]]]:
        """Return the clients that have not noted moves: key, epoch, clients."""
        return [(key, epoch, sorted(ranks)) for (key, epoch), ranks in self._unnoted.items()]

    def load(self, state: Iterable[tuple[Iterable[int], int, list[int]]]) -> None:
        for (table, unit), epoch, ranks in state:
            self._unnoted[(table, unit), epoch] = {*ranks}

    def _on_noted(self, event: on.Noted, now: float) -> Iterator[Action]:
        """Take note that a client has sent again all that came back from the move of an epoch."""
        rank, key, epoch = event
        table = self._tables.get(key[0])  # None: it was closed meanwhile
        unit = None if table is None else table.units.get(key[1])
        if table is not None and unit is not None and table.epochs.get(key[1]) == epoch:
            unit.fence.pop(rank, None)
        for of, each in [*self._unnoted]:
            if of == key and each <= epoch:
                yield from self._strike_off(key, each, rank)
        if unit is not None:
            yield from self._units.flow(unit, [])
        yield from self.look(now)

    def _strike_off(self, key: Key, epoch: int, rank: int) -> list[Action]:
        unnoted = self._unnoted.get((key, epoch))
        if unnoted is None:
            return []
        unnoted.discard(rank)
        return [] if unnoted else self._free(key, epoch)

    def _free(self, key: Key, epoch: int) -> list[Action]:
        del self._unnoted[key, epoch]
        return [Free(key, epoch)]

    def leave(self, rank: int, now: float, *, is_dead: bool) -> Iterator[Action]:
        """Keep nothing for a rank that has left, and wait for nothing of it."""
        if is_dead:
            for frozen in self._frozen.values():
                frozen.kept = [each for each in frozen.kept if each.source != rank]
        self._settling = [each for each in self._settling if each.source != rank]
        for key, epoch in [*self._unnoted]:
            yield from self._strike_off(key, epoch, rank)
        yield from self.look(now)

    # --- requests -------------------------------------------------------------------------------
    def keeps(self, key: Key, request: Any, *, round_of: int | None) -> bool:
        """Return True if a request is for a unit that stands still; it is looked at later.

        Args:
            key: of the unit.
            request: see above.
            round_of: number of the round that it contributes to; None: it does not.
        """
        frozen = self._frozen.get(key)
        if frozen is None:
            return False
        origin = request.header.origin
        if frozen.at is not None and origin not in frozen.origins:
            rounds, is_held = frozen.at
            if round_of is None or round_of < rounds + is_held:
                return False
        frozen.kept.append(request)
        frozen.origins.add(origin)
        return True

    def _on_settling(self, event: on.Settling, _: float) -> list[Action]:
        self._settling.append(event.request)
        return self._settled()

    def _settled(self) -> list[Action]:
        if self.is_busy:
            return []
        settled, self._settling = self._settling, []
        return [Reply(each) for each in settled]

    def add_unit(self, unit: Unit) -> None:
        unit.stands_still = unit.key in self._frozen
        if unit.stands_still and unit.rounds is not None:
            unit.rounds.limit(_MOVE, _NOWHERE)

    # --- orders ---------------------------------------------------------------------------------
    def _on_ordered(self, event: on.MoveOrdered, now: float) -> Iterator[Action]:
        order, do, key, content = event
        if key[0] not in self._tables:
            raise KeyError(f"there is no table {key[0]}")
        if do == FREEZE:
            self._postponed.append((now + _FAIR_S, key, order))
            yield Close(key)
            yield from self.look(now)
        elif do == DRAIN:
            rounds, is_held = content["at"]
            yield from self._drain(order, key, (rounds, is_held))
        elif do == GIVE:
            self._giving[key] = giving = _Giving(order, dict(content["moves"]))
            for part, dest in giving.dests.items():
                yield Export(key, part, dest)
        elif do == COMMIT:
            yield from self._commit(order, key, content)
        else:
            unit = self._tables[key[0]].units.get(key[1])
            frozen = self._frozen.pop(key, None)
            yield from self._go_on(order, unit, [] if frozen is None else frozen.kept)
            yield from self._reopened(key)
        yield from self._settled()

    def look(self, now: float) -> Iterator[Action]:
        """Make units stand still once all that came back from their last moves was sent again.

        They wait for that at most _FAIR_S. Else a request could come back for as long as partitions
        move.
        """
        for limit, key, order in [*self._postponed]:
            epoch = self._tables[key[0]].epochs.get(key[1], 0)
            if (key, epoch) not in self._unnoted or now >= limit:
                self._postponed.remove((limit, key, order))
                yield self._stand_still(order, key)

    def _stand_still(self, order: CoreRequest, key: Key) -> Reply:
        self._frozen[key] = _Frozen()
        unit = self._tables[key[0]].units.get(key[1])
        content: dict[str, Any] = {"at": None, "pending": [], "held": None, "clocks": []}
        if unit is not None:  # else it is the destination of a dense partition
            unit.stands_still = True
            content |= {"at": (0, False), "clocks": [*self._units.clocks_of(unit).items()]}
        if unit is not None and unit.rounds is not None:
            rounds = unit.rounds
            rounds.limit(_MOVE, rounds.at)
            pending = [each.worker for each in rounds.pending()]
            content |= {"at": rounds.at, "pending": pending, "held": _held(unit)}
        return Reply(order, content=content)

    def _drain(self, order: CoreRequest, key: Key, at: tuple[int, bool]) -> list[Action]:
        """Go so far: all that it takes is on its way here."""
        frozen, unit = self._frozen[key], self._tables[key[0]].units.get(key[1])
        if unit is None or unit.rounds is None:
            return [Reply(order, content={"held": None})]
        frozen.at, frozen.order = at, order
        kept, frozen.kept = frozen.kept, []
        frozen.origins.clear()
        if not kept:
            return self._units.flow(unit, self._reach(unit.rounds, key, at))
        unit.rounds.limit(_MOVE, at)
        return self._units.flow(unit, [*unit.rounds.advance(), *map(Retry, kept), Settled(key)])

    def _reach(self, rounds: Rounds, key: Key, at: tuple[int, bool]) -> list[Action]:
        return [*rounds.reach(_MOVE, at), *self.on_progress(key)]

    def on_progress(self, key: Key) -> list[Action]:
        """Answer to the leader once the unit has come as far as it is to go."""
        frozen, unit = self._frozen.get(key), self._tables[key[0]].units.get(key[1])
        if frozen is None or unit is None or unit.rounds is None:
            return []
        if frozen.at is None or not unit.rounds.has_reached(frozen.at):
            return []
        held = [] if unit.rounds.at < frozen.at else _held(unit)
        frozen.at = None
        return [Reply(frozen.order, content={"held": held})]

    def _taken(self, key: Key, part: int, why: str) -> list[Action]:
        """A partition has been taken; why: or why not."""
        giving = self._giving.get(key)
        if giving is None:  # all have begun anew meanwhile: a server died
            return []
        dest = giving.dests.pop(part)
        if why:
            giving.problems.append(f"partition {part} of {self._tables[key[0]].name}: {why}")
        else:
            giving.moved.append((part, dest))
        if giving.dests:
            return []
        del self._giving[key]
        content = {"moved": giving.moved, "problems": giving.problems}
        return [Reply(giving.order, content=content)]

    def _commit(self, order: CoreRequest, key: Key, content: dict[str, Any]) -> Iterator[Action]:
        """Note the new owners, and send back the requests that were kept, or wait."""
        table, epoch, moved = self._tables[key[0]], content["epoch"], content["moved"]
        before = table.units.get(key[1])
        frozen = self._frozen.pop(key, None)
        servers = [(table.owners[part], dest) for part, dest in moved]
        leaving = [part for part, _ in moved if table.owners[part] == self._index]
        for part, dest in moved:
            table.owners[part] = dest
        table.epochs[key[1]] = epoch
        unnoted = self._unnoted[key, epoch] = {*self._units.clients()}
        back = [] if before is None else before.give_back()
        yield Moved(key, servers)
        yield from map(Redirect, back)
        if table.is_dense and leaving:
            yield Retire(key, epoch)
            del table.units[key[1]]
        else:
            yield from (Forget(key, part) for part in leaving)
        unit = table.units.get(key[1])
        if unit is not None:
            unit.fence = {rank: clock for rank, clock in content["clocks"] if rank in unnoted}
        yield from self._go_on(order, unit, [] if frozen is None else frozen.kept)
        if not unnoted:
            yield from self._free(key, epoch)
        yield from self._reopened(key)

    def _go_on(self, order: CoreRequest, unit: Unit | None, kept: list[Any]) -> list[Action]:
        settled = [] if unit is None else [Settled(unit.key)]
        return [*map(Retry, kept), *settled, Reply(order)]

    def _reopened(self, key: Key) -> Iterator[Action]:
        table = self._tables[key[0]]
        if key[1] in table.units:
            yield Open(key, table.epoch_of(key))

    def _on_finished(self, event: on.Finished, _: float) -> list[Action]:
        """Go on with a unit, once all requests that were kept have reached it."""
        unit = self._tables[event.key[0]].units.get(event.key[1])
        if unit is None:
            return []
        frozen, actions = self._frozen.get(unit.key), []
        unit.stands_still = frozen is not None
        if unit.rounds is not None and frozen is None:
            actions = unit.rounds.unlimit(_MOVE)
        elif unit.rounds is not None and frozen is not None and frozen.at is not None:
            actions = self._reach(unit.rounds, unit.key, frozen.at)
        return self._units.flow(unit, actions)


def _held(unit: Unit) -> list[int] | None:
    held = None if unit.rounds is None else unit.rounds.held
    return None if held is None else sorted(held)
