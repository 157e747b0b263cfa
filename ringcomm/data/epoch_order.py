"""The order of the samples of an epoch, and the share of each rank. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray


# --- the share of a rank in an epoch --------------------------------------------------------------
@dataclass(eq=False)
class EpochShare:
    epoch: int
    share: Indices
    taken: int = 0  # samples that have been dealt out
    n_dealt: int = 0  # batches that have been dealt out
    n_batches: int = 0  # of this rank
    is_over: bool = False
    is_trained_on: bool = False  # at the end of a step, all that has been dealt out
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


Remainder = Literal["drop", "pad", "uneven"]
REMAINDERS: Final[tuple[Remainder, ...]] = get_args(Remainder)
Indices = NDArray[np.int64]
# For each run that took a part of the epoch: how many samples each of its ranks took.
Phases = Sequence[Sequence[int]]


def epoch_order(n: int, *, seed: int, epoch: int, is_shuffled: bool) -> Indices:
    """Return the order of the n samples in an epoch: the same in every run, on every machine.

    Sorts by the raw bits of a bit generator: these stay the same in all versions of numpy, while
    permutation() may change (NEP 19).
    """
    if not is_shuffled:
        return np.arange(n, dtype=np.int64)
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(n)
    return np.argsort(bits, kind="stable").astype(np.int64, copy=False)


def remaining(order: Indices, phases: Phases) -> Indices:
    """Return the samples of an epoch that no run has taken, in the order of the epoch.

    Each run deals out the samples that the run before has left.
    """
    for counts in phases:
        place = np.arange(len(order))
        order = order[place // len(counts) >= np.asarray(counts)[place % len(counts)]]
    return order


def n_remaining(n: int, phases: Phases) -> int:
    """Return len(remaining(order, phases)) for n samples."""
    for counts in phases:
        size = len(counts)
        n -= sum(min(count, dealt(n, rank, size)) for rank, count in enumerate(counts))
    return n


def dealt(n: int, rank: int, size: int) -> int:
    """Return how many samples a rank gets if n are dealt out one by one, from rank 0 on."""
    return n // size + (rank < n % size)


def to_deal(left: Indices, order: Indices, size: int, remainder: Remainder) -> Indices:
    """Return the samples that are left, as they are dealt out one by one, from rank 0 on.

    "pad" repeats samples from the beginning of `order`, which has the whole epoch.
    """
    missing = -len(left) % size
    if remainder == "drop":
        return left[: len(left) // size * size]
    if remainder == "pad" and missing and len(left):
        return np.concatenate([left, np.resize(order, missing)])
    return left


def share_of(left: Indices, order: Indices, rank: int, size: int, remainder: Remainder) -> Indices:
    """Return a rank's share of the samples that are left; see to_deal()."""
    return to_deal(left, order, size, remainder)[rank::size]


def share_length(n_left: int, rank: int, size: int, remainder: Remainder) -> int:
    if remainder == "uneven":
        return dealt(n_left, rank, size)
    return n_left // size if remainder == "drop" else -(-n_left // size)


def n_dealt(n_left: int, size: int, remainder: Remainder) -> int:
    return sum(share_length(n_left, rank, size, remainder) for rank in range(size))


def batch_lengths(n: int, rank: int, size: int, per_step: int) -> list[int]:
    """Return the lengths of a rank's batches, the same number for every rank.

    n samples are dealt out to the ranks one by one; each step takes the next `per_step` of them,
    over all ranks. If this rank has no sample left for the last batch, a sample of the batch before
    moves there, so that no batch is empty.
    """
    ends = [*range(per_step, n, per_step), *([n] if n else [])]
    taken = [0, *(dealt(end, rank, size) for end in ends)]
    lengths = [after - before for before, after in pairwise(taken)]
    if len(lengths) > 1 and lengths[-1] == 0 and lengths[-2] > 1:
        lengths[-2:] = [lengths[-2] - 1, 1]
    return lengths
