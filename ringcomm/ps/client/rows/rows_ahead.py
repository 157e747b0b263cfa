"""Rows that are fetched ahead of their use, and the check that they are fresh by then."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from ringcomm.ps.client.rows.hash_table import HashTable
from ringcomm.ps.client.rows.keys import Keys, keys_of
from ringcomm.ps.client.rows.pull_many import pull_many, pull_together
from ringcomm.ps.session import session

if TYPE_CHECKING:
    from ringcomm.ps.client.future import Future
    from ringcomm.ps.client.rows.pulls import RowPull
    from ringcomm.ps.client.rows.pushes import UsedKeys

Array = NDArray[Any]
Pull = tuple[HashTable, Keys]
_USED_KEYS: Final = 4096  # that are noted, and four times as many as are fetched


@dataclass(eq=False)
class RowsAhead:
    """Rows of one table that are on their way, or here.

    Attributes:
        pull: of them.
        future: likewise.
        used: keys of the table that this process has used since.
        snapshot: that they are of; 0: none.
        n_recovered: how often the job had recovered; see Session.
    """

    pull: RowPull
    future: Future[Array]
    used: UsedKeys
    snapshot: int
    n_recovered: int

    @property
    def waits(self) -> bool:
        """True if they are of a round, or of steps, that are not over yet."""
        return self.pull.clock > self.pull.pushes.clock_of_pull() and not self.future.done()

    def stale(self) -> NDArray[np.bool_] | None:
        """Return which rows a pull of now could give newer values, by the table's mode; None: all.

        - With rounds: all, unless this worker has pushed once since, as prefetch() expects.
        - With SSP: all, if they may lack steps that a pull must have now.
        - With SSP or async: those that this process has pushed to, or pulled since.
        """
        if session().n_recovered != self.n_recovered:
            return None
        needed = self.pull.pushes.clock_of_pull()
        if self.pull.clock < needed or self.waits or session().snapshot != self.snapshot:
            return None
        return self.used.among(self.pull.keys)


class Prefetched:
    """Rows of several tables, by any names, for the next passes over them."""

    def __init__(self) -> None:
        self._ahead: deque[dict[str, RowsAhead]] = deque(maxlen=2)  # of this batch and the next
        self._waiting: dict[str, RowsAhead] = {}

    def begin(self, pulls: Mapping[str, Pull], pushes_before: int) -> None:
        """Begin to fetch rows; see prefetch(). The rows of the pass before the last are dropped.

        While rows of a table wait for a round, no more are asked for that wait for the same one: if
        nobody pushes, as in an evaluation, such requests would only become more.
        """
        self._waiting = {name: each for name, each in self._waiting.items() if each.waits}
        asked = {name: pull for name, pull in pulls.items() if name not in self._waiting}
        found = zip(asked, prefetch([*asked.values()], pushes_before), strict=True)
        ahead = {name: each for name, each in found if each is not None}
        self._waiting |= ahead
        self._ahead.append(ahead)

    def rows(self, pulls: Mapping[str, Pull]) -> dict[str, Array]:
        """Return rows, those that are here and fresh, and all others by one pull_many()."""
        ahead = self._taken(pulls)
        chosen = [(*pull, ahead.get(name)) for name, pull in pulls.items()]
        return dict(zip(pulls, rows_of(chosen), strict=True))

    def _taken(self, pulls: Mapping[str, Pull]) -> dict[str, RowsAhead]:
        """Return the rows of the first batch that has some of these, and drop those before it."""
        for n, batch in enumerate(self._ahead, 1):
            taken = {
                name: batch[name]
                for name in pulls.keys() & batch.keys()
                if np.array_equal(batch[name].pull.keys, keys_of(name, pulls[name][1])[0])
            }
            if taken:
                for _ in range(n):
                    self._ahead.popleft()
                return taken
        return {}


def prefetch(pulls: Sequence[Pull], pushes_before: int = 1) -> list[RowsAhead | None]:
    """Begin to fetch rows for use after this worker has pushed so often to each table.

    A server sends rows of a table with rounds once that round is over. Returns None for tables with
    ps.FirstOf(k): their rows would be newer than those that this worker's next push is computed of.
    """
    current = session()
    chosen = [k for k, (table, _) in enumerate(pulls) if table.mode.name != "first_of"]
    asked = [pulls[k][0].prepared_pull(pulls[k][1], ahead=pushes_before) for k in chosen]
    used = [each.pushes.watched(_USED_KEYS + 4 * len(each.keys)) for each in asked]
    futures = pull_together(current, asked)
    found: list[RowsAhead | None] = [None] * len(pulls)
    for k, pull, future, since in zip(chosen, asked, futures, used, strict=True):
        found[k] = RowsAhead(pull, future, since, current.snapshot, current.n_recovered)
    return found


def rows_of(pulls: Sequence[tuple[HashTable, Keys, RowsAhead | None]]) -> list[Array]:
    stale = [None if ahead is None else ahead.stale() for *_, ahead in pulls]
    both = list(zip(pulls, stale, strict=True))
    due = [
        (table, keys if which is None else keys[which])
        for (table, keys, _), which in both
        if which is None or which.any()
    ]
    pulled, found = iter(pull_many(due).wait()), []
    for (*_, ahead), which in both:
        if ahead is None or which is None:
            found.append(next(pulled))
            continue
        rows = ahead.future.wait()
        if which.any():
            rows[which] = next(pulled)
        found.append(rows)
    return found
