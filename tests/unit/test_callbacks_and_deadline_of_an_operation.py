"""An operation calls back once it is over, however it ends, and may have a deadline of its own."""

import contextlib
import threading

import numpy as np
from harness import outcomes, run_ranks

import ringcomm as rc
from ringcomm.config import Settings
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.operations.into_array import plan_allgather_into

HANG_S = 10


def test_a_callback_is_called_once_when_the_operation_is_over(wire):
    def body(rank):
        called = [threading.Event(), threading.Event()]
        x = np.ones(1000)
        if rank == 1:
            rc.recv(np.empty(1))  # rank 0 has registered its callback by then
        handle = rc.allreduce_async_(x)
        handle.when_done(called[0].set)
        if rank == 0:
            assert not called[0].is_set()
            rc.send(np.ones(1), 1)
        assert called[0].wait(HANG_S)
        assert handle.done()
        assert (x == 2).all()
        handle.when_done(called[1].set)
        assert called[1].is_set()

    run_ranks(2, body)


def test_a_callback_is_called_when_a_peer_fails():
    seen = threading.Event()

    def body(rank):
        if rank == 1:
            raise ValueError("boom")
        handle = rc.barrier_async()
        handle.when_done(seen.set)
        assert seen.wait(HANG_S)
        handle.wait()

    results = outcomes(2, body)
    assert isinstance(results[0], rc.PeerFailedError)


def test_a_callback_that_raises_is_named_in_the_errors_of_all_ranks(wire):
    def body(rank):
        if rank == 1:
            rc.recv(np.empty(1))  # rank 0 has registered its callback by then
        handle = rc.allreduce_async(np.ones(1000), name="loss")
        if rank == 0:
            handle.when_done({}.popitem)
            rc.send(np.ones(1), 1)
        with contextlib.suppress(KeyError):  # who waits meanwhile may have called the callback
            handle.wait()
        rc.barrier()

    for error in outcomes(2, body):
        assert isinstance(error, rc.RingcommError)
        assert "KeyError: 'popitem(): dictionary is empty'" in str(error)
        assert "in a callback of allreduce[loss], which must not raise" in str(error)


def test_an_operation_may_have_a_deadline_of_its_own():
    def plan(group):
        return plan_allgather_into(group, None, np.zeros(2), np.zeros(1))

    def body(rank):
        if rank == 0:
            return engine().start("test", None, plan, timeout_s=0.3).wait()
        rc.recv(np.empty(1), 0)  # waits as long as rank 0 lives

    first, _ = outcomes(2, body, settings=Settings(timeout_s=120))
    assert isinstance(first, rc.CommTimeoutError)
    assert " timeout of 0.3 s is over" in str(first)
    assert first.missing == (1,)
