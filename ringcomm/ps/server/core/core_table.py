"""A table as a server's core knows it: its units, owners and epochs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ringcomm.ps.server.core.actions import Key
from ringcomm.ps.server.core.unit import Unit
from ringcomm.ps.update_modes import Mode


@dataclass
class ServedTable:
    """A table: the owners of its partitions, and the units that this server has.

    Attributes:
        number: of the table in messages.
        name: of the table.
        mode: when pushes become updates.
        is_dense: its partitions are units by themselves; else all that a server has are one.
        owners: server of each partition.
        spec: the table in JSON.
        is_open: all servers have it; for the leader.
        epochs: of units that have moved, by partition or 0: number of the view in which they did.
        units: of this server, by partition or 0.
        openers: ranks that have opened it, and use it; for the leader.
        without: of FirstOf, dead workers that were let in, by round.
    """

    number: int
    name: str
    mode: Mode
    is_dense: bool
    owners: list[int]
    spec: Mapping[str, Any] = field(default_factory=dict)
    is_open: bool = True
    epochs: dict[int, int] = field(default_factory=dict)
    units: dict[int, Unit] = field(default_factory=dict)
    openers: set[int] = field(default_factory=set)
    without: dict[int, set[int]] = field(default_factory=dict)

    def described(self) -> dict[str, Any]:
        """Return what a client that opens it is told, or a server that is to make it."""
        owned = {"owners": self.owners, "epochs": self.epochs}
        return {"number": self.number, "spec": self.spec, **owned}

    def key_of(self, partition: int) -> Key:
        return self.number, partition if self.is_dense else 0

    def epoch_of(self, key: Key) -> int:
        return self.epochs.get(key[1], 0)
