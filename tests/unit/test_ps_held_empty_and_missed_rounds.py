"""Rounds that wait for their release, that nobody contributes to, and that went by."""

import math
import threading

import numpy as np
import pytest
from ps_ranks_as_threads import run_workers, stop_rounds

import ringcomm as rc
from ringcomm import ps
from ringcomm.ps import job
from ringcomm.ps.client import json_requests
from ringcomm.ps.client.dense.optimizer_state import TableState, pull_state, push_state
from ringcomm.ps.placement.partitions import Move
from ringcomm.ps.placement.rebalance import move_all
from ringcomm.ps.protocol.frames import ServerOption

pytestmark = [pytest.mark.usefixtures("wire"), pytest.mark.one_wire]
N = 1000


def table(mode="sync", updater=None, dtype="float64"):
    updater = ps.optim.SGD(1.0) if updater is None else updater
    return ps.table("w", N, dtype, mode=mode, updater=updater, block_nbytes=900)


@pytest.mark.parametrize("n_servers", [1, 3])
def test_a_held_mean_tells_its_norm_and_is_scaled_when_it_is_released(n_servers):
    def body(rank):
        t = table()
        told = t.push(np.full(N, rank + 1.0), hold=True).wait()
        t.release(2.0)
        return told, t.pull().wait()

    for told, values in run_workers(2, body, n_servers):
        assert told.applied
        assert told.is_finite
        assert math.isclose(told.squares, N * 1.5**2)
        assert (values == -3).all()


def test_a_held_mean_that_is_dropped_counts_as_no_step_of_the_updater():
    def body(rank):
        t = table(updater=ps.optim.Adam(0.1))
        told = t.push(np.full(N, math.inf if rank else 1.0), hold=True).wait()
        t.release(None)
        before = t.pull().wait().copy()
        t.push(np.ones(N), hold=True).wait()
        t.release(1.0)
        return told, before, t.pull().wait(), pull_state(t)

    for told, before, values, state in run_workers(2, body):
        assert not told.is_finite
        assert (before == 0).all()
        np.testing.assert_allclose(values, -0.1)  # Adam's first step is as long as lr
        assert state.steps == 1


@pytest.mark.parametrize(("factor", "expected"), [(2.0, -3.0), (None, 0.0)])
@pytest.mark.parametrize("n_servers", [1, 3])
def test_a_release_that_comes_before_the_mean_waits_for_it(n_servers, factor, expected):
    is_released = threading.Event()

    def body(rank):
        t = table()
        if rank == 1:
            assert is_released.wait(30)
        t.push(np.full(N, rank + 1.0), hold=True)
        release = t.release(factor)
        json_requests.ask_json(
            job.session().client, ServerOption.STATS, {}
        ).wait()  # servers have seen it
        was_done = release.done()
        is_released.set()
        return release.wait().applied, was_done and rank == 0, t.pull().wait()

    for applied, was_done, values in run_workers(2, body, n_servers):
        assert applied
        assert not was_done
        assert (values == expected).all()


@pytest.mark.long
def test_a_release_that_waits_goes_along_when_its_block_moves():
    is_moved = threading.Event()

    def body(rank):
        t = table()
        if rank == 1:
            assert is_moved.wait(30)
            t.push(np.full(N, 2.0), hold=True)
            return t.pull().wait()
        t.push(np.ones(N), hold=True)
        release = t.release(2.0)
        json_requests.ask_json(job.session().client, ServerOption.STATS, {}).wait()
        for server in (0, 1):  # each block is moved once at least
            moves = [Move((t.number, part), -1, server) for part in range(t.n_partitions)]
            move_all(job.session(), moves).wait()
        is_moved.set()
        release.wait()
        return t.pull().wait()

    for values in run_workers(2, body, 2):
        assert (values == -3).all()


def test_who_has_no_gradient_counts_as_zeros():
    def body(rank):
        t = table()
        t.push(None if rank else np.full(N, 4.0))
        return t.pull().wait()

    for values in run_workers(4, body):
        assert (values == -1).all()


def test_a_round_to_which_nobody_has_a_gradient_changes_nothing():
    def body(rank):
        t = table(updater=ps.optim.SGD(1.0, momentum=0.9))
        t.push(np.ones(N))
        told = t.push(None).wait()
        unweighted = t.push(np.full(N, math.nan), weight=0).wait()
        return told, unweighted, t.pull().wait()

    for told, unweighted, values in run_workers(2, body):
        assert (told.applied, told.why) == (False, "empty") == unweighted[:2]
        assert (values == -1).all()


def test_a_batch_of_no_samples_does_not_count():
    def body(rank):
        t = table()
        t.push(np.full(N, float(rank) or math.nan), weight=3 * rank)
        return t.pull().wait()

    for values in run_workers(3, body):
        np.testing.assert_allclose(values, -(1 * 3 + 2 * 6) / 9)


def test_a_worker_that_was_late_takes_part_again_after_its_next_pull():
    def body(rank):
        t = table(ps.FirstOf(1))
        if rank == 0:
            for _ in range(5):
                assert t.push(np.ones(N)).wait().applied
        rc.barrier()
        if rank == 1:
            first = t.push(np.ones(N)).wait()
            assert (first.applied, first.why) == (False, "late")
            assert (t.pull().wait() == -5).all()
            assert t.push(np.ones(N)).wait().applied
        rc.barrier()

    run_workers(2, body)


@pytest.mark.parametrize("n_servers", [1, 3])
def test_rows_of_a_worker_that_was_late_count_again_after_its_next_pull(n_servers):
    row = np.ones((1, 2), np.float32)

    def body(rank):
        kv = ps.hashtable("emb", 2, updater=ps.optim.SGD(1.0), mode=ps.FirstOf(1))
        rc.barrier()
        if rank == 0:
            for _ in range(5):
                assert kv.push([4], row).wait().applied
        rc.barrier()
        if rank == 1:
            assert kv.push([4], row).wait().why == "late"
            kv.pull([4]).wait()
            for n in range(6, 9):
                assert kv.push([4], row).wait().applied
                assert kv.pull([4]).wait().tolist() == [[-n, -n]]
        rc.barrier()

    run_workers(2, body, n_servers)


@pytest.mark.parametrize("n_servers", [1, 2])
@pytest.mark.parametrize(
    "updater", [ps.optim.Adam(0.1), ps.optim.NAdam(0.1)], ids=["Adam", "NAdam"]
)
def test_a_state_that_is_put_back_goes_on_as_before(updater, n_servers):
    def body(rank):
        t = table(updater=updater)
        for k in range(3):
            t.push(np.arange(N) + k + float(rank))
        t.pull().wait()
        state = pull_state(t)
        t.push(np.ones(N))
        expected = t.pull().wait().copy()
        rc.barrier()
        if rank == 0:
            push_state(t, state)
        rc.barrier()
        np.testing.assert_array_equal(t.pull().wait(), state.values)
        t.push(np.ones(N))
        np.testing.assert_array_equal(t.pull().wait(), expected)
        return state

    for state in run_workers(2, body, n_servers):
        assert isinstance(state, TableState)
        assert state.steps == 3


def test_a_state_that_does_not_fit_is_refused():
    def body(rank):
        t = table(updater=ps.optim.Adam(0.1))
        state = pull_state(t)
        t._updater = ps.optim.SGD(0.1)  # as no table takes it
        with pytest.raises(ValueError, match=r"state\[w\]: 111 numbers came for \[111, 111, 111\]"):
            push_state(t, state)

    run_workers(1, body)


def test_what_is_for_rounds_alone_is_refused_elsewhere():
    def body(rank):
        t = table("async")
        with pytest.raises(ValueError, match="a table with rounds, not for one with mode 'async'"):
            t.push(None)
        with pytest.raises(ValueError, match="a table with rounds"):
            t.push(np.ones(N), hold=True)
        with pytest.raises(ValueError, match=r"release\[w\]: it is for a table with rounds"):
            t.release(1.0)
        with pytest.raises(ValueError, match="weight is 0"):
            t.push(np.ones(N), weight=0)

    run_workers(1, body)


@pytest.mark.parametrize("n_servers", [1, 3])
def test_a_snapshot_while_means_are_held_is_of_the_round_before(n_servers):
    both = threading.Barrier(2)

    def body(rank):
        t = table()
        for _ in range(2):
            t.push(np.ones(N), hold=True).wait()
            both.wait(60)
            if rank == 0:
                with ps.snapshot() as rounds:
                    seen = rounds, np.unique(t.pull().wait()).tolist()
            both.wait(60)
            t.release(1.0).wait()
        return seen if rank == 0 else t.pull().wait()[0]

    assert run_workers(2, body, n_servers) == [(1, [-1.0]), -2.0]


def test_a_release_waits_while_rounds_are_stopped():
    def body(rank):
        t = table()
        t.push(np.ones(N), hold=True).wait()
        go_on = stop_rounds()
        released = t.release(1.0)
        json_requests.ask_json(
            job.session().client, ServerOption.STATS, {}
        ).wait()  # servers have seen it
        was_done = released.done()
        go_on()
        released.wait()
        return was_done, t.pull().wait()[0]

    assert run_workers(1, body, 2) == [(False, -1.0)]
