"""Small integers as arguments, and their results: exact in every dtype and order of sums. Pure."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ringcomm.launch.bench.cases import BenchCase

Array = NDArray[Any]
# A prime, so it divides no power of two, and no two parts, segments or chunks are equal.
_PERIOD = 8191
_RANK_SHIFT = 131
_UFUNCS: Final[dict[str, np.ufunc]] = {
    "sum": np.add,
    "average": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def fill(x: Array, case: BenchCase, rank: int) -> None:
    """Fill x, shape (count,), with the argument of a rank."""
    x[...] = _spread(_values(case, rank), 0, x.size).astype(x.dtype)


def expected(case: BenchCase, rank: int) -> Array | None:
    """Return the result of a rank, shape (n,); None if it gets none. Not for barriers."""
    each = [_values(case, r) for r in range(case.size)]
    how, part = case.how, case.part
    if case.collective in ("reduce", "gather") and rank != 0:
        return None
    if how.gives_part:
        found = np.concatenate([_spread(values, 0, part) for values in each])
    elif case.collective == "alltoall":
        found = np.concatenate([_spread(values, rank * part, part) for values in each])
    else:
        source = _UFUNCS[case.op].reduce(each, axis=0) if how.is_reduction else each[0]
        start, count = (rank * part, part) if how.takes_part else (0, case.count)
        found = _spread(source / case.size if case.op == "average" else source, start, count)
    return found.astype(case.dtype)  # integers wrap here


def count_wrong(result: Array | None, right: Array | None) -> int:
    """Return how many elements differ in their bits; all if shapes or dtypes differ."""
    if right is None:
        return 0
    if result is None or result.shape != right.shape or result.dtype != right.dtype:
        return max(right.size, 1)
    itemsize = right.dtype.itemsize
    bits = f"u{itemsize}" if itemsize <= 8 else f"V{itemsize}"  # numpy compares V 10 times slower
    return int(np.count_nonzero(result.view(bits) != right.view(bits)))


def _values(case: BenchCase, rank: int) -> Array:
    """Return one period of a rank's elements; their sums and products fit in every dtype."""
    seeds = np.random.RandomState(0).randint(0, 1 << 16, _PERIOD)  # the same in every numpy
    seeds = np.roll(seeds, -_RANK_SHIFT * rank)
    if case.op == "product":
        values: Array = 1 + (seeds % 8 == 0)  # mostly ones, so that a product of 64 ranks fits
    elif case.op == "average":
        values = seeds % 2 * case.size  # the sum is a multiple of the size
    else:
        values = seeds % 7
    if case.dtype.kind == "b":
        values = values % 2  # sum means or, product means and
    if case.dtype.kind == "c" and case.op != "product":
        values = values + 1j * np.roll(values, 1)
    return values


def _spread(period: Array, start: int, count: int) -> Array:
    """Return elements [start, start + count) of the endless repetition of `period`."""
    return np.resize(np.roll(period, -(start % _PERIOD)), count)
