"""Thousands of operations may be pending: each costs what one of a few does."""

import threading

import numpy as np
import pytest
from harness import outcomes, run_ranks

import ringcomm as rc
from ringcomm.config import Settings
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.ledger import Ticket
from ringcomm.engine.operations.barrier import plan_barrier
from ringcomm.engine.progress.pending_limit import UNDER_WAY_MAX, Admission
from ringcomm.engine.progress.task import Task
from ringcomm.errors import PeerFailedError

N_RANKS = 3


def looks_at(n_pending, monkeypatch):
    """Return how often each of so many pending operations is looked at, on average."""
    looks = []  # of all ranks
    advance = Task.advance

    def counting(task):
        looks.append(None)
        return advance(task)

    def body(rank):
        named = [rc.allreduce_async(np.full(3, rank), name=f"{n}") for n in range(9)]
        handles = [rc.allreduce_async(np.full(61, rank + n)) for n in range(n_pending)]
        for n, handle in enumerate(handles):
            assert np.array_equal(handle.wait(), np.full(61, 3 + N_RANKS * n))
        for handle in reversed(named):
            assert np.array_equal(handle.wait(), np.full(3, 3))

    with monkeypatch.context() as patch:
        patch.setattr(Task, "advance", counting)
        run_ranks(N_RANKS, body)
    return len(looks) / n_pending / N_RANKS


@pytest.mark.long
def test_an_operation_costs_the_same_however_many_are_pending(wire, monkeypatch):
    """Each was looked at whenever one went on: 48 to 77 times; now 6 to 18, on a busy machine, too.

    How often of a few is no measure: that varies from 4 to 15.
    """
    assert looks_at(1000, monkeypatch) < UNDER_WAY_MAX / 2


def errors_of(handles):
    """Wait for all; return the classes of the errors that some of them ended with."""
    found = set()
    for handle in handles:
        try:
            handle.wait(0)
        except rc.RingcommError as error:
            found.add(type(error))
    return found


def test_those_that_wait_for_others_fail_with_them(wire):
    all_have_begun = threading.Barrier(N_RANKS)

    def body(rank):
        handles = [rc.allreduce_async(np.ones(3)) for _ in range(3 * UNDER_WAY_MAX)]
        if rank == 1:
            for handle in handles:
                handle.wait()
            all_have_begun.wait(60)
            raise ZeroDivisionError
        # One more than rank 1 has begun: it cannot complete.
        handles += [rc.allreduce_async(np.ones(3)) for _ in range(3 * UNDER_WAY_MAX)]
        all_have_begun.wait(60)
        with pytest.raises(PeerFailedError, match="ZeroDivisionError"):
            handles[-1].wait()
        return all(handle.done() for handle in handles), errors_of(handles)

    results = outcomes(N_RANKS, body)
    assert [results[0], results[2]] == 2 * [(True, {PeerFailedError})]


def test_an_operation_with_a_deadline_of_its_own_is_not_kept_behind_others(wire):
    """It gives up although those before it, which wait for the same rank, have no deadline."""

    def body(rank):
        if rank == 1:
            return rc.recv(np.empty(1), 0)  # which is never sent
        handles = [rc.barrier_async() for _ in range(2 * UNDER_WAY_MAX)]
        last = engine().start(
            "barrier", None, lambda group: plan_barrier(group, None), timeout_s=0.2
        )
        with pytest.raises(rc.CommTimeoutError, match=r"timeout of 0\.2 s is over"):
            last.wait()
        return all(handle.done() for handle in handles), errors_of(handles)

    results = outcomes(2, body, settings=Settings(timeout_s=600))
    assert results[0] == (True, {rc.CommTimeoutError})
    assert isinstance(results[1], rc.CommTimeoutError | PeerFailedError)


def test_an_earlier_one_of_another_thread_is_under_way_at_once():
    """Other ranks may wait for it, and all that are under way here for what comes after it."""
    tasks = {n: Task(f"{n}", Ticket(None, 7, n), (0, 1)) for n in range(1, 2 * UNDER_WAY_MAX)}
    lines = Admission()
    later = [n for n in tasks if n > 2]
    begun = [n for n in later if lines.may_begin(tasks[n])]
    assert begun == later[:UNDER_WAY_MAX]
    assert lines.may_begin(tasks[2])
    assert lines.leave(tasks[2]) is None  # as many as may be are under way without it
    assert [lines.leave(tasks[n]).number for n in begun[:3]] == later[UNDER_WAY_MAX:][:3]
    assert lines.may_begin(tasks[1])
    assert [task.number for task in lines.admit_all()] == later[UNDER_WAY_MAX + 3 :]
