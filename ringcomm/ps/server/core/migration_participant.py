"""One server's part in a migration: its units stand still, leave and arrive. Pure.

See ringcomm.ps.server.core.migration_facade for the messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ringcomm.ps.server.core.actions import (
    Action,
    Export,
    Forget,
    Free,
    Key,
    Moved,
    Redirect,
    Retire,
    Retry,
    Send,
    Settled,
)
from ringcomm.ps.server.core.core_table import ServedTable
from ringcomm.ps.server.core.rounds import Rounds
from ringcomm.ps.server.core.unit import Unit

_MOVE = 0  # in whose name rounds stop; moments have higher numbers
_NOWHERE = (0, False)
_FAIR_S = 0.5  # a client that computes for so long is not waited for

Message = dict[str, Any]


@dataclass
class _Frozen:
    """A unit that stands still.

    Attributes:
        kept: requests, in the order in which they came.
        at: how far to go: rounds that are over, and whether the next mean is held; None: nothing is
            carried out.
        origins: who has a request that is kept.
    """

    kept: list[Any] = field(default_factory=list)
    at: tuple[int, bool] | None = None
    origins: set[int] = field(default_factory=set)


@dataclass
class _Giving:
    """Partitions on their way from here."""

    dests: dict[int, int]  # of those that have not been taken
    moved: list[tuple[int, int]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Participant:
    """The part of one server in migrations of units.

    Args:
        index: of the server.
        leader: returns the server that leads.
        tables: by number.
    """

    def __init__(
        self, index: int, leader: Callable[[], int], tables: Mapping[int, ServedTable]
    ) -> None:
        self._index, self._leader, self._tables = index, leader, tables
        self._frozen: dict[Key, _Frozen] = {}
        self._giving: dict[Key, _Giving] = {}
        self._unnoted: dict[tuple[Key, int], set[int]] = {}  # by epoch: clients
        self._postponed: list[tuple[float, Key]] = []  # until when, at the latest

    @property
    def is_busy(self) -> bool:
        return bool(self._frozen)

    @property
    def awaits_time(self) -> bool:
        return bool(self._postponed)

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

    def noted(self, key: Key, epoch: int, rank: int) -> list[Action]:
        """Take note that a client has sent again all that came back from the move of an epoch."""
        table = self._tables.get(key[0])  # None: it was closed meanwhile
        unit = None if table is None else table.units.get(key[1])
        if table is not None and unit is not None and table.epochs.get(key[1]) == epoch:
            unit.fence.pop(rank, None)
        epochs = [each for of, each in self._unnoted if of == key and each <= epoch]
        return [action for each in epochs for action in self._strike_off(key, each, rank)]

    def state(self) -> list[tuple[Key, int, list[int]]]:
        """Return the clients that have not noted moves: key, epoch, clients."""
        return [(key, epoch, sorted(ranks)) for (key, epoch), ranks in self._unnoted.items()]

    def load(self, state: Iterable[tuple[Iterable[int], int, list[int]]]) -> None:
        for (table, unit), epoch, ranks in state:
            self._unnoted[(table, unit), epoch] = {*ranks}

    def add(self, unit: Unit) -> None:
        unit.stands_still = unit.key in self._frozen
        if unit.stands_still and unit.rounds is not None:
            unit.rounds.limit(_MOVE, _NOWHERE)

    def forget(self, rank: int) -> None:
        for frozen in self._frozen.values():
            frozen.kept = [each for each in frozen.kept if each.source != rank]

    def leave(self, rank: int) -> list[Action]:
        return [
            each for key, epoch in [*self._unnoted] for each in self._strike_off(key, epoch, rank)
        ]

    def _strike_off(self, key: Key, epoch: int, rank: int) -> list[Action]:
        unnoted = self._unnoted.get((key, epoch))
        if unnoted is None:
            return []
        unnoted.discard(rank)
        return [] if unnoted else self._free(key, epoch)

    def _free(self, key: Key, epoch: int) -> list[Action]:
        del self._unnoted[key, epoch]
        return [Free(key, epoch)]

    # --- messages -------------------------------------------------------------------------------
    def freeze(self, key: Key, now: float) -> None:
        """Make a unit stand still once all that came back from its last move was sent again.

        It waits for that at most _FAIR_S. Else a request could come back for as long as partitions
        move. look() does it.
        """
        self._postponed.append((now + _FAIR_S, key))

    def look(self, now: float, clocks: Callable[[Unit], dict[int, int]]) -> Iterator[Action]:
        """Make the units of freeze() stand still if they can; clocks: see Clocks, of a unit."""
        for limit, key in [*self._postponed]:
            epoch = self._tables[key[0]].epochs.get(key[1], 0)
            if (key, epoch) not in self._unnoted or now >= limit:
                self._postponed.remove((limit, key))
                yield self._stand_still(key, clocks)

    def _stand_still(self, key: Key, clocks: Callable[[Unit], dict[int, int]]) -> Action:
        self._frozen[key] = _Frozen()
        unit = self._tables[key[0]].units.get(key[1])
        if unit is None:  # the destination of a dense partition
            return self._answer("freeze", key, at=None, pending=[], held=None, clocks=[])
        unit.stands_still = True
        rounds, pending = unit.rounds, []
        if rounds is not None:
            rounds.limit(_MOVE, rounds.at)
            pending = [each.worker for each in rounds.pending()]
        return self._answer(
            "freeze",
            key,
            at=(0, False) if rounds is None else rounds.at,
            pending=pending,
            held=_held(unit),
            clocks=[*clocks(unit).items()],
        )

    def drain(self, key: Key, at: tuple[int, bool]) -> list[Action]:
        """Go so far: all that it takes is on its way here."""
        frozen, unit = self._frozen[key], self._tables[key[0]].units.get(key[1])
        if unit is None or unit.rounds is None:
            return [self._answer("drain", key, held=None)]
        frozen.at = at
        kept, frozen.kept = frozen.kept, []
        frozen.origins.clear()
        if not kept:
            return self._reach(unit.rounds, key, at)
        unit.rounds.limit(_MOVE, at)
        return [*unit.rounds.advance(), *map(Retry, kept), Settled(key)]

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
        return [self._answer("drain", key, held=held)]

    def give(self, key: Key, moves: Iterable[tuple[int, int]]) -> list[Action]:
        self._giving[key] = _Giving(dict(moves))
        return [Export(key, part, dest) for part, dest in self._giving[key].dests.items()]

    def taken(self, key: Key, part: int, why: str) -> list[Action]:
        """A partition has been taken; why: or why not."""
        giving = self._giving[key]
        dest = giving.dests.pop(part)
        if why:
            giving.problems.append(f"partition {part} of {self._tables[key[0]].name}: {why}")
        else:
            giving.moved.append((part, dest))
        if giving.dests:
            return []
        del self._giving[key]
        return [self._answer("give", key, moved=giving.moved, problems=giving.problems)]

    def commit(self, key: Key, message: Message, clients: Iterable[int]) -> list[Action]:
        """Note the new owners, and send back the requests that were kept, or wait."""
        table, epoch = self._tables[key[0]], message["epoch"]
        before = table.units.get(key[1])
        frozen = self._frozen.pop(key, None)
        moved = [(table.owners[part], dest) for part, dest in message["moved"]]
        leaving = [part for part, _ in message["moved"] if table.owners[part] == self._index]
        for part, dest in message["moved"]:
            table.owners[part] = dest
        table.epochs[key[1]] = epoch
        unnoted = self._unnoted[key, epoch] = {*clients}
        back = [] if before is None else before.give_back()
        actions: list[Action] = [Moved(key, moved), *map(Redirect, back)]
        is_gone = table.is_dense and bool(leaving)
        if is_gone:
            actions.append(Retire(key, epoch))
            del table.units[key[1]]
        else:
            actions += [Forget(key, part) for part in leaving]
        unit = table.units.get(key[1])
        if unit is not None:
            unit.fence = {rank: clock for rank, clock in message["clocks"] if rank in unnoted}
        kept = [] if frozen is None else frozen.kept
        actions += [*map(Retry, kept), *self._moving_ends(unit), self._answer("commit", key)]
        return actions if unnoted else [*actions, *self._free(key, epoch)]

    def thaw(self, key: Key) -> list[Action]:
        unit = self._tables[key[0]].units.get(key[1])
        kept = self._frozen.pop(key).kept
        return [*map(Retry, kept), *self._moving_ends(unit), self._answer("thaw", key)]

    def _moving_ends(self, unit: Unit | None) -> list[Action]:
        if unit is None:
            return []
        return [Settled(unit.key)]

    def settled(self, unit: Unit) -> list[Action]:
        """Go on with a unit, once all requests that were kept have reached it."""
        frozen = self._frozen.get(unit.key)
        unit.stands_still = frozen is not None
        if unit.rounds is None:
            return []
        if frozen is None:
            return unit.rounds.unlimit(_MOVE)
        return [] if frozen.at is None else self._reach(unit.rounds, unit.key, frozen.at)

    def _answer(self, of: str, key: Key, **more: Any) -> Send:
        message = {"do": "answer", "of": of, "table": key[0], "unit": key[1], **more}
        return Send(self._leader(), message)


def _held(unit: Unit) -> list[int] | None:
    held = None if unit.rounds is None else unit.rounds.held
    return None if held is None else sorted(held)
