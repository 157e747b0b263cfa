"""Decides when a table that ranks have closed goes: once all have that opened it. Pure; the leader.

| event | what follows |
|---|---|
| Closed | the request waits |
| all who have opened the table have closed it, or left | Discard, and replies to all |
| something moves, or somebody has a pause | that waits until nothing does |

Within a pause the table stays: a snapshot, or a checkpoint, says which tables there are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from ringcomm.ps.server.core import events as on
from ringcomm.ps.server.core.actions import Action, Discard, Reply
from ringcomm.ps.server.core.table_owners_and_units import Table


class ClosedTables:
    """The tables that somebody has closed.

    Args:
        tables: by number.
        left: ranks that ask nothing more.
        is_quiet: returns True if nothing moves, and nobody has a pause.

    Attributes:
        numbers: of the tables.
    """

    def __init__(
        self, tables: Mapping[int, Table], left: Collection[int], is_quiet: Callable[[], bool]
    ) -> None:
        self._tables, self._left, self._is_quiet = tables, left, is_quiet
        self.numbers: set[int] = set()

    def on_closed(self, event: on.Closed, _: float) -> list[Action]:
        """A rank uses a table no more. Raises KeyError: there is no such table."""
        table = self._tables.get(event.table)
        if table is None:
            raise KeyError(f"there is no table {event.table}")
        table.openers.discard(event.request.source)
        table.closing.append(event.request)
        self.numbers.add(table.number)
        return []

    def due(self) -> list[Action]:
        """Return the actions that drop the tables which may go now; after each event."""
        actions: list[Action] = []
        for number in sorted(self.numbers) if self._is_quiet() else ():
            table = self._tables[number]
            if all(rank in self._left for rank in table.openers):
                actions += [Discard(number), *map(Reply, table.closing)]
                self.numbers.discard(number)
        return actions
