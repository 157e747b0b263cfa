"""ps.stop(): loops end on all workers, at the same round where there are any; what follows runs."""

import threading
import time

import numpy as np
import pytest
from harness import outcomes
from ps_ranks_as_threads import deadline, run_workers

import ringcomm as rc
from ringcomm import ps
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.meet_and_leave import leave
from ringcomm.ps.end_of_job import EndOfTraining

ONES = np.ones(10, np.float32)
MODES = ["sync", "async", ps.SSP(1), ps.FirstOf(2)]


def train(rank, table, *, stops_at, pause_s=0.0):
    """Return how many steps this worker made until should_stop()."""
    steps = 0
    while not ps.should_stop():
        if rank == 1:
            time.sleep(pause_s)
        table.push(ONES)
        table.pull().wait()
        ps.complete_step()
        steps += 1
        if rank == 0 and steps == stops_at:
            ps.stop()
    return steps


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("n_servers", [1, 2])
def test_what_follows_the_loop_runs_on_all_workers(mode, n_servers):
    def body(rank):
        table = ps.table("w", 10, updater=ps.optim.Add(), mode=mode)
        n = train(rank, table, stops_at=5, pause_s=0.002)
        assert ps.should_stop()
        rc.barrier()
        steps = rc.allgather_object(n)
        return steps, table.pull().wait().tolist()

    results = run_workers(3, body, n_servers)
    steps = results[0][0]
    assert all(result == results[0] for result in results)
    assert steps[0] >= 5
    if mode == "sync":
        assert len({*steps}) == 1
        assert steps[0] <= 7
        assert results[0][1] == [float(steps[0])] * 10


def test_rounds_go_on_after_the_loop_on_all_workers():
    def body(rank):
        table = ps.table("w", 10, updater=ps.optim.Add(), mode="sync")
        n = train(rank, table, stops_at=2)
        table.push(ONES).wait()  # one more round, of all
        return n, table.pull().wait()[0]

    results = run_workers(3, body)
    assert all(value == n + 1 for n, value in results)


def test_the_chief_alone_may_stop_and_may_do_so_twice():
    def body(rank):
        assert not ps.should_stop()
        if rank == 1:
            with pytest.raises(rc.RingcommError, match="the chief decides"):
                ps.stop()
        rc.barrier()
        if rank == 0:
            ps.stop()
            ps.stop()
        while not ps.should_stop():
            time.sleep(0.001)  # it is asked again and again, as a loop of steps does
        return ps.should_stop()

    assert run_workers(3, body) == [True] * 3


def test_a_worker_that_leaves_before_it_answers_holds_up_nobody():
    def body(rank):
        ps.table("w", 10, mode="sync")
        rc.barrier()
        if rank == 2:
            return True
        if rank == 0:
            time.sleep(0.1)  # the others ask already
            ps.stop()
        while not ps.should_stop():
            time.sleep(0.001)  # as above
        return True

    assert run_workers(3, body) == [True] * 3


def test_a_worker_that_does_not_answer_is_named():
    computes, is_over = threading.Event(), threading.Event()

    def body(rank):
        ps.table("w", 10, mode="sync")
        rc.barrier()
        if rank == 1:
            computes.set()
            return is_over.wait(60)
        try:
            assert computes.wait(60)
            ps.stop()
            with deadline(1.2), pytest.raises(rc.CommTimeoutError) as raised:
                ps.should_stop()
            text = str(raised.value)
            assert "ps.stop() waits for worker 1. Worker 1 (rank 1 of the job) does not" in text
            assert "Each worker calls should_stop() after each step." in text
        finally:
            is_over.set()
        return True

    assert run_workers(2, body) == [True] * 2


def test_evaluators_hear_of_it():
    def main(rank):
        try:
            ps.init(role=["worker", "evaluator", "server"][rank])
            ps.table("w", 10, mode="sync")
            if rank == 0:
                ps.stop()
            while not ps.should_stop():
                time.sleep(0.001)  # as above
            return "stopped"
        finally:
            leave(engine(), "done")

    ended = outcomes(3, main)
    assert ended[:2] == ["stopped"] * 2
    assert isinstance(ended[2], SystemExit)


def test_who_has_called_stop_waits_for_the_decision_and_says_it_once():
    training = EndOfTraining()
    assert training.is_over() is False
    assert not training.is_begun()
    assert training.is_begun()
    assert training.is_over() is None
    assert not training.is_decided
    assert training.ask() == 1
    training.end_at(4)
    assert [training.is_over() for _ in range(4)] == [False, False, True, True]


def test_calls_go_on_if_nobody_decides_any_more():
    training = EndOfTraining()
    training.ask()
    training.give_up()
    assert training.is_over() is False
    training.end_at(0)
    training.give_up()
    assert training.is_over()
    training.restart()
    assert training.is_over() is False
