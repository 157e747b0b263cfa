"""Factors before and after a reduction."""

import platform
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from harness import run_ranks
from numpy_operators import REDUCTIONS

import ringcomm as rc
from ringcomm.arrays import adapter_for
from ringcomm.collectives.operators import ReductionOptions
from ringcomm.collectives.scale_factors import scale
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.operations.allreduce import plan_allreduce
from ringcomm.engine.operations.grouped import (
    plan_grouped_allreduce,
    plan_grouped_reduce_scatter,
)
from ringcomm.engine.operations.reduce import plan_reduce
from ringcomm.engine.operations.reduce_scatter import plan_reduce_scatter

FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
INTEGERS = [np.int8, np.uint8, np.int32, np.int64]


def scaled(x, factor):
    x = x.copy()
    scale(adapter_for(x).flat(x), factor)
    return x


def reduced(x, op, before, after, *, plan=plan_allreduce, **form):
    options = ReductionOptions(op).scaled(before, after)
    return engine().execute("any", None, lambda g: plan(g, None, x, options, **form))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("factor", [0.5, 1 / 3, -7.0, 0.0, float("inf")])
def test_floats_are_multiplied_in_enough_digits_and_rounded_once(dtype, factor):
    x = np.linspace(-3, 5, 1001).astype(dtype)
    wide = np.float64 if dtype is np.float64 else np.float32
    with np.errstate(invalid="ignore", over="ignore"):
        expected = (x.astype(wide) * wide(factor)).astype(dtype)
    found = scaled(x, factor).astype(np.float64)
    assert np.array_equal(found, expected.astype(np.float64), equal_nan=True)


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("factor", [0.5, 1 / 3, 1.9])
def test_integers_are_truncated_toward_zero(dtype, factor):
    low = -20 if np.dtype(dtype).kind == "i" else 0
    x = np.arange(low, 20).astype(dtype)
    assert scaled(x, factor).tolist() == [int(int(n) * factor) for n in x]


def test_complex_numbers_are_multiplied_as_they_are():
    assert scaled(np.array([1 + 2j]), 0.5).tolist() == [0.5 + 1j]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("op", [rc.SUM, rc.AVERAGE])
@pytest.mark.usefixtures("wire")
def test_values_are_scaled_before_and_the_result_after(size, in_place, op):
    def body(rank):
        x = np.arange(1000.0) * (rank + 1)
        result = reduced(x, op, 0.5, 3.0, in_place=in_place)
        assert (result is x) is in_place
        assert in_place or np.array_equal(x, np.arange(1000.0) * (rank + 1))
        return result

    share = size if op is rc.AVERAGE else 1
    expected = np.arange(1000.0) * 0.5 * sum(range(1, size + 1)) / share * 3.0
    assert all(np.allclose(each, expected, rtol=1e-14) for each in run_ranks(size, body))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.usefixtures("wire")
def test_integers_are_truncated_before_the_sum_and_once_after_it(size):
    def body(rank):
        return reduced(np.array([3, -3, 7]), rc.AVERAGE, 0.5, 1.5).tolist()

    before = [1, -1, 3]  # 1.5, -1.5 and 3.5, truncated
    expected = [int(n * 1.5) for n in before]
    assert run_ranks(size, body) == [expected] * size


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.usefixtures("wire")
def test_grouped_and_scattered_reductions_scale_alike(size):
    def body(rank):
        xs = [np.full(4, 2.0), np.full(3, 4), np.full(0, 1.0)]
        several = reduced(xs, rc.SUM, 0.5, 0.25, plan=plan_grouped_allreduce)
        rows = reduced(np.full((size, 2), 2.0), rc.SUM, 0.5, 0.25, plan=plan_reduce_scatter)
        return [each.tolist() for each in several], rows.tolist()

    whole = int(2 * size * 0.25)
    expected = [[size * 0.25] * 4, [whole] * 3, []], [[size * 0.25] * 2]
    assert run_ranks(size, body) == [expected] * size


@pytest.mark.usefixtures("wire")
def test_ranks_must_agree_on_the_factors():
    def body(rank):
        with pytest.raises(rc.MismatchError, match=r"prescale=2.0.*prescale=0.5"):
            reduced(np.ones(3), rc.SUM, 0.5 if rank else 2.0, 1.0)
        return rc.allreduce(np.ones(1)).item()

    assert run_ranks(2, body) == [2.0, 2.0]


def test_a_factor_of_bool_has_no_meaning():
    def body(rank):
        with pytest.raises(TypeError, match="no meaning for bool"):
            reduced(np.ones(3, bool), rc.SUM, 0.5, 1.0)

    run_ranks(1, body)


@pytest.mark.parametrize("factor", ["2", None, True])
def test_a_factor_is_a_number(factor):
    with pytest.raises(TypeError, match="must be numbers"):
        ReductionOptions().scaled(factor, 1.0)


VALUES = np.array([[3, 5, 2], [3, 7, 1]])  # of ranks 0 and 1; sums that 3 divides


def combined(op, dtype, factor):
    """Return the reduction of two ranks' scaled values in a job of three."""
    wide = np.int64 if dtype is np.int32 else np.float64
    mine, theirs = (scaled(x.astype(dtype), factor).astype(wide) for x in VALUES)
    total = REDUCTIONS[op](mine, theirs)
    return (np.trunc(total / 3) if wide is np.int64 else total / 3) if op is rc.AVERAGE else total


@pytest.mark.parametrize("op", rc.Op)
@pytest.mark.usefixtures("wire")
def test_no_factor_changes_what_a_rank_gives_that_has_joined(op):
    dtypes = [np.int32] if op in {rc.BAND, rc.BOR, rc.BXOR} else [np.float16, np.float32, np.int32]
    factors = (2, -1, 0.5, 0, np.inf, np.nan)
    cases = [(dtype, factor) for dtype in dtypes for factor in factors]
    if platform.machine() != "x86_64":  # integers that are out of range are as numpy's only there
        cases = [(dtype, k) for dtype, k in cases if np.isfinite(k) or dtype is not np.int32]

    def results(x, factor):
        how = op, factor, 2.0
        yield reduced(x, *how)
        yield reduced(x.copy(), *how, in_place=True)
        yield from reduced([x, x], *how, plan=plan_grouped_allreduce)
        yield from reduced([x.copy(), x.copy()], *how, plan=plan_grouped_allreduce, in_place=True)
        yield reduced(x, op, factor, 1.0, plan=partial(plan_reduce, root=0))
        yield reduced(x, *how, plan=plan_reduce_scatter)
        yield from reduced([x, x], *how, plan=plan_grouped_reduce_scatter)

    def body(rank):
        if rank < 2:
            found = [list(results(VALUES[rank].astype(each), factor)) for each, factor in cases]
        last = rc.join()
        return found if rank < 2 else last

    *by_rank, _ = run_ranks(3, body)
    for (dtype, factor), *found in zip(cases, *by_rank, strict=True):
        once = combined(op, dtype, factor).astype(dtype)
        twice = scaled(once, 2.0)
        for rank, each in enumerate(found):
            own = twice[rank : rank + 1]
            expected = [*[twice] * 6, None if rank else once, *[own] * 3]
            for a, b in zip(each, expected, strict=True):
                np.testing.assert_array_equal(a, b, f"{op} of {np.dtype(dtype)} times {factor}")
