"""One partition of a hash table as data: see ringcomm.ps.partition_state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from ringcomm.ps.partition_state import PartitionState

if TYPE_CHECKING:
    from ringcomm.ps.server.rows.hash_shard import Shard

_NAMES: Final = ("keys", "values", "slots", "counts", "steps", "times")
_CANDIDATES: Final = ("candidate_keys", "candidate_counts")


@dataclass(frozen=True)
class RowsPartition:
    """One of the partitions of a shard.

    Attributes:
        shard: that has it.
        number: of the partition.
    """

    shard: Shard
    number: int

    @property
    def stamp(self) -> int:
        """Changes whenever rows of it do, or what is known of keys without one."""
        rows = self.shard.rows.find(self.number)
        return 0 if rows is None else rows.stamp

    @property
    def is_empty(self) -> bool:
        rows = self.shard.rows.find(self.number)
        return rows is None or not (len(rows) or rows.n_candidates)

    def state(self) -> PartitionState:
        """Return a copy of its rows, and of what is known of keys that were not admitted."""
        rows = self.shard.rows.find(self.number)
        if rows is None:
            return PartitionState({})
        arrays = rows.export()
        named: dict[str, NDArray[Any]] = dict(zip(_NAMES, arrays, strict=True))
        named |= dict(zip(_CANDIDATES, rows.candidates(), strict=True))
        return PartitionState({}, named)

    def applied(self, of_shard: dict[int, int]) -> list[tuple[int, int]]:
        """Return whose pushes are in it: ranks, and the numbers of their last ones.

        of_shard: the same of the shard, which may have had the partition for a while only.
        """
        applied = dict(of_shard)
        for rank, last in self.shard.along.get(self.number, {}).items():
            applied[rank] = max(last, applied.get(rank, last))
        return sorted(applied.items())

    def merge_applied(self, applied: Iterable[Sequence[int]]) -> None:
        for rank, sequence in applied:
            self.shard.note_along(self.number, rank, sequence)

    def load(self, state: PartitionState) -> None:
        """Become what another partition of this number was; without arrays, empty."""
        self._load({name: np.array(array) for name, array in state.arrays.items()})
        if "rounds" in state.meta:  # of a checkpoint
            self.shard.rounds_before = state.meta["rounds"] - self.shard.version
        if "outside" in state.meta:
            self.shard.n_outside = max(self.shard.n_outside, state.meta["outside"])

    def load_values(self, state: PartitionState) -> None:
        """Load the values of another partition, as rows that were not updated yet."""
        arrays = {name: np.array(array) for name, array in state.arrays.items()}
        if arrays:
            arrays["values"] = np.ascontiguousarray(arrays["values"], self.shard.dtype)
            arrays["slots"] = np.tile(_fresh_slots(self.shard), (len(arrays["keys"]), 1))
            arrays["steps"] = np.zeros_like(arrays["steps"])
        self._load(arrays)

    def _load(self, arrays: dict[str, NDArray[Any]]) -> None:
        """Replace all there is; other arrays, as old checkpoints have them, are ignored."""
        if not arrays and self.shard.rows.find(self.number) is None:
            return
        rows = self.shard.rows.own(self.number)
        rows.clear()
        self.shard.stamp += 1
        rows.stamp = self.shard.stamp
        if arrays:
            rows.load(*(arrays[name] for name in _NAMES))
            rows.load_candidates(*(arrays[name] for name in _CANDIDATES))


def _fresh_slots(shard: Shard) -> NDArray[Any]:
    """Return the slots of one row before its first update, one behind the other."""
    slots = shard.updater.new_slots((1, shard.dim), shard.dtype)
    return (
        np.concatenate([slot.reshape(-1) for slot in slots]) if slots else np.empty(0, shard.dtype)
    )
