"""Numbers of Python and numpy in collectives: a number comes back as a number of its kind."""

import inspect

import ml_dtypes
import numpy as np
import pytest
from harness import errors_of_ranks, run_ranks

import ringcomm as rc

pytestmark = pytest.mark.usefixtures("wire")

NUMBERS = [
    [True, False],
    [3, -(2**40)],
    [-(2**63), 2**63 - 1],
    [0.1, 1e300],
    [1 + 2j, -0.5j],
    *([of(1), of(2)] for of in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)),
    *([of(1), of(2)] for of in (np.int8, np.int64, np.uint64, np.complex64)),
    [np.bool_(False), np.bool_(True)],
]
IDS = [type(pair[0]).__name__ for pair in NUMBERS]


def combined(pair, op):
    """Return what an allreduce of arrays of one element gives."""
    arrays = [np.array([each]) for each in pair]
    return run_ranks(2, lambda rank: rc.allreduce(arrays[rank], op))[0][0]


@pytest.mark.parametrize("op", [rc.SUM, rc.PRODUCT], ids=str)
@pytest.mark.parametrize("pair", NUMBERS, ids=IDS)
def test_a_number_gives_what_an_array_of_one_element_gives_as_a_number_of_its_kind(pair, op):
    want, kind = combined(pair, op), type(pair[0])

    def body(rank):
        x = pair[rank]
        for _ in range(4):  # from the third time on, a known call
            reduced = rc.reduce(x, op, 1)
            results = [
                rc.allreduce(x, op),
                rc.allreduce(x, op, name="named"),
                rc.allreduce_async(x, op, deterministic=True).wait(),
                rc.broadcast(x, 1),
                rc.broadcast_async(x, 1).wait(),
            ]
            assert {type(each) for each in results} == {kind}
            assert results == [want] * 3 + [pair[1]] * 2
            assert (type(reduced), reduced) == (kind, want) if rank else reduced is None

    run_ranks(2, body)


@pytest.mark.parametrize("pair", NUMBERS, ids=IDS)
def test_gathered_numbers_are_an_array_with_one_dimension(pair):
    want = np.array(pair)

    def body(rank):
        for _ in range(4):
            at_root = [rc.gather(pair[rank], 1), rc.gather_async(pair[rank], 1).wait()]
            if rank == 0:
                assert at_root == [None, None]
                continue
            for each in at_root:
                assert type(each) is np.ndarray
                assert (each.dtype, each.shape) == (want.dtype, (2,))
                assert np.array_equal(each, want)

    run_ranks(2, body)


def test_the_dtype_of_a_number_of_python():
    pairs = [(True, "bool"), (1, "int64"), (1.0, "float64"), (1j, "complex128")]

    def body(rank):
        gathered = [rc.gather(x) for x, _ in pairs]
        assert rank or [each.dtype.name for each in gathered] == [name for _, name in pairs]

    run_ranks(2, body)


def test_ints_wrap_and_their_average_is_truncated_as_in_arrays():
    def body(rank):
        return rc.allreduce(2**62), rc.allreduce(2 + 3 * rank, rc.AVERAGE)

    assert run_ranks(2, body) == [(-(2**63), 3)] * 2


def test_numbers_and_arrays_of_no_dimension_go_together_and_each_gets_its_own_kind():
    passed = [np.float32(1), np.array(1, np.float32)]

    def body(rank):
        kinds = []
        for turn in range(6):
            x = passed[(turn + rank) % 2]
            for result in (rc.allreduce(x), rc.broadcast(x, 0), rc.broadcast(x, 1)):
                assert type(result) is type(x)
                kinds.append(result.dtype)
        return set(kinds)

    assert run_ranks(2, body) == [{np.dtype(np.float32)}] * 2


@pytest.mark.parametrize(
    ("first", "second", "texts"),
    [
        (1, 1.0, ("rank 0 sent int64 ()", "rank 1 sent float64 ()")),
        (True, 1, ("rank 0 sent bool ()", "rank 1 sent int64 ()")),
        (np.float32(1), 1.0, ("rank 0 sent float32 ()", "rank 1 sent float64 ()")),
        (1.0, np.ones(1), ("rank 0 sent float64 ()", "rank 1 sent float64 (1,)")),
    ],
)
def test_numbers_of_two_dtypes_are_a_mismatch(first, second, texts):
    def body(rank):
        for call in (rc.allreduce, rc.reduce):
            with pytest.raises(rc.MismatchError) as found:
                call(second if rank else first)
            assert all(text in str(found.value) for text in texts)
        return rc.allreduce(1)

    assert run_ranks(2, body) == [2, 2]


TOO_LARGE = {
    2**63: "an int must fit in int64, -9223372036854775808 to 9223372036854775807",
    -(2**63) - 1: "x is -9223372036854775809; ",
    10**5000: "x is an int of 16610 bits; ",  # Python prints none with so many digits
}


@pytest.mark.parametrize("name", ["allreduce", "broadcast", "gather_async"])
def test_an_int_that_int64_does_not_have_is_named(name):
    def body(_):
        for x, text in TOO_LARGE.items():
            with pytest.raises(ValueError, match=text):
                getattr(rc, name)(x).wait()
        return rc.allreduce(1)

    assert run_ranks(2, body) == [2, 2]


def test_an_int_that_int64_does_not_have_on_one_rank_is_told_to_all():
    def body(rank):
        for call in (rc.allreduce, rc.gather):
            with pytest.raises(rc.MismatchError, match="rank 1 could not take part: ValueError"):
                call(2**63 if rank else 0)
        return rc.allreduce(1)

    assert run_ranks(2, body) == [2, 2]


IN_PLACE = ["allreduce_", "reduce_", "broadcast_", "allreduce_async_", "broadcast_async_"]


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("x", [3.0, np.int8(3)])
def test_no_number_is_overwritten(name, x):
    kind = name.replace("_async", "")

    def body(_):
        with pytest.raises(TypeError) as found:
            getattr(rc, name)(x).wait()
        assert str(found.value) == (
            f"{kind}: x is the number {x!r}, which cannot be overwritten. Use {kind[:-1]}(), "
            "which returns the result, or pass an array"
        )
        return rc.allreduce(1)

    assert run_ranks(2, body) == [2, 2]


@pytest.mark.parametrize("name", ["allgather", "reduce_scatter", "alltoall"])
def test_collectives_that_share_out_rows_take_no_number(name):
    errors = errors_of_ranks(2, lambda _: getattr(rc, name)(3.0))
    assert [type(each) for each in errors] == [TypeError] * 2


def test_a_rank_in_join_takes_part_in_calls_with_numbers():
    def body(rank):
        if rank < 2:
            result = (
                rc.allreduce(rank + 1),
                rc.broadcast(rank + 0.5, 1),
            )
            assert result == (3, 1.5)
        return rc.join()

    assert len(set(run_ranks(3, body))) == 1


def test_help_says_what_a_collective_returns():
    assert str(inspect.signature(rc.allreduce).return_annotation) == "A"
    assert inspect.signature(rc.gather_async).return_annotation == "Handle[A | None]"
