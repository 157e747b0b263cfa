"""ps.stop(): loops end on all workers, at the same round where there are any; what follows runs."""

import itertools
import random
import threading
import time

import numpy as np
import pytest
from harness import outcomes
from hypothesis import given, settings
from hypothesis import strategies as st
from ps_ranks_as_threads import deadline, run_workers

import ringcomm as rc
from ringcomm import ps
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.meet_and_leave import leave
from ringcomm.ps.end_of_job import EndOfTraining
from ringcomm.ps.protocol.frames import Stop

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
            with deadline(0.3), pytest.raises(rc.CommTimeoutError, match=r"rank 1.* did not ans"):
                ps.should_stop()
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


class Job:
    """Workers that call should_stop() in rounds, and frames that arrive in any order."""

    def __init__(self, n, rng):
        self.frames, self.rng = {}, rng
        self.ends = [EndOfTraining(me, self.sender(me)) for me in range(n)]
        self.calls = [0] * n
        self.is_over = [False] * n

    def sender(self, me):
        def send(to, option, clock):
            self.frames.setdefault((me, to), []).append((option, clock))

        return send

    def deliver(self):
        pairs = [pair for pair, frames in self.frames.items() if frames]
        if not pairs:
            return False
        source, to = self.rng.choice(pairs)
        self.ends[to].on_frame(source, *self.frames[source, to].pop(0))
        return True

    def call(self, worker):
        """A step of a worker, unless it is more than a round ahead of another, or waits."""
        if self.is_over[worker] or self.calls[worker] > min(self.calls):
            return
        over = self.ends[worker].is_over()
        if over is None:
            return
        self.is_over[worker] = over
        self.calls[worker] += not over


@given(n=st.integers(1, 5), stops_at=st.integers(0, 4), seed=st.integers(0, 10**6))
@settings(max_examples=200, deadline=None)
def test_all_workers_end_at_the_same_step_in_any_order_of_frames(n, stops_at, seed):
    rng = random.Random(seed)
    job, has_stopped = Job(n, rng), False
    for _ in itertools.count():
        if not has_stopped and job.calls[0] >= stops_at:
            job.ends[0].begin(range(n), [], by_count=True)
            has_stopped = True
        if not (rng.random() < 0.3 and job.deliver()):
            job.call(rng.randrange(n))
        if all(job.is_over):
            break
    assert len({*job.calls}) == 1
    assert job.calls[0] <= stops_at + 2
    assert all(end.is_over() for end in job.ends)


def test_frames_are_few():
    sent = []
    end = EndOfTraining(0, lambda *frame: sent.append(frame))
    assert end.is_over() is False
    end.begin([0, 1, 2], [9], by_count=True)
    end.begin([0, 1, 2], [9], by_count=True)
    assert end.is_over() is None
    assert not end.is_decided
    assert end.undecided([]) == [1, 2]
    end.on_frame(1, Stop.COUNT, 4)
    end.decide([2])  # it has left
    assert [end.is_over() for _ in range(5)] == [False] * 3 + [True] * 2
    assert sorted(sent) == [(1, Stop.ASK, 0), (1, Stop.AT, 5), (2, Stop.ASK, 0), (9, Stop.NOW, 0)]
