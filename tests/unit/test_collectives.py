"""Every collective against numpy, over ranks as threads."""

import ml_dtypes
import numpy as np
import pytest
from harness import at_length, outcomes, run_ranks
from sample_values import total, whole_numbers

import ringcomm as rc

pytestmark = pytest.mark.usefixtures("wire")

SIZES = at_length([1, 2, 3, 4, 7, 8], [1, 2, 5])
REDUCIBLE = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int32, np.int64]
EXACT = [np.float32, np.float64, np.int32, np.int64]
MOVABLE = [*REDUCIBLE, np.int8, np.uint16, np.bool_, np.complex64, np.complex128]


def counts(size):
    return sorted({0, 1, size - 1, size, 1000, 4099})


CASES = [(size, count) for size in SIZES for count in counts(size)]


@pytest.mark.parametrize(("size", "count"), CASES)
@pytest.mark.parametrize("dtype", REDUCIBLE)
def test_allreduce_sums_exactly(size, count, dtype):
    results = run_ranks(size, lambda r: rc.allreduce(whole_numbers(r, count, dtype)))
    expected = total(size, count, dtype).astype(dtype)
    assert all(r.dtype == dtype and np.array_equal(r, expected) for r in results)


@pytest.mark.parametrize("size", SIZES)
def test_allreduce_of_a_mebi_element_array(size):
    results = run_ranks(size, lambda r: rc.allreduce(whole_numbers(r, 1 << 20, np.float32)))
    assert all(np.array_equal(r, total(size, 1 << 20, np.float32)) for r in results)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_random_sums_keep_the_error_bound_and_the_same_bits(size, dtype):
    data = np.random.default_rng(size).standard_normal((size, 5000)).astype(dtype)
    results = run_ranks(size, lambda r: rc.allreduce(data[r]))
    bound = size * np.finfo(dtype).eps * np.abs(data).astype(np.float64).sum(0)
    assert (np.abs(results[0] - data.astype(np.float64).sum(0)) <= bound).all()
    assert all(np.array_equal(r.view(np.uint8), results[0].view(np.uint8)) for r in results)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_16_bit_sums_are_rounded_once(size, dtype):
    data = np.random.default_rng(size).standard_normal((size, 3001)).astype(dtype)
    acc = data[0].astype(np.float32)
    for row in data[1:]:
        acc = acc + row.astype(np.float32)
    sums = run_ranks(size, lambda r: rc.allreduce(data[r]))
    means = run_ranks(size, lambda r: rc.allreduce(data[r], rc.AVERAGE))
    assert all(np.array_equal(s, acc.astype(dtype)) for s in sums)
    assert all(np.array_equal(m, (acc / np.float32(size)).astype(dtype)) for m in means)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_average_divides_the_sum_once(size, dtype):
    expected = total(size, 100, dtype).astype(dtype) / dtype(size)
    results = run_ranks(size, lambda r: rc.allreduce(whole_numbers(r, 100, dtype), rc.AVERAGE))
    assert all(np.array_equal(r, expected) for r in results)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_average_of_integers_truncates_toward_zero(size, dtype):
    expected = np.trunc(total(size, 100, dtype) / size).astype(dtype)
    results = run_ranks(size, lambda r: rc.allreduce(whole_numbers(r, 100, dtype), rc.AVERAGE))
    assert all(np.array_equal(r, expected) for r in results)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "uint64", "int64"])
@pytest.mark.parametrize("forced", ["auto", "ring", "hierarchical"])
@pytest.mark.usefixtures("wire")
def test_averages_of_integers_do_not_wrap(dtype, forced, monkeypatch):
    monkeypatch.setenv("RINGCOMM_ALGORITHM", forced)
    info, size = np.iinfo(dtype), 3
    tops = [[info.max - 20 * r - k for k in range(15)] for r in range(size)]
    low = [each - info.max + 60 for top in tops for each in top[::-1]]
    lows = [low[15 * r : 15 * r + 15] for r in range(size)]
    rows = np.array([[*t, *b, *[info.min] * 3] for t, b in zip(tops, lows, strict=True)], dtype)
    exact = [sum(column) for column in zip(*rows.tolist(), strict=True)]
    expected = [abs(each) // size * (1 if each >= 0 else -1) for each in exact]
    n = len(expected) // size  # elements of each rank

    def body(rank):
        x = rows[rank]
        whole = [
            rc.allreduce(x, rc.AVERAGE),
            rc.allreduce_(x.copy(), rc.AVERAGE),
            rc.allreduce_async(x, rc.AVERAGE, name="a").wait(),
            np.concatenate(rc.grouped_allreduce([x[:5], x[5:]], rc.AVERAGE)),
            rc.allreduce(x, rc.AVERAGE, deterministic=True),
        ]
        at_root = rc.reduce(x, rc.AVERAGE, 0)
        if rank == 0:
            whole.append(at_root)
        return [each.tolist() for each in whole], rc.reduce_scatter(x, rc.AVERAGE).tolist()

    for rank, (whole, part) in enumerate(run_ranks(size, body)):
        assert all(each == expected for each in whole)
        assert part == expected[rank * n : (rank + 1) * n]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_integer_sums_wrap(dtype):
    top = np.iinfo(dtype).max
    results = run_ranks(3, lambda r: rc.allreduce(np.array([top], dtype)))
    assert all(r[0] == dtype(top - 2) for r in results)  # 3 * (2^n - 1) - 2^(n + 1)


def test_infinities_and_nan_go_through():
    data = np.array([[np.inf, -np.inf, np.nan, 1], [1, np.inf, 1, 1]], np.float32)
    with np.errstate(invalid="ignore"):
        results = run_ranks(2, lambda r: rc.allreduce(data[r]))
        expected = data[0] + data[1]
    assert all(np.array_equal(r, expected, equal_nan=True) for r in results)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1), (5, 7), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_any_shape_comes_back_in_that_shape(shape, dtype):
    results = run_ranks(3, lambda r: rc.allreduce(np.full(shape, r + 1, dtype)))
    assert all(isinstance(r, np.ndarray) and r.shape == shape for r in results)
    assert all((r == 6).all() for r in results)


def test_out_of_place_forms_leave_the_input_alone():
    def body(rank):
        x = np.full((6, 2), rank, np.float32)
        results = [rc.allreduce(x), rc.broadcast(x), rc.reduce_scatter(x), rc.allgather(x)]
        assert all(not np.shares_memory(x, result) for result in results)
        return x

    assert all((x == rank).all() for rank, x in enumerate(run_ranks(4, body)))


@pytest.mark.parametrize("view", [np.s_[::2], np.s_[::-1], np.s_[:, 1], np.s_[1:, :2]])
def test_strided_input_is_copied_right(view):
    def body(rank):
        return rc.allreduce((np.arange(24, dtype=np.float64).reshape(6, 4) + rank)[view])

    expected = (2 * np.arange(24).reshape(6, 4) + 1)[view]
    assert all(np.array_equal(r, expected) for r in run_ranks(2, body))


def test_in_place_on_a_strided_array_changes_just_that_part():
    def body(rank):
        whole = np.full((4, 4), rank + 1.0)
        returned = rc.allreduce_(whole[:, ::2])
        assert np.shares_memory(returned, whole)
        return whole

    for rank, whole in enumerate(run_ranks(3, body)):
        assert (whole[:, ::2] == 6).all()
        assert (whole[:, 1::2] == rank + 1).all()


def test_in_place_works_in_the_array_itself():
    def body(rank):
        x = np.full(1000, rank + 1.0, np.float32)
        assert rc.allreduce_(x) is x
        return x

    assert all((x == 6).all() for x in run_ranks(3, body))


def test_unaligned_and_fortran_input_work():
    def body(rank):
        store = np.zeros(41, np.uint8)
        x = store[1:].view(np.float64)
        x[:] = rank
        y = np.asfortranarray(np.arange(6.0).reshape(2, 3)) + rank
        return rc.allreduce(x), rc.allreduce(y), rc.broadcast(y, 1), rc.allreduce_(x)

    for x, y, of_rank_1, z in run_ranks(2, body):
        assert (x == 1).all()
        assert np.array_equal(y, 2 * np.arange(6.0).reshape(2, 3) + 1)
        assert np.array_equal(of_rank_1, np.arange(6.0).reshape(2, 3) + 1)
        assert (z == 1).all()


@pytest.mark.parametrize(("size", "count"), CASES)
@pytest.mark.parametrize("dtype", MOVABLE)
def test_broadcast_brings_root_s_values_to_all(size, count, dtype):
    root = size - 1
    results = run_ranks(size, lambda r: rc.broadcast(whole_numbers(r, count, dtype), root))
    expected = whole_numbers(root, count, dtype)
    assert all(r.dtype == dtype and np.array_equal(r, expected) for r in results)


def test_broadcast_in_place_overwrites_all_but_root():
    def body(rank):
        x = np.full((3, 3), rank, np.int8)
        assert rc.broadcast_(x, 2) is x
        return x

    assert all((x == 2).all() for x in run_ranks(4, body))


def test_read_only_root_may_broadcast_in_place():
    def body(rank):
        x = np.full(3, rank)
        x.flags.writeable = rank != 0
        return rc.broadcast_(x, 0)

    assert all((x == 0).all() for x in run_ranks(3, body))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", MOVABLE)
def test_allgather_takes_parts_that_differ_in_their_first_dimension(size, dtype):
    parts = [whole_numbers(r, 3 * (r % 3), dtype).reshape(-1, 3) for r in range(size)]
    results = run_ranks(size, lambda r: rc.allgather(parts[r]))
    assert all(np.array_equal(r, np.concatenate(parts)) for r in results)


@pytest.mark.parametrize("size", SIZES)
def test_allgather_of_nothing_is_empty(size):
    results = run_ranks(size, lambda r: rc.allgather(np.empty((0, 2), np.float32)))
    assert all(r.shape == (0, 2) for r in results)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [0, 1, 5, 8, 13])
@pytest.mark.parametrize("dtype", REDUCIBLE)
def test_reduce_scatter_gives_the_first_ranks_one_row_more(size, rows, dtype):
    def body(rank):
        return rc.reduce_scatter(whole_numbers(rank, rows * 2, dtype).reshape(rows, 2))

    expected = total(size, rows * 2, dtype).astype(dtype).reshape(rows, 2)
    pieces = run_ranks(size, body)
    assert [len(p) for p in pieces] == [rows // size + (r < rows % size) for r in range(size)]
    assert np.array_equal(np.concatenate(pieces), expected)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int64])
def test_reduce_scatter_averages(dtype):
    pieces = run_ranks(3, lambda r: rc.reduce_scatter(whole_numbers(r, 8, dtype), rc.AVERAGE))
    quotient = total(3, 8, np.float32) / np.float32(3)
    expected = np.trunc(quotient) if dtype == np.int64 else total(3, 8, dtype) / dtype(3)
    expected = quotient if dtype == np.float16 else expected
    assert np.array_equal(np.concatenate(pieces), expected.astype(dtype))


def test_strided_arrays_work_everywhere():
    def body(rank):
        whole = np.arange(24.0).reshape(6, 4) + 100 * rank
        scattered = rc.reduce_scatter(whole[::2, ::2])
        gathered = rc.allgather(whole[::3, 1])
        target = np.zeros((6, 4)) + rank
        rc.broadcast_(target[:, ::2], 1)
        return scattered, gathered, target

    results = run_ranks(2, body)
    both = [np.arange(24.0).reshape(6, 4) + 100 * r for r in range(2)]
    total_rows = (both[0] + both[1])[::2, ::2]
    assert np.array_equal(np.concatenate([r[0] for r in results]), total_rows)
    for rank, (_, gathered, target) in enumerate(results):
        assert np.array_equal(gathered, np.concatenate([b[::3, 1] for b in both]))
        assert (target[:, ::2] == 1).all()
        assert (target[:, 1::2] == rank).all()


@pytest.mark.parametrize("shape", [(0,), (3, 0), (2, 0, 5)])
def test_empty_arrays_work_in_place_too(shape):
    def body(rank):
        x = np.ones(shape)
        assert rc.allreduce_(x) is x
        assert rc.broadcast_(x, 1) is x

    run_ranks(2, body)


def test_root_may_be_any_integer():
    assert run_ranks(2, lambda r: int(rc.broadcast(np.array(r), np.int64(1)))) == [1, 1]


@pytest.mark.parametrize("name", [5, b"w", ["w"]])
def test_a_name_that_is_no_text_is_refused_before_anything_begins(name):
    """By the rank that passed it alone: under which name would the others have to be told?"""

    def body(rank):
        if rank == 1:
            with pytest.raises(TypeError, match="name must be a str or None, not"):
                rc.allreduce(np.ones(1), name=name)
        return float(rc.allreduce(np.ones(1), name="\udcff")[0])

    assert run_ranks(2, body) == [2.0, 2.0]


def test_reduce_scatter_then_allgather_is_allreduce():
    data = np.random.default_rng(1).standard_normal((5, 11, 3))

    def body(rank):
        return rc.allreduce(data[rank]), rc.allgather(rc.reduce_scatter(data[rank]))

    for direct, composed in run_ranks(5, body):
        assert np.allclose(direct, composed, rtol=1e-14)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [None, "w"])
def test_barrier_lets_nobody_out_before_all_are_in(size, name):
    arrived = []

    def body(rank):
        seen = []
        for turn in range(3):  # a named one is known to all ranks from the second on
            arrived.append(rank)
            rc.barrier(name=name)
            seen.append(len(arrived) >= (turn + 1) * size)
        return seen

    assert run_ranks(size, body) == [[True] * 3] * size


@pytest.mark.parametrize("root", [0, 2])
def test_broadcast_object_brings_any_object(root):
    def body(rank):
        return rc.broadcast_object({"rank": rank, "data": "x" * 10_000}, root)

    assert all(r == {"rank": root, "data": "x" * 10_000} for r in run_ranks(3, body))


def test_object_that_cannot_be_pickled_is_the_same_error_everywhere():
    def body(rank):
        with pytest.raises(rc.MismatchError, match=r"rank 1 could not take part: .*pickle"):
            rc.broadcast_object(lambda: None, 1)
        return rc.broadcast_object(rank, 1)

    assert run_ranks(3, body) == [1, 1, 1]


def test_many_operations_in_a_row_do_not_mix():
    def body(rank):
        return [float(rc.allreduce(np.array(i + rank))) for i in range(300)]

    assert all(r == [3 * i + 3 for i in range(300)] for r in run_ranks(3, body))


@pytest.mark.parametrize(
    ("argument", "error", "message"),
    [
        ([1, 2], TypeError, "numpy.asarray"),
        (np.array(["a"]), TypeError, "dtype <U1"),
        (np.array([None]), TypeError, "dtype object"),
        (np.ones(2, ">f4"), TypeError, "byte order"),
        (np.ma.masked_array([1.0, 2.0], [0, 1]), TypeError, "mask"),
        (np.ones(2, "M8[s]"), TypeError, "dtype datetime64"),
    ],
)
def test_the_same_bad_argument_everywhere_is_a_plain_error(argument, error, message):
    def body(rank):
        with pytest.raises(error, match=message):
            rc.allreduce(argument)
        return float(rc.allreduce(np.ones(1))[0])

    assert run_ranks(2, body) == [2.0, 2.0]


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.ma.array(np.arange(16.0).reshape(8, 2), mask=[[0, 1]] * 8)[::2], "masked array"),
        (np.array([[None], [None]]), "dtype object"),
    ],
)
def test_scatter_refuses_on_root_what_cannot_be_sent(x, message):
    def body(rank):
        with pytest.raises((TypeError, rc.MismatchError), match=f"cannot communicate.*{message}"):
            rc.scatter(x)
        return float(rc.allreduce(np.ones(1))[0])

    assert run_ranks(2, body) == [2.0, 2.0]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: rc.allreduce(np.ones(2), "sum"), TypeError, "op must be"),
        (lambda: rc.broadcast(np.ones(2), 5), ValueError, "root is 5; ranks are 0 to 1"),
        (lambda: rc.broadcast(np.ones(2), -1), ValueError, "root is -1"),
        (lambda: rc.broadcast(np.ones(2), 1.0), TypeError, "root must be a rank"),
        (lambda: rc.allgather(np.array(1.0)), ValueError, "at least one dimension"),
        (lambda: rc.reduce_scatter(np.array(1.0)), ValueError, "at least one dimension"),
        (lambda: rc.allreduce_(np.broadcast_to(np.ones(1), 4)), ValueError, "read-only"),
    ],
)
def test_bad_calls_say_what_is_wrong(call, error, message):
    def body(rank):
        with pytest.raises(error, match=message):
            call()

    run_ranks(2, body)


def test_overlapping_elements_cannot_be_written_in_place():
    def body(rank):
        x = np.lib.stride_tricks.as_strided(np.ones(1), (4,), (0,), writeable=True)
        with pytest.raises(ValueError, match="overlap"):
            rc.allreduce_(x)

    run_ranks(2, body)


def test_uninitialized_says_so():
    with pytest.raises(rc.NotInitializedError, match="init"):
        rc.allreduce(np.ones(1))


def test_after_a_rank_raised_the_others_know_why():
    def body(rank):
        if rank == 1:
            raise ValueError("boom")
        rc.allreduce(np.ones(10))

    results = outcomes(3, body)
    assert isinstance(results[1], ValueError)
    for rank in (0, 2):
        assert isinstance(results[rank], rc.PeerFailedError)
        assert results[rank].rank == 1
        assert "boom" in str(results[rank])
