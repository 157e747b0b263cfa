"""Every operator on every dtype against numpy, over ranks as threads."""

from functools import reduce

import ml_dtypes
import numpy as np
import pytest
from harness import at_length, outcomes, run_ranks
from numpy_operators import REDUCTIONS

import ringcomm as rc
from ringcomm.arrays.dtypes import DTYPES

pytestmark = pytest.mark.usefixtures("wire")

FLOATS = ["float16", "bfloat16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
UNDEFINED = (
    {(rc.AVERAGE, "bool")}
    | {(op, name) for op in (rc.MIN, rc.MAX) for name in COMPLEX}
    | {(op, name) for op in (rc.BAND, rc.BOR, rc.BXOR) for name in FLOATS + COMPLEX}
)
DEFINED = [(op, name) for op in rc.Op for name in DTYPES if (op, name) not in UNDEFINED]


def numpy_dtype(name):
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def small_numbers(name, rank, count):
    """Values for which every operator over 7 ranks is exact in floats; in integers it wraps."""
    index = np.arange(count)
    if name == "bool":
        return (index >> rank) % 2 == 0
    if DTYPES[name].is_float:
        return np.array([1, 2, -1, -2, 0, 0.5])[(index + rank) % 6].astype(numpy_dtype(name))
    if DTYPES[name].is_complex:
        return np.array([1, 2, -1j, 1 + 1j, 0])[(index + rank) % 5].astype(name)
    rng = np.random.default_rng(rank)
    return rng.integers(0, 256, count * DTYPES[name].itemsize, np.uint8).view(name)


def expected(op, name, rows):
    wide = np.float32 if DTYPES[name].is_16bit_float else numpy_dtype(name)
    with np.errstate(all="ignore"):
        if op is rc.AVERAGE and DTYPES[name].is_integer:
            exact = sum(row.astype(object) for row in rows)  # it does not wrap
            return np.array([abs(v) // len(rows) * (1 if v >= 0 else -1) for v in exact], name)
        total = reduce(REDUCTIONS[op], [row.astype(wide) for row in rows])
        if op is not rc.AVERAGE:
            return total.astype(numpy_dtype(name))
        parts = total.view(total.real.dtype)  # numpy divides complex by way of the reciprocal
        parts /= parts.dtype.type(len(rows))
        return total.astype(numpy_dtype(name))


@pytest.mark.parametrize(("op", "name"), DEFINED)
@pytest.mark.parametrize("size", at_length([1, 2, 3, 7], [1, 3]))
@pytest.mark.parametrize("deterministic", [False, True])
def test_allreduce_equals_numpy(op, name, size, deterministic):
    rows = [small_numbers(name, rank, 29) for rank in range(size)]
    results = run_ranks(size, lambda r: rc.allreduce(rows[r], op, deterministic=deterministic))
    want = expected(op, name, rows)
    assert all(r.dtype == want.dtype and np.array_equal(r, want) for r in results)


@pytest.mark.parametrize(("op", "name"), sorted(UNDEFINED, key=str))
def test_an_operator_without_meaning_is_the_same_error_everywhere(op, name):
    def body(rank):
        with pytest.raises(TypeError, match=f"{op} of {name} has no meaning"):
            rc.allreduce(small_numbers(name, rank, 5), op)
        return float(rc.allreduce(np.ones(1))[0])

    assert run_ranks(2, body) == [2.0, 2.0]


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("op", [rc.MIN, rc.MAX])
@pytest.mark.parametrize("owner", [0, 1, 2])
def test_nan_wins(name, op, owner):
    def body(rank):
        x = np.arange(5).astype(numpy_dtype(name))
        if rank == owner:
            x[2] = np.nan
        return rc.allreduce(x, op).astype(np.float64)

    for result in run_ranks(3, body):
        assert np.array_equal(result, [0, 1, np.nan, 3, 4], equal_nan=True)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_deterministic_sums_are_in_rank_order_for_any_bucketing(name, size):
    data = np.random.default_rng(1).standard_normal((size, 1000)).astype(numpy_dtype(name))
    want = expected(rc.SUM, name, list(data))

    def body(rank):
        whole = rc.allreduce(data[rank], deterministic=True)
        pieces = [rc.allreduce(part, deterministic=True) for part in np.array_split(data[rank], 7)]
        group = rc.grouped_allreduce(np.array_split(data[rank], 3), deterministic=True)
        rows = rc.allgather(rc.reduce_scatter(data[rank], deterministic=True))
        return whole, np.concatenate(pieces), np.concatenate(group), rows

    for results in run_ranks(size, body):
        assert all(np.array_equal(r.view(np.uint8), want.view(np.uint8)) for r in results)


def test_a_ring_would_not_do_for_deterministic_sums():
    """The data of the test above can tell: another order gives other bits."""
    data = np.random.default_rng(1).standard_normal((3, 1000)).astype(np.float32)
    assert not np.array_equal(data[0] + data[1] + data[2], data[1] + data[2] + data[0])


def test_deterministic_on_one_rank_only_is_a_mismatch():
    def body(rank):
        with pytest.raises(rc.MismatchError, match="rank 0 passed op=SUM, deterministic, rank 1"):
            rc.allreduce(np.ones(3), deterministic=rank == 0)

    assert outcomes(2, body) == [None, None]


def test_what_is_no_operator_is_refused():
    def body(rank):
        with pytest.raises(TypeError, match=r"one of ringcomm.SUM, AVERAGE.*not 'sum'"):
            rc.allreduce(np.ones(3), "sum")

    run_ranks(2, body)
