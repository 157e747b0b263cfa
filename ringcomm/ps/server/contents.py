"""The partitions of one table that one server has."""

from __future__ import annotations

from dataclasses import dataclass, field

from ringcomm.ps.server.dense.partition import DensePartition
from ringcomm.ps.server.rows.hash_shard import Shard
from ringcomm.ps.table_spec import Spec


@dataclass
class Contents:
    """The part of a table that a server keeps; ringcomm.ps.server.core decides what happens to it.

    Attributes:
        spec: of the table.
        parts: of a dense table: the partitions of this server, by number.
        shard: of a hash table: all that this server has of it.
    """

    spec: Spec
    parts: dict[int, DensePartition] = field(default_factory=dict)
    shard: Shard | None = None

    def unit(self, number: int) -> DensePartition | Shard:
        return self.parts[number] if self.shard is None else self.shard
