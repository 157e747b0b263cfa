"""Decides when each unit is as a snapshot wants it: after so many rounds. Pure.

See ringcomm.ps.control.commands.Snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ringcomm.ps.server.core.actions import Action, Drop, Key, Reply, Take
from ringcomm.ps.server.core.unit import Unit


@dataclass
class _Moment:
    request: Any  # that is answered once all is taken
    awaited: dict[Key, int] = field(default_factory=dict)  # units, and after how many rounds


class Moments:
    """The moments that one server holds, or is going to."""

    def __init__(self) -> None:
        self._moments: dict[int, _Moment] = {}
        self._stopped: set[int] = set()  # moments that rounds wait for

    def stop(self, number: int, units: Iterable[Unit]) -> dict[int, int]:
        """Keep rounds from ending until the moment is held; return how many are over, by table.

        Else training that is fast would be ahead of every moment that a client chooses.
        """
        with_rounds = [unit for unit in units if unit.rounds is not None]
        over: dict[int, int] = {}
        for unit in with_rounds:
            assert unit.rounds is not None
            table = unit.key[0]
            over[table] = max(over.get(table, 0), unit.rounds.current)
        for unit in with_rounds:
            assert unit.rounds is not None
            unit.rounds.limit(number, (over[unit.key[0]], True))
        self._stopped.add(number)
        return over

    def stop_new(self, unit: Unit) -> None:
        """Keep the rounds of a new table from ending while those of others may not."""
        if unit.rounds is not None:
            for number in self._stopped:
                unit.rounds.limit(number, (0, True))

    def hold(
        self, number: int, request: Any, units: Iterable[Unit], rounds: Mapping[int, int]
    ) -> list[Action]:
        """Take each unit; of a table with rounds, right after so many; by table.

        A table that was opened since rounds were counted has had none. If one has had more by now,
        the moment is not whole.
        """
        moment = self._moments[number] = _Moment(request)
        actions: list[Action] = []
        for unit in units:
            if unit.rounds is None:
                actions.append(Take(number, unit.key))
                continue
            wanted, current = rounds.get(unit.key[0], 0), unit.rounds.current
            if current > wanted:
                moment.request = None
                moment.awaited.clear()
                return [*actions, Reply(request, content={"is_whole": False})]
            if current == wanted:
                actions.append(Take(number, unit.key))
            else:
                moment.awaited[unit.key] = wanted
        return actions + self._whole(moment)

    @property
    def is_quiet(self) -> bool:
        return not (self._moments or self._stopped)

    @property
    def are_held(self) -> bool:
        return bool(self._moments)

    def on_end(self, key: Key, current: int) -> list[Action]:
        """Take a unit for the moments that wait for this number of rounds."""
        actions: list[Action] = []
        for number, moment in self._moments.items():
            if moment.awaited.get(key) == current:
                del moment.awaited[key]
                actions += [Take(number, key), *self._whole(moment)]
        return actions

    def take_as_they_are(self) -> list[Action]:
        """Take what is still awaited: no round is to come. Unless rounds are stopped."""
        actions: list[Action] = []
        for number, moment in self._moments.items() if not self._stopped else ():
            actions += [Take(number, key) for key in moment.awaited]
            moment.awaited.clear()
            actions += self._whole(moment)
        return actions

    def resume(self, *numbers: int) -> set[int]:
        resumed = self._stopped & {*numbers}
        self._stopped -= resumed
        return resumed

    def release(self, number: int, *, keeps_copies: bool = False) -> list[Action]:
        self._moments.pop(number, None)
        return [Drop(number, keeps_copies)]

    def _whole(self, moment: _Moment) -> list[Action]:
        if moment.awaited or moment.request is None:
            return []
        request, moment.request = moment.request, None
        return [Reply(request, content={"is_whole": True})]
