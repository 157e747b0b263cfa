"""Values as they were at one moment, kept for who reads them at leisure; a server's side."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.dense import DensePartition
    from ringcomm.ps.placement import Partition
    from ringcomm.ps.serving import Table

VERSIONS, HOLD, RELEASE = "versions", "hold", "release"  # what is asked for


class Held:
    """One snapshot on one server.

    Args:
        tables: of the server.
        rounds: of tables with rounds, by number: after how many their values are wanted.
        memory: returns memory that clients on this node map.
        done: called once everything is held; with False if a round is over already.
    """

    def __init__(
        self,
        tables: dict[int, Table],
        rounds: dict[int, int],
        memory: Callable[[int], Bytes],
        done: Callable[[bool], None],
    ) -> None:
        self._memory = memory
        self._done = done
        self._bytes: dict[Partition, Bytes] = {}
        self._versions: dict[Partition, int] = {}
        self._awaited: set[Partition] = set()
        self._is_told = False
        later: list[tuple[Partition, DensePartition, int]] = []
        for table in tables.values():
            for number, part in table.parts.items():
                wanted = rounds.get(table.number)
                if wanted is None or part.version == wanted:
                    self._hold((table.number, number), part)
                elif part.version > wanted:
                    self._tell(is_whole=False)
                    return
                else:
                    later.append(((table.number, number), part, wanted))
        self._awaited = {partition for partition, _, _ in later}
        for partition, part, wanted in later:
            part.at_version(wanted, self._taker(partition, part))
        self._tell_if_whole()

    def _taker(self, partition: Partition, part: DensePartition) -> Callable[[], None]:
        def take() -> None:
            self._hold(partition, part)
            self._awaited.discard(partition)
            self._tell_if_whole()

        return take

    def take_as_they_are(self, tables: dict[int, Table]) -> None:
        """Hold what is still awaited as it is now: no round is to come."""
        for number, part in tuple(self._awaited):
            self._hold((number, part), tables[number].parts[part])
        self._awaited.clear()
        self._tell_if_whole()

    def values(self, partition: Partition) -> tuple[Bytes, int]:
        """Return the bytes of a partition, and its version. Raises KeyError."""
        return self._bytes[partition], self._versions[partition]

    def _hold(self, partition: Partition, part: DensePartition) -> None:
        values: NDArray[Any] = part.values
        held = self._memory(values.nbytes)
        held[:] = values.view(np.uint8)
        self._bytes[partition] = held
        self._versions[partition] = part.version

    def _tell_if_whole(self) -> None:
        if not self._awaited:
            self._tell(is_whole=True)

    def _tell(self, *, is_whole: bool) -> None:
        if not self._is_told:
            self._is_told = True
            self._done(is_whole)
