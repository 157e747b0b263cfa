"""Mistakes that people make with parameter servers are told in words that help."""

import os
import signal

import numpy as np
import pytest
from ps_ranks_as_threads import run_workers

import ringcomm as rc
from ringcomm import ps

MASKED = np.ma.array(np.ones(4, np.float32), mask=[0, 1, 0, 0])


def test_masked_arrays_are_named_with_the_way():
    def body(rank):
        w, rows = ps.table("w", 4), ps.hashtable("rows", 4)
        for call, who in (
            (lambda: w.push(MASKED), r"push\[w\]: x is a masked array.*filled"),
            (lambda: rows.push([1], MASKED[None]), r"push\[rows\]: rows is a masked array"),
            (lambda: ps.table("v", 4, init=MASKED), r"table\[v\]: init is a masked array"),
        ):
            with pytest.raises(TypeError, match=who):
                call()

    run_workers(1, body)


@pytest.mark.parametrize("init", [None, "zeros", True, ps.initializers.normal(seed=1)])
def test_an_init_that_is_no_number_and_no_array_is_named(init):
    def body(rank):
        with pytest.raises(TypeError, match=r"table\[w\]: init is .*a number, or an array"):
            ps.table("w", 4, init=init)

    run_workers(1, body)


def test_workers_with_another_init_are_told_so():
    def body(rank):
        init = np.zeros(4) if rank == 0 else 0.0
        if rank == 0:
            ps.table("w", 4, init=init)
        rc.barrier()
        if rank == 1:
            with pytest.raises(rc.MismatchError, match=r"init=an array, and rank 1 .*init=0\.0"):
                ps.table("w", 4, init=init)

    run_workers(2, body)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (ps.optim.SGD(0.01), r"updater=SGD\(lr=0\.1\), and rank 1 .*updater=SGD\(lr=0\.01\)\. "),
        (ps.optim.Adam(0.1), r"updater=SGD\(\), and rank 1 .*updater=Adam\(\)\. "),
    ],
)
def test_of_two_updaters_what_differs_is_told(other, told):
    def body(rank):
        if rank == 0:
            ps.table("w", 4, updater=ps.optim.SGD(0.1))
        rc.barrier()
        if rank == 1:
            with pytest.raises(rc.MismatchError, match=told):
                ps.table("w", 4, updater=other)

    run_workers(2, body)


def test_join_is_refused_where_servers_or_rounds_would_be_waited_for():
    def body(rank):
        with pytest.raises(
            rc.RingcommError, match=r"join\(\): it waits for all .*set_samples\(0\)"
        ):
            rc.join()

    run_workers(2, body)


def test_join_beside_colocated_servers_is_refused_where_rounds_need_all():
    def body(rank):
        ps.table("free", 3)
        rc.join()
        ps.table("w", 3, mode="sync")
        with pytest.raises(rc.RingcommError, match=r"join\(\): .*rc.barrier\(\)"):
            rc.join()

    run_workers(2, body, colocated=True)


def test_a_second_init_on_a_worker_asks_for_the_same_job():
    def body(rank):
        ps.init()
        ps.init(servers=1, evaluators=0, replication=1)
        for name, value in (("servers", 2), ("evaluators", 1), ("replication", 2)):
            with pytest.raises(rc.ConfigError, match=f"{name}={value}, but .* with {name}="):
                ps.init(**{name: value})
        with pytest.raises(rc.ConfigError, match=r"colocated=True, but .* colocated=False"):
            ps.init(colocated=True)

    run_workers(1, body)


def test_a_server_that_has_ended_does_not_begin_again():
    said = []

    def body(rank):
        rc.barrier()

    def init_again(*args, **options):
        try:
            real(*args, **options)
        except SystemExit:
            with pytest.raises(rc.ConfigError, match=r"was a server or an evaluator.*let it pass"):
                real(*args, **options)
            said.append(True)
            raise

    real = ps.init
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ps, "init", init_again)
        run_workers(2, body)
    assert said == [True]


def test_a_child_of_a_worker_cannot_call_servers_and_disturbs_no_call_of_its_parent():
    def calls(w, rows, future):
        grad, row = np.ones(4, np.float32), np.ones((1, 2), np.float32)
        yield from (w.pull, lambda: w.push(grad), lambda: w.push_pull(grad))
        yield from (lambda: rows.pull([1]), lambda: rows.push([1], row), lambda: len(rows))
        yield from (ps.complete_step, ps.stats, lambda: ps.table("v", 4))
        if not future.done():  # else it has its result, also there
            yield future.wait

    def body(rank):
        w = ps.table("w", 4, updater=ps.optim.Add())
        rows = ps.hashtable("rows", 2, updater=ps.optim.Add())
        grad, row = np.ones(4, np.float32), np.ones((1, 2), np.float32)
        w.pull().wait()  # from now on it is read in place
        future = rows.push([1], row)
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(30)  # for a call that hangs
            n_allowed = 0
            for call in calls(w, rows, future):
                try:
                    call()
                    n_allowed += 1
                except rc.NotInitializedError:
                    pass
            os._exit(n_allowed)
        for _ in range(20):
            w.push(grad).wait()
            rows.push([1], row).wait()
        n_allowed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return n_allowed, w.pull().wait().tolist(), rows.pull([1]).wait().tolist()

    assert run_workers(1, body) == [(0, [20.0] * 4, [[21.0] * 2])]


@pytest.mark.parametrize("weight", ["3", None])
def test_a_weight_that_is_no_number_is_named(weight):
    def body(rank):
        w, rows = ps.table("w", 4), ps.hashtable("rows", 4)
        one = np.ones((1, 4), np.float32)
        for table, args in ((w, (one[0],)), (rows, ([1], one))):
            with pytest.raises(TypeError, match=r"push\[\w+\]: weight is .*; it must be a number"):
                table.push(*args, weight=weight)

    run_workers(1, body)


@pytest.mark.parametrize("step", [1.5, "3"])
def test_a_step_that_is_no_integer_is_named(step, tmp_path):
    def body(rank):
        with pytest.raises(TypeError, match=r"ps.save: step is .*; it must be an integer"):
            ps.save(tmp_path, step=step)

    run_workers(1, body)
