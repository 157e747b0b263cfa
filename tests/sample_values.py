"""Values for tests, in which no piece of an array is like another, nor one rank's like another's.

A pattern that repeats within a cache line, a segment or a page is the same wherever it is cut, and
hides that pieces were mixed up.
"""

from __future__ import annotations

import functools

import numpy as np

LOWEST, HIGHEST = -5, 10


@functools.lru_cache(maxsize=64)
def _integers(rank: int, count: int, turn: int) -> np.ndarray:
    drawn = np.random.default_rng([rank, count, turn]).integers(LOWEST, HIGHEST + 1, count)
    return drawn.astype(np.int8)


def whole_numbers(rank, count, dtype=np.float32, *, turn=0):
    """Return `count` random integers, others for each rank and turn.

    Sums over 8 ranks are exact in every dtype of at least 8 bits, bfloat16 included.
    """
    return _integers(rank, count, turn).astype(dtype)


def total(size, count, dtype=np.float32, *, turn=0):
    """Return the sum of what ranks 0 to size - 1 get from whole_numbers()."""
    return sum(_integers(rank, count, turn).astype(np.int64) for rank in range(size)).astype(dtype)
