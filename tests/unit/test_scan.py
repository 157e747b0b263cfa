"""scan() and exscan(): the reduction of the ranks up to one, or before it, in their order."""

import ml_dtypes
import numpy as np
import pytest
from harness import at_length, run_ranks
from numpy_operators import HALVES, NUMPY, is_defined
from sample_values import whole_numbers

import ringcomm as rc
from ringcomm.arrays.dtypes import DTYPES
from ringcomm.collectives.algorithms import node
from ringcomm.engine.executors import short_calls

pytestmark = pytest.mark.usefixtures("wire")

SIZES = at_length([1, 2, 3, 4, 7, 8], [1, 2, 5])
OPS = [op for op in rc.Op if op is not rc.AVERAGE]
DEFINED = [(name, op) for name in DTYPES for op in OPS if is_defined(op, name)]


def numpy_dtype(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def values(rank, count, name):
    """Return random values whose sums depend on the order, other ones for each rank."""
    rng = np.random.default_rng([rank, count])
    if name == "bool":
        return rng.random(count) < 0.7
    if DTYPES[name].is_integer:
        limits = np.iinfo(name)
        return rng.integers(limits.min, limits.max, count, name, endpoint=True)
    x = rng.standard_normal(count) + 0.3
    return (x + 1j * rng.standard_normal(count) if "complex" in name else x).astype(
        numpy_dtype(name)
    )


def in_order(rows, name, op):
    """Return ((row 0 op row 1) op row 2) ... in the dtype, for 16-bit floats rounded once."""
    wide = [row.astype(np.float32) if name in HALVES else row for row in rows]
    total = wide[0]
    with np.errstate(over="ignore"):
        for row in wide[1:]:
            total = NUMPY[op](total, row).astype(row.dtype)
        return total.astype(numpy_dtype(name))


def identity(name, op):
    dtype = DTYPES[name]
    if op not in (rc.MIN, rc.MAX):
        return NUMPY[op].identity
    if dtype.is_float or name == "bool":
        highest, lowest = (True, False) if name == "bool" else (np.inf, -np.inf)
    else:
        highest, lowest = np.iinfo(name).max, np.iinfo(name).min
    return highest if op is rc.MIN else lowest


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("name", "op"), DEFINED, ids=str)
def test_each_operator_combines_in_the_order_of_the_ranks(name, op, size):
    rows = [values(rank, 100, name) for rank in range(size)]

    def body(rank):
        x = rows[rank].copy()
        results = rc.scan(x, op), rc.exscan_async(x, op, name="n").wait()
        assert x.tobytes() == rows[rank].tobytes()
        return results

    for rank, (inclusive, exclusive) in enumerate(run_ranks(size, body)):
        assert inclusive.dtype == exclusive.dtype == numpy_dtype(name)
        first = np.full(100, identity(name, op)).astype(numpy_dtype(name))
        before = in_order(rows[:rank], name, op) if rank else first
        pairs = (inclusive, in_order(rows[: rank + 1], name, op)), (exclusive, before)
        for got, want in pairs:
            if "complex" in name and op is rc.PRODUCT:  # numpy rounds its products otherwise
                assert np.allclose(got, want, rtol=1e-5)
            else:
                assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "complex128", "int8"])
def test_the_last_rank_has_the_bits_of_a_deterministic_allreduce(name):
    def body(rank):
        x = values(rank, 1000, name)
        return rc.scan(x), rc.allreduce(x, deterministic=True)

    last, total = run_ranks(4, body)[-1]
    assert last.tobytes() == total.tobytes()


@pytest.mark.parametrize("shape", [(0,), (0, 3), (1,), (3, 5), (999, 7, 13)])
def test_any_shape_whole_or_strided(shape):
    def body(rank):
        x = whole_numbers(rank, int(np.prod(shape)), np.int64).reshape(shape)
        return [(rc.scan(each), rc.exscan(each)) for each in (x, np.asfortranarray(x), x[..., ::2])]

    results = run_ranks(3, body)
    rows = [whole_numbers(r, int(np.prod(shape)), np.int64).reshape(shape) for r in range(3)]
    for rank, result in enumerate(results):
        wants = sum(rows[: rank + 1]), sum(rows[:rank], np.zeros(shape, np.int64))
        for got, part in zip(result, (..., ..., (..., slice(None, None, 2))), strict=True):
            for each, want in zip(got, wants, strict=True):
                assert np.array_equal(each, want[part])
                assert each.flags.c_contiguous


@pytest.mark.parametrize("name", ["float16", "int64"])
def test_arrays_of_several_pieces(name, monkeypatch):
    monkeypatch.setattr(node, "SCAN_PIECE_NBYTES", 1000)
    count = 40_007  # 6 segments of a message, at least

    def body(rank):
        x = whole_numbers(rank, count, name)
        return rc.scan(x), rc.exscan(x)

    before = np.zeros(count, name)
    for rank, (inclusive, exclusive) in enumerate(run_ranks(4, body)):
        after = (before + whole_numbers(rank, count, name)).astype(name)
        assert np.array_equal(inclusive, after)
        assert np.array_equal(exclusive, before)
        before = after


def test_a_scan_that_is_made_again_is_a_short_call(wire, monkeypatch):
    planned, plan = [], short_calls.plan_scan

    def note(*args, **form):
        planned.append(args)
        return plan(*args, **form)

    monkeypatch.setattr(short_calls, "plan_scan", note)
    run_ranks(3, lambda rank: [rc.scan(np.full(5, rank)) for _ in range(5)])
    assert len(planned) == 3 * 2, wire


def test_numbers_give_numbers():
    def body(rank):
        assert type(rc.scan(np.int8(1))) is np.int8
        return rc.scan(rank + 1), rc.exscan(0.5), rc.exscan(rank, rc.MIN), rc.exscan(True)

    largest = 2**63 - 1
    assert run_ranks(3, body) == [
        (1, 0.0, largest, False), (3, 0.5, 0, True), (6, 1.0, 0, True)
    ]  # fmt: skip


def test_the_order_is_that_of_the_group():
    def body(rank):
        group = rc.Group([3, 1, 0]) if rank != 2 else None
        return group and (rc.scan(10**rank, group=group), rc.exscan(10**rank, group=group))

    assert run_ranks(4, body) == [(1011, 1010), (1010, 1000), None, (1000, 0)]


def test_many_at_once_and_x_may_change_after_an_asynchronous_call():
    def body(rank):
        handles = []
        for turn in range(20):
            x = np.full(3, rank + turn)
            handles.append(rc.scan_async(x, name=None if turn % 2 else f"n {turn}"))
            x[:] = -99
        return [handle.wait()[0] for handle in handles]

    results = run_ranks(3, body)
    assert [each[0] for each in results] == [0, 1, 3]
    assert results[2] == [3 + 3 * turn for turn in range(20)]


@pytest.mark.parametrize("call", [rc.scan, rc.exscan], ids=["scan", "exscan"])
def test_an_average_is_refused_and_says_what_to_do(call):
    n = "rank() + 1" if call is rc.scan else "rank()"

    def body(rank):
        with pytest.raises(ValueError, match="AVERAGE has no meaning here") as told:
            call(np.ones(2), rc.AVERAGE)
        assert f"Pass op=rc.SUM, and divide by rc.{n}, or" in str(told.value)
        with pytest.raises(rc.MismatchError, match="rank 1 could not take part: ValueError"):
            call(np.ones(2), rc.AVERAGE if rank else rc.SUM)
        return call(np.ones(2))[0]

    run_ranks(2, body)


def test_calls_that_differ_are_a_mismatch():
    def body(rank):
        differing = [
            ("rank 0 called scan #1, rank 1 called exscan #1", rc.exscan if rank else rc.scan, {}),
            (
                r"rank 0 passed op=SUM, rank 1 passed op=MAX",
                rc.scan,
                {"op": (rc.SUM, rc.MAX)[rank]},
            ),
            (r"sent float64 \(3,\), rank 1 sent float64 \(4,\)", rc.scan, {"x": np.ones(3 + rank)}),
        ]
        for text, call, options in differing:
            with pytest.raises(rc.MismatchError, match=text):
                call(**{"x": np.ones(3)} | options)
        return rc.scan(1)

    assert run_ranks(2, body) == [1, 2]


@pytest.mark.parametrize("name", ["float32", "bfloat16", "uint8", "bool"])
def test_a_rank_in_join_changes_no_result(name):
    ops = [op for op in OPS if is_defined(op, name)]
    rows = [values(rank, 9, name) for rank in range(3)]

    def body(rank):
        if rank != 1:
            for op in ops:
                want = rows[0] if rank == 0 else in_order([rows[0], rows[2]], name, op)
                assert rc.scan(rows[rank], op).tobytes() == want.tobytes()
                if rank == 2:
                    assert rc.exscan(rows[rank], op).tobytes() == rows[0].tobytes()
                else:
                    rc.exscan(rows[rank], op)
        return rc.join()

    assert len(set(run_ranks(3, body))) == 1
