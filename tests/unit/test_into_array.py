"""Collectives that write into memory of the caller."""

import numpy as np
import pytest
from harness import run_ranks

import ringcomm as rc
from ringcomm.collectives.operators import ReductionOptions
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.operations.into_array import (
    plan_allgather_into,
    plan_alltoall_into,
    plan_reduce_scatter_into,
)


def start(plan, *args, **options):
    return engine().start("test", None, lambda g: plan(g, None, *args, **options)).wait()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [0, 1, 7, 5000])
@pytest.mark.parametrize("is_own_part", [False, True])
def test_allgather_into_fills_what_is_passed(size, count, is_own_part, wire):
    def body(rank):
        out = np.full((size, count), -1.0)
        x = out[rank] if is_own_part else np.empty(count)
        x[:] = rank
        assert start(plan_allgather_into, out, x) is out
        return out

    expected = np.repeat(np.arange(size, dtype=float), count).reshape(size, count)
    assert all((out == expected).all() for out in run_ranks(size, body))


@pytest.mark.parametrize("counts", [[3, 0, 2], [0, 0, 5], [1, 1, 1]])
def test_parts_of_an_allgather_may_differ(counts, wire):
    def body(rank):
        out = np.empty(sum(counts), np.float32)
        return start(plan_allgather_into, out, np.full(counts[rank], rank, np.float32), counts)

    expected = np.repeat(np.arange(3), counts)
    assert all((out == expected).all() for out in run_ranks(3, body))


@pytest.mark.parametrize("counts", [[3, 0, 2], [4, 4, 4], [1000, 1, 70]])
@pytest.mark.parametrize("op", [rc.SUM, rc.AVERAGE, rc.MAX])
def test_reduce_scatter_into_gives_each_rank_its_part(counts, op, wire):
    bounds = np.cumsum([0, *counts])
    whole = [np.arange(sum(counts), dtype=np.float32) * (rank + 1) for rank in range(3)]

    def body(rank):
        out = np.empty(counts[rank], np.float32)
        x = whole[rank].copy()
        start(plan_reduce_scatter_into, out, x, ReductionOptions(op), counts=counts)
        assert (x == whole[rank]).all()
        return out

    reduce = {rc.SUM: np.sum, rc.AVERAGE: np.mean, rc.MAX: np.max}[op]
    expected = reduce(whole, axis=0)
    for rank, out in enumerate(run_ranks(3, body)):
        np.testing.assert_allclose(out, expected[bounds[rank] : bounds[rank + 1]], rtol=1e-6)


@pytest.mark.parametrize("is_registered", [False, True])
@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_a_part_may_be_written_over_another_part_of_what_is_reduced(is_registered, shift, wire):
    count = 100_003

    def body(rank):
        make = rc.empty if is_registered else np.empty
        x = make(3 * count, "float32")
        at = (rank + 1) % 3 * count  # where the next rank's part is, or a little beside that
        at = min(max(at + shift, 0), 2 * count)
        for round_ in range(5):
            values = np.arange(3 * count) % 61 + round_
            x[:] = values * (rank + 1)
            out = x[at : at + count]
            start(plan_reduce_scatter_into, out, x, ReductionOptions(rc.SUM))
            np.testing.assert_array_equal(out, 6 * values[rank * count : (rank + 1) * count])

    run_ranks(3, body)


def test_an_alltoall_over_its_own_source_is_refused_on_every_rank(wire):
    def body(rank):
        x = np.arange(6.0)
        out = x[1:3] if rank == 0 else np.empty(2)
        with pytest.raises((ValueError, rc.MismatchError), match="overlaps with x"):
            start(plan_alltoall_into, out, x[:2], received=[1, 1], sent=[1, 1])
        return (x == np.arange(6.0)).all()

    assert all(run_ranks(2, body))


def test_what_is_received_may_not_lie_over_what_is_sent():
    def body(rank):
        x = np.arange(6.0)
        with pytest.raises(ValueError, match="x and out overlap"):
            rc.sendrecv(x[:4], 1 - rank, x[2:], 1 - rank)
        assert rc.sendrecv(x[::2], 1 - rank, x[1::2], 1 - rank) == 1 - rank
        assert (x[1::2] == [0, 2, 4]).all()

    run_ranks(2, body)


def test_alltoall_into_takes_each_part_to_its_rank(wire):
    def body(rank):
        sent = [rank + dest for dest in range(3)]
        received = [source + rank for source in range(3)]
        x = np.repeat(np.arange(3) + 10 * rank, sent)
        return start(
            plan_alltoall_into, np.empty(sum(received), x.dtype), x, received=received, sent=sent
        )

    for rank, out in enumerate(run_ranks(3, body)):
        counts = [source + rank for source in range(3)]
        assert (out == np.repeat(10 * np.arange(3) + rank, counts)).all()


def test_alltoall_into_of_two_dtypes_names_them_without_a_shape(wire):
    def body(rank):
        x = np.zeros(2, np.float64 if rank == 0 else np.float32)
        with pytest.raises(rc.MismatchError, match=r"float64 \(\)"):
            start(plan_alltoall_into, np.empty_like(x), x, received=[1, 1], sent=[1, 1])

    run_ranks(2, body)


def test_splits_that_do_not_fit_are_the_same_error_on_every_rank(wire):
    def body(rank):
        sent, received = [1, 2], [1, 3] if rank == 1 else [1, 2]
        x = np.zeros(3)
        with pytest.raises(rc.MismatchError) as caught:
            start(plan_alltoall_into, np.empty(sum(received)), x, received=received, sent=sent)
        rc.barrier()  # the engine works on
        return str(caught.value)

    first, second = run_ranks(2, body)
    assert first == second
    assert "rank 0 sends 2 elements to rank 1, which expects 1" in first


@pytest.mark.parametrize(
    ("out", "x", "counts", "text"),
    [
        (np.zeros(5), np.zeros(2), None, "out"),
        (np.zeros(4), np.zeros(2), [3, 1], "x has 2 elements"),
        (np.zeros((4, 4))[:, :1], np.zeros(2), None, "contiguous"),
        (np.zeros(4), np.zeros(2, np.float32), None, "float64"),
    ],
)
def test_memory_that_does_not_fit_is_refused_before_anything_is_sent(out, x, counts, text):
    def body(_):
        with pytest.raises((ValueError, TypeError, rc.MismatchError), match=text):
            start(plan_allgather_into, out.copy() if "contig" not in text else out, x, counts)
        rc.barrier()

    run_ranks(2, body)


def test_sizes_that_differ_between_ranks_are_a_mismatch(wire):
    def body(rank):
        x = np.zeros(2 + rank)
        with pytest.raises(rc.MismatchError, match=r"\(2,\).*\(3,\)"):
            start(plan_allgather_into, np.zeros(2 * x.size), x)

    run_ranks(2, body)
