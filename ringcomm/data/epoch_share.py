"""EpochShare: one iteration over a rank's share of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ringcomm.data.epoch_order import Indices


@dataclass(eq=False)
class EpochShare:
    epoch: int
    share: Indices
    taken: int = 0  # samples that have been dealt out
    n_dealt: int = 0  # batches that have been dealt out
    n_batches: int = 0  # of this rank
    is_over: bool = False
    lengths_of: Callable[[int], list[int]] = lambda rank: []  # of the batches of any rank

    def take(self, lengths_of: Callable[[int], list[int]], rank: int) -> Iterator[list[int]]:
        """Deal out the batches of a rank; lengths_of() returns the lengths of those of any rank."""
        lengths = lengths_of(rank)
        self.lengths_of, self.n_batches = lengths_of, len(lengths)
        for length in lengths:
            start, self.taken = self.taken, self.taken + length
            self.n_dealt += 1
            yield self.share[start : start + length].tolist()
        self.is_over = True

    def consumed(self, said: int | None) -> int:
        """Return `said`, the number of samples trained on; if None, the number dealt out."""
        if said is None:
            return len(self.share) if self.is_over else self.taken
        if not 0 <= said <= len(self.share):
            raise ValueError(
                f"state_dict({said}): this rank has {len(self.share)} samples in this epoch"
            )
        return said
