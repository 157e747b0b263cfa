"""Copies of values at one moment, kept for ranks that read them later."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ringcomm.ps.server.rows.hash_shard import Shard

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.server.core.actions import Key
    from ringcomm.ps.server.dense.partition import DensePartition


class Snapshots:
    """The snapshots of one server.

    Of dense tables the values are copied. Of a hash table, rows that change from now on are kept as
    they were, so that nobody waits for a copy of a large table.

    Args:
        memory: returns memory that clients on this node map.
    """

    def __init__(self, memory: Callable[[int], Bytes]) -> None:
        self._memory = memory
        self._copies: dict[int, dict[Key, tuple[Bytes, int]]] = {}
        self._shards: dict[int, list[Shard]] = {}

    def begin(self, number: int) -> None:
        self._copies[number], self._shards[number] = {}, []

    def take(self, number: int, key: Key, part: DensePartition | Shard) -> None:
        if isinstance(part, Shard):
            part.snapshot(number)
            self._shards[number].append(part)
            return
        values = part.values
        copy = self._memory(values.nbytes)
        copy[:] = values.view(np.uint8)
        self._copies[number][key] = copy, part.version

    def has(self, number: int, key: Key) -> bool:
        return key in self._copies[number]

    def values(self, number: int, key: Key) -> tuple[Bytes, int]:
        """Return the bytes of a dense partition, and its version. Raises KeyError."""
        return self._copies[number][key]

    def clear(self) -> None:
        self._copies.clear()
        self._shards.clear()

    def __contains__(self, number: int) -> bool:
        return number in self._copies

    def drop(self, number: int) -> None:
        self._copies.pop(number, None)
        for shard in self._shards.pop(number, ()):
            shard.release(number)
