"""The order of the samples of an epoch and their ranks. Pure: the same answer on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

Remainder = Literal["drop", "pad", "uneven"]
REMAINDERS: Final[tuple[Remainder, ...]] = get_args(Remainder)
Indices = NDArray[np.int64]
Phases = Sequence[Sequence[int]]


def epoch_order(n: int, *, seed: int, epoch: int, is_shuffled: bool) -> Indices:
    """Return the order of the n samples in an epoch: the same in every run, on every machine.

    Sorts by raw random bits, for numpy promises that those of a bit generator stay as they are,
    and not that permutation() does (NEP 19).
    """
    if not is_shuffled:
        return np.arange(n, dtype=np.int64)
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(n)
    return np.argsort(bits, kind="stable").astype(np.int64, copy=False)


def remaining(order: Indices, phases: Phases) -> Indices:
    """Return what is left of an epoch.

    Each phase is a run that has had a part of it: how many samples each of its ranks took. What is
    left by one run was dealt out to the ranks of the next.
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
    """Return how many of n samples, dealt one by one from rank 0 on, a rank gets."""
    return n // size + (rank < n % size)


def share_of(left: Indices, order: Indices, rank: int, size: int, remainder: Remainder) -> Indices:
    """Return the samples of a rank, in its order, of those that are left.

    What repeats under "pad" is from the beginning of the order of the whole epoch.
    """
    missing = -len(left) % size
    if remainder == "drop":
        left = left[: len(left) // size * size]
    elif remainder == "pad" and missing and len(left):
        left = np.concatenate([left, np.resize(order, missing)])
    return left[rank::size]


def share_length(n_left: int, rank: int, size: int, remainder: Remainder) -> int:
    """Return len(share_of(...)) where n_left samples are left."""
    if remainder == "uneven":
        return dealt(n_left, rank, size)
    return n_left // size if remainder == "drop" else -(-n_left // size)


def batch_lengths(mine: int, longest: int, batch_size: int) -> list[int]:
    """Return the lengths of a rank's batches, as many as any other has; `longest`: most samples.

    None is 0 as long as there are enough samples: if another rank has a batch of 1 more, the last
    batch of this one is a sample of the one before.
    """
    n_batches = -(-longest // batch_size)
    lengths = [min(batch_size, max(mine - b * batch_size, 0)) for b in range(n_batches)]
    if lengths and lengths[-1] == 0 and n_batches > 1 and batch_size > 1:
        lengths[-2:] = [batch_size - 1, 1]
    return lengths
