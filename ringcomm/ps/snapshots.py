"""Values as they were at one moment, kept for who reads them at leisure; a server's side."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ringcomm.ps.hashed import Shard

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.dense import DensePartition
    from ringcomm.ps.opening import Table
    from ringcomm.ps.placement import Partition

# What is asked for: of the leader, that nothing moves; then of all of them, that no round ends any
# more, and to say how many have; then to hold what they have after as many as the first of them.
PAUSE, STOP, HOLD, RELEASE = "pause", "stop", "hold", "release"

SHARD = -1  # stands for all partitions of a hash table that a server has


class Moment:
    """Partitions of one server at one moment, given to `take` as it comes for each.

    Args:
        tables: of the server.
        rounds: of tables with rounds, by number: after how many they are wanted.
        take: called with each partition; of a hash table with the shard, whose number is SHARD.
        done: called once all were taken; with False if a round is over already.
    """

    def __init__(
        self,
        tables: dict[int, Table],
        rounds: dict[int, int],
        take: Callable[[Partition, Any], None],
        done: Callable[[bool], None],
    ) -> None:
        self._give = take
        self._done = done
        self._awaited: dict[Partition, Any] = {}
        self._is_told = False
        for table in tables.values():
            # One that was opened since rounds were counted has had none.
            wanted = rounds.get(table.number, 0) if table.spec.mode.has_rounds else None
            for unit, part in _units(table):
                if wanted is None or part.version == wanted:
                    take((table.number, unit), part)
                elif part.version > wanted:
                    self._tell(is_whole=False)
                    return
                else:
                    self._awaited[table.number, unit] = part
        for partition, part in tuple(self._awaited.items()):
            wanted = rounds.get(partition[0], 0)
            part.at_version(wanted, partial(self._take, partition, part))
        self._tell_if_whole()

    def release(self) -> None:
        """Take nothing more."""
        self._awaited.clear()

    def take_as_they_are(self) -> None:
        """Take what is still awaited as it is now: no round is to come."""
        for partition, part in tuple(self._awaited.items()):
            self._take(partition, part)

    def _take(self, partition: Partition, part: Any) -> None:
        if self._awaited.pop(partition, None) is not None:
            self._give(partition, part)
            self._tell_if_whole()

    def _tell_if_whole(self) -> None:
        if not self._awaited:
            self._tell(is_whole=True)

    def _tell(self, *, is_whole: bool) -> None:
        if not self._is_told:
            self._is_told = True
            self._done(is_whole)


def _units(table: Table) -> Iterable[tuple[int, Any]]:
    yield from table.parts.items()
    if table.shard is not None:
        yield SHARD, table.shard


class Held:
    """One snapshot on one server.

    Of dense tables the values are copied; of a hash table, rows that change from now on are kept
    as they were, so that nobody waits for a copy of a large table.

    Args:
        number: of the moment.
        tables: see Moment.
        rounds: see Moment.
        memory: returns memory that clients on this node map.
        done: see Moment.
    """

    def __init__(
        self,
        number: int,
        tables: dict[int, Table],
        rounds: dict[int, int],
        memory: Callable[[int], Bytes],
        done: Callable[[bool], None],
    ) -> None:
        self._number = number
        self._memory = memory
        self._shards: list[Shard] = []
        self._bytes: dict[Partition, Bytes] = {}
        self._versions: dict[Partition, int] = {}
        self._moment = Moment(tables, rounds, self._hold, done)

    def release(self) -> None:
        """Hold nothing more."""
        self._moment.release()
        for shard in self._shards:
            shard.release(self._number)
        self._shards.clear()

    def take_as_they_are(self) -> None:
        """See Moment."""
        self._moment.take_as_they_are()

    def values(self, partition: Partition) -> tuple[Bytes, int]:
        """Return the bytes of a dense partition, and its version. Raises KeyError."""
        return self._bytes[partition], self._versions[partition]

    def _hold(self, partition: Partition, part: DensePartition | Shard) -> None:
        if isinstance(part, Shard):
            part.hold(self._number)
            self._shards.append(part)
            return
        values: NDArray[Any] = part.values
        held = self._memory(values.nbytes)
        held[:] = values.view(np.uint8)
        self._bytes[partition] = held
        self._versions[partition] = part.version
