"""Reduce, gather, scatter, alltoall, grouped calls and objects, over ranks as threads."""

import math

import numpy as np
import pytest
from harness import at_length, run_ranks
from sample_values import whole_numbers

import ringcomm as rc
from ringcomm.arrays.dtypes import DTYPES

pytestmark = pytest.mark.usefixtures("wire")

SIZES = at_length([1, 2, 3, 4, 7, 8], [1, 3, 4])
DTYPE_NAMES = [name for name in DTYPES if name != "bfloat16"]


def values(rank, shape, dtype=np.float64):
    return (whole_numbers(0, math.prod(shape), np.int64) % 5 + rank).reshape(shape).astype(dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [0, 1, 5, 1000])
@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int8])
def test_reduce_gives_root_alone_the_sum(size, count, dtype):
    root = size // 2
    results = run_ranks(size, lambda r: rc.reduce(values(r, (count,), dtype), root=root))
    want = sum(values(r, (count,), np.float64) for r in range(size)).astype(dtype)
    assert np.array_equal(results[root], want)
    assert results[root].dtype == dtype
    assert all(result is None for r, result in enumerate(results) if r != root)


@pytest.mark.parametrize("deterministic", [False, True])
def test_reduce_in_place_changes_root_s_array_alone(deterministic):
    def body(rank):
        x = values(rank, (4, 3))
        assert rc.reduce_(x[:, ::2], rc.MAX, 1, deterministic=deterministic) is not None
        return x

    results = run_ranks(3, body)
    assert np.array_equal(results[0], values(0, (4, 3)))
    assert np.array_equal(results[2], values(2, (4, 3)))
    want = values(1, (4, 3))
    want[:, ::2] += 1
    assert np.array_equal(results[1], want)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [0, 1, 5, 8])
def test_reduce_scatter_in_place_returns_a_view_of_x(size, rows):
    def body(rank):
        x = values(rank, (rows, 2))
        mine = rc.reduce_scatter_(x, rc.AVERAGE)
        assert mine.size == 0 or np.shares_memory(mine, x)
        return mine

    pieces = run_ranks(size, body)
    want = sum(values(r, (rows, 2)) for r in range(size)) / size
    assert [len(p) for p in pieces] == [rows // size + (r < rows % size) for r in range(size)]
    assert np.array_equal(np.concatenate(pieces), want)


def test_reduce_scatter_in_place_refuses_a_strided_array():
    def body(rank):
        with pytest.raises(ValueError, match=r"contiguous: pass x.copy\(\)"):
            rc.reduce_scatter_(np.ones((4, 4))[:, ::2])

    run_ranks(2, body)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_gather_takes_parts_that_differ_in_their_first_dimension(size, dtype):
    parts = [values(r, (r % 3, 2), dtype) for r in range(size)]
    results = run_ranks(size, lambda r: rc.gather(parts[r], size - 1))
    assert np.array_equal(results[-1], np.concatenate(parts))
    assert results[-1].dtype == dtype
    assert all(result is None for result in results[:-1])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [0, 1, 5, 8])
@pytest.mark.parametrize("dtype", ["float16", "bool", "complex128"])
def test_scatter_gives_the_first_ranks_one_row_more(size, rows, dtype):
    root = size - 1
    whole = values(0, (rows, 3), dtype)
    pieces = run_ranks(size, lambda r: rc.scatter(whole if r == root else None, root))
    assert [len(p) for p in pieces] == [rows // size + (r < rows % size) for r in range(size)]
    assert np.array_equal(np.concatenate(pieces), whole)
    assert all(p.dtype == dtype and not np.shares_memory(p, whole) for p in pieces)


def test_scatter_without_an_array_on_root_is_the_same_error_everywhere():
    def body(rank):
        with pytest.raises(rc.MismatchError, match="rank 1 could not take part: TypeError"):
            rc.scatter(np.ones(4) if rank == 0 else None, root=1)
        return rc.scatter(np.arange(2.0), root=1).tolist()

    assert run_ranks(2, body) == [[0.0], [1.0]]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["float16", "int64", "bool"])
def test_alltoall_transposes(size, dtype):
    def rows_for(source, dest):
        return values(source + 2 * dest, ((source + dest) % 3, 2), dtype)

    def body(rank):
        pieces = [rows_for(rank, dest) for dest in range(size)]
        return rc.alltoall(np.concatenate(pieces), [len(p) for p in pieces], return_splits=True)

    for rank, (rows, splits) in enumerate(run_ranks(size, body)):
        want = [rows_for(source, rank) for source in range(size)]
        assert splits == [len(w) for w in want]
        assert np.array_equal(rows, np.concatenate(want))


def test_alltoall_shares_evenly_by_default():
    results = run_ranks(3, lambda r: rc.alltoall(np.arange(6) + 10 * r).tolist())
    assert results == [[0, 1, 10, 11, 20, 21], [2, 3, 12, 13, 22, 23], [4, 5, 14, 15, 24, 25]]


@pytest.mark.parametrize(
    ("rows", "splits", "message"),
    [
        (5, None, "5 rows cannot be shared evenly by 2"),
        (5, [2, 2], "the sum 5"),
        (5, [6, -1], "numbers >= 0"),
        (5, [5], "one per rank"),
    ],
)
def test_wrong_splits_are_told(rows, splits, message):
    def body(rank):
        with pytest.raises(ValueError, match=message):
            rc.alltoall(np.ones(rows), splits)
        return float(rc.allreduce(np.ones(1))[0])

    assert run_ranks(2, body) == [2.0, 2.0]


def test_splits_that_are_no_whole_numbers_are_refused():
    def body(rank):
        with pytest.raises(TypeError, match="must be 2 integers, one per rank"):
            rc.alltoall(np.ones(5), [2.5, 2.5])

    run_ranks(2, body)


MIXED = [
    ((3, 2), "float32"),
    ((), "float64"),
    ((0,), "float32"),
    ((7,), "float16"),
    ((5,), "float32"),
    ((6,), "int32"),  # as wide as float32, which it must not be fused with
]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("in_place", [False, True])
def test_grouped_allreduce_is_allreduce_of_each(size, in_place):
    def body(rank):
        xs = [values(rank, shape, dtype) for shape, dtype in MIXED]
        before = [x.copy() for x in xs]
        results = (rc.grouped_allreduce_ if in_place else rc.grouped_allreduce)(xs, rc.AVERAGE)
        if in_place:
            assert all(a is b for a, b in zip(results, xs, strict=True))
        else:
            assert all(np.array_equal(a, b) for a, b in zip(xs, before, strict=True))
        return results

    for results in run_ranks(size, body):
        for (shape, dtype), result in zip(MIXED, results, strict=True):
            want = sum(values(r, shape, np.float32) for r in range(size)) / np.float32(size)
            assert result.dtype == dtype
            assert np.array_equal(result, want.astype(dtype))


def test_grouped_forms_equal_the_single_ones():
    def body(rank):
        xs = [values(rank, (5, 2)), values(rank, (3,), np.int16)]
        gathered = rc.grouped_allgather(xs)
        scattered = rc.grouped_reduce_scatter(xs, rc.MAX)
        assert all(
            np.array_equal(a, rc.allgather(x)) and np.array_equal(b, rc.reduce_scatter(x, rc.MAX))
            for a, b, x in zip(gathered, scattered, xs, strict=True)
        )
        return rc.grouped_allreduce([]), len(gathered)

    assert run_ranks(3, body) == [([], 2)] * 3


@pytest.mark.parametrize(
    ("mine", "message"),
    [
        ([np.ones(2)], r"rank 0 sent 2 arrays, rank 1 sent 1 arrays"),
        (
            [np.ones(2), np.ones(4)],
            r"array 1: rank 0 sent float64 \(3,\), rank 1 sent float64 \(4,\)",
        ),
        (np.ones(2), "rank 1 could not take part: TypeError: grouped_allreduce takes a list"),
    ],
)
def test_groups_that_differ_are_the_same_error_everywhere(mine, message):
    def body(rank):
        with pytest.raises(rc.MismatchError, match=message):
            rc.grouped_allreduce([np.ones(2), np.ones(3)] if rank == 0 else mine)
        return float(rc.allreduce(np.ones(1))[0])

    assert run_ranks(2, body) == [2.0, 2.0]


@pytest.mark.parametrize("size", SIZES)
def test_allgather_object_brings_every_object(size):
    results = run_ranks(size, lambda r: rc.allgather_object({"rank": r, "data": "x" * 1000 * r}))
    want = [{"rank": r, "data": "x" * 1000 * r} for r in range(size)]
    assert results == [want] * size


@pytest.mark.parametrize("size", SIZES)
def test_objects_go_to_root_and_come_from_there(size):
    root = size // 2
    objs = [{"rank": r, "data": "x" * 1000 * r} for r in range(size)]

    def body(rank):
        for name in (None, "n", "n"):
            gathered = rc.gather_object(objs[rank], root, name=name)
            assert gathered == (objs if rank == root else None)
            mine = rc.scatter_object(objs if rank == root else None, root, name=name and "m")
            assert mine == objs[rank]
            assert (mine is objs[rank]) == (rank == root)

    run_ranks(size, body)


@pytest.mark.parametrize(
    ("objs", "error"), [([1], "ValueError"), (None, "TypeError"), ("ab", "TypeError")]
)
def test_objects_that_are_not_one_per_rank_are_refused_everywhere(objs, error):
    def body(rank):
        with pytest.raises(rc.MismatchError, match=rf"rank 1 .* {error}: scatter_object: "):
            rc.scatter_object(objs if rank == 1 else None, root=1)
        return rc.scatter_object([3, 4] if rank == 1 else None, root=1)

    assert run_ranks(2, body) == [3, 4]


@pytest.mark.parametrize("kind", [rc.reduce, rc.gather, rc.scatter])
@pytest.mark.parametrize(("root", "error"), [(2, ValueError), (-1, ValueError), ("0", TypeError)])
def test_a_root_that_is_no_rank_is_refused(kind, root, error):
    def body(rank):
        with pytest.raises(error, match="root"):
            kind(np.ones(4), root=root)

    run_ranks(2, body)


@pytest.mark.parametrize("kind", [rc.gather, rc.alltoall, rc.allgather, rc.reduce_scatter_])
def test_a_number_has_no_rows(kind):
    def body(rank):
        with pytest.raises(ValueError, match="at least one dimension"):
            kind(np.array(1.0))

    run_ranks(2, body)


def test_grouped_arrays_that_overlap_are_refused_on_every_rank():
    def body(rank):
        x = np.ones((4, 6))
        for xs in ([x, x], [x[0], x[0]], [x[1:3], x[2:]]):
            with pytest.raises((ValueError, rc.MismatchError), match="can be reduced only once"):
                rc.grouped_allreduce_(xs)
        rc.grouped_allreduce_([x[:2], x[2:]])
        return (x == 2).all()

    assert all(run_ranks(2, body))
