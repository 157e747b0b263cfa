"""Rounds of rows that are held: measured, then released, whatever moves meanwhile."""

import math

import numpy as np
import pytest
from harness import at_length
from ps_ranks_as_threads import run_workers

import ringcomm as rc
from ringcomm import ps
from ringcomm.ps.client import request_order
from ringcomm.ps.job import session
from ringcomm.ps.placement.partitions import HASH_PARTITIONS, Move
from ringcomm.ps.placement.rebalance import move_all
from ringcomm.ps.server.rows.row_gradients import RowGradient, squares_of_rows

pytestmark = pytest.mark.one_wire

DIM = 3
KEYS = np.array([5, 11, 5, 900, 2**60])
WEIGHTS = [(1.0, 1.0), (3.0, 1.0), (0.0, 2.0)]


def table(mode="sync", **options):
    options.setdefault("updater", ps.optim.Add())
    return ps.hashtable("e", DIM, mode=mode, **options)


def rows_of(rank, step):
    return np.random.default_rng(step * 9 + rank).standard_normal((len(KEYS), DIM)).astype("f4")


def mean_of(n_workers, step, weights):
    """Return the mean as a row per distinct key, in the order of the keys."""
    total = np.zeros((len(KEYS), DIM))
    for rank in range(n_workers):
        total += rows_of(rank, step) * weights[rank]
    total /= sum(weights[:n_workers])
    return {key: total[key == KEYS].sum(axis=0) for key in sorted(set(KEYS.tolist()))}


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_mean_is_measured_released_and_dropped_on_all_servers(weights):
    require_means(weights)


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("weights", at_length(WEIGHTS, [(3.0, 1.0)]))  # 12 moves take a second
def test_the_mean_is_measured_released_and_dropped_on_all_servers_while_rows_move(weights):
    require_means(weights, is_moving=True)


def require_means(weights, *, is_moving=False):
    def body(rank):
        kv = table()
        sums, measured = 0, []
        for step in range(6):
            push = kv.push(KEYS, rows_of(rank, step), weight=weights[rank], hold=True)
            if is_moving and rank == step % 2:
                moves = [Move((kv.number, part), -1, step % 2) for part in range(64)]
                move_all(session(), moves).wait()
            mean = push.wait()
            if is_moving and rank == step % 2:  # also what is held
                every = range(HASH_PARTITIONS)
                moves = [Move((kv.number, part), -1, 1 - step % 2) for part in every]
                move_all(session(), moves).wait()
            factor = [1.0, 0.125, None][step % 3]
            kv.release(factor).wait()
            assert (mean.applied, mean.why, mean.is_finite) == (True, "", True)
            measured.append(mean.squares)
            expected = mean_of(2, step, weights)
            sums = sums + (factor or 0) * np.array(list(expected.values()))
            assert mean.squares == pytest.approx(sum((x**2).sum() for x in expected.values()))
        np.testing.assert_allclose(kv.pull(sorted(set(KEYS.tolist()))).wait(), sums, atol=1e-5)
        return measured

    first, second = run_workers(2, body, 2)
    assert first == pytest.approx(second)


def test_a_round_of_batches_without_samples_changes_nothing():
    def body(rank):
        kv = table(updater=ps.optim.SGD(1.0))
        told = kv.push(KEYS, rows_of(rank, 0), weight=0.0).wait()
        kv.push(KEYS[:1], np.ones((1, DIM), "f4"), weight=rank).wait()
        return told.why, len(kv), kv.pull(KEYS[:1]).wait()[0, 0]

    assert run_workers(2, body, 2) == [("empty", 1, -1.0)] * 2


@pytest.mark.parametrize("compression", [None, "bf16", "int8"])
def test_an_inf_on_one_worker_is_told_to_all(compression):
    def body(rank):
        kv = table(compression=compression)
        x = rows_of(rank, 0)
        x[3, 1] = np.inf if rank else 1
        mean = kv.push(KEYS, x, hold=True).wait()
        kv.release(None).wait()
        return mean.is_finite, len(kv)

    assert run_workers(2, body, 2) == [(False, 0)] * 2


def test_a_worker_that_comes_late_to_a_round_that_is_held_is_told():
    def body(rank):
        kv = table(ps.FirstOf(1))
        if rank == 0:
            mean = kv.push(KEYS, rows_of(0, 0), hold=True).wait()
            rc.barrier()  # the other is late now
            rc.barrier()
            kv.release(1.0).wait()
            rc.barrier()
            return mean.applied, mean.squares > 0
        rc.barrier()
        late = kv.push(KEYS, rows_of(1, 0), hold=True).wait()
        rc.barrier()
        rc.barrier()
        kv.release(0.5).wait()  # of a round that is over: nothing
        np.testing.assert_allclose(kv.pull(KEYS[3:]).wait(), rows_of(0, 0)[3:])
        return late.why, late.squares

    assert run_workers(2, body) == [(True, True), ("late", 0.0)]


def test_more_rows_than_the_credit_may_be_held(monkeypatch):
    """Else the third table would wait for credit that comes back when all are released."""
    monkeypatch.setattr(request_order, "CREDIT_NBYTES", 100_000)

    def body(_):
        tables = [ps.hashtable(f"e{k}", 20, mode="sync", updater=ps.optim.Add()) for k in range(3)]
        rows = np.ones((1000, 20), np.float32)
        pushes = [kv.push(np.arange(1000), rows, hold=True) for kv in tables]
        squares = [push.wait().squares for push in pushes]
        for kv in tables:
            kv.release(1.0)
        return squares, [kv.pull([999]).wait()[0, 0] for kv in tables]

    assert run_workers(1, body) == [([20_000.0] * 3, [1.0] * 3)]


@pytest.mark.parametrize(
    ("mode", "push", "message"),
    [
        ("async", {"hold": True}, r"hold=True is for gradients of a table with rounds.*'async'"),
        ("sync", {"hold": True, "assign": True}, "nor with assign=True"),
        ("async", {"weight": 0.0}, "weight is 0.0; it must be more than 0"),
        ("sync", {"weight": -1.0}, "weight is -1.0; it must be at least 0"),
        ("sync", {"weight": math.nan}, "weight is nan; it must be at least 0, and finite"),
    ],
)
def test_a_mistake_is_told(mode, push, message):
    def body(_):
        kv = table(mode)
        with pytest.raises(ValueError, match=message):
            kv.push(KEYS, rows_of(0, 0), **push)

    run_workers(1, body)


def test_the_mean_is_that_of_16_bits_too():
    x = np.array([[1.5, -2.0, 0.25], [4.0, 0.5, 1.0]], np.float32)
    keys = np.array([7, 7], np.uint64)
    for rows in (x, x.astype(np.float16), (x.view(np.uint32) >> 16).astype(np.uint16)):
        part = RowGradient(3.0, np.empty(0), keys, rows.reshape(-1), 0)
        assert squares_of_rows([part], DIM) == ((x.sum(axis=0) ** 2).sum(), True)
