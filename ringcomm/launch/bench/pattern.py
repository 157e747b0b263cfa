"""Small integers in, and what must come out: exact in every dtype, whatever the order of sums."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringcomm.launch.bench.bandwidth import COLLECTIVES
from ringcomm.launch.bench.case import Case

Array = NDArray[Any]
# A prime, so that no part, segment or chunk of a power of two looks like another.
_PERIOD = 8191
_RANK_SHIFT = 131
_ROOT = 0


def fill(x: Array, op: str, rank: int, size: int) -> None:
    """Set x, shape (count,), to what `rank` of `size` passes in."""
    x[...] = _spread(_values(op, x.dtype, rank, size), 0, x.size)


def expected(case: Case, rank: int) -> Array | None:
    """Return what `rank` must get, shape (n,); None where it gets nothing. Not for barriers."""
    each = [_values(case.op, case.dtype, r, case.size) for r in range(case.size)]
    which, part = COLLECTIVES[case.collective], case.part
    if case.collective in ("reduce", "gather") and rank != _ROOT:
        return None
    if which.gives_part:
        return np.concatenate([_spread(values, 0, part) for values in each])
    if case.collective == "alltoall":
        return np.concatenate([_spread(values, rank * part, part) for values in each])
    source = _combine(case.op, each) if which.is_reduction else each[_ROOT]
    return (
        _spread(source, rank * part, part) if which.takes_part else _spread(source, 0, case.count)
    )


def count_wrong(result: Array | None, right: Array | None) -> int:
    """Return how many elements of `right` are not there bit by bit; all, if the shapes differ."""
    if right is None:
        return 0
    if result is None or result.shape != right.shape or result.dtype != right.dtype:
        return max(right.size, 1)
    itemsize = right.dtype.itemsize
    bits = f"u{itemsize}" if itemsize <= 8 else f"V{itemsize}"  # numpy compares V 10 times slower
    return int(np.count_nonzero(result.view(bits) != right.view(bits)))


def _values(op: str, dtype: np.dtype[Any], rank: int, size: int) -> Array:
    """Return one period of a rank's elements, small enough for every dtype's sum or product."""
    seeds = np.random.RandomState(0).randint(0, 1 << 16, _PERIOD)  # the same in every numpy
    seeds = np.roll(seeds, -_RANK_SHIFT * rank)
    if op == "product":
        values = 1 + (seeds % 8 == 0)  # mostly ones: the product of 64 ranks must fit
    elif op == "average":
        values = seeds % 2 * size  # so that the sum can be divided without a rest
    else:
        values = seeds % 7
    if dtype.kind == "c" and op != "product":
        values = values + 1j * np.roll(values, 1)
    if dtype.kind == "b":
        values = values % 2
    return np.asarray(values, dtype)


def _combine(op: str, each: list[Array]) -> Array:
    dtype = each[0].dtype
    if dtype.kind == "b":
        op = {"sum": "bor", "max": "bor", "product": "band", "min": "band"}.get(op, op)
        wide: list[Array] = each
    else:
        is_exact = dtype.kind in "iu"  # bfloat16 has a kind of its own
        wide = [x.astype(np.int64 if is_exact else _wider(dtype)) for x in each]
    total: Array = np.asarray(_UFUNCS[op].reduce(wide, axis=0)).astype(dtype)  # integers wrap here
    if op != "average":
        return total
    mean = total / len(each)
    return (np.trunc(mean) if dtype.kind in "iu" else mean).astype(dtype)


_UFUNCS: dict[str, np.ufunc] = {
    "sum": np.add,
    "average": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def _wider(dtype: np.dtype[Any]) -> type[np.generic]:
    return np.complex128 if dtype.kind == "c" else np.float64


def _spread(period: Array, start: int, count: int) -> Array:
    """Return elements start..start + count of the endless repetition of `period`."""
    return np.resize(np.roll(period, -(start % _PERIOD)), count)
