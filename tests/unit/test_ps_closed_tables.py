"""Tables are closed: their memory is free, and their names may be opened anew."""

import numpy as np
import pytest
from ps_ranks_as_threads import deadline, require_names, run_workers

import ringcomm as rc
from ringcomm import ps
from ringcomm.ps.job import session
from ringcomm.ps.placement.partitions import Move
from ringcomm.ps.placement.rebalance import move_all


@pytest.mark.parametrize("mode", ["async", "sync", ps.SSP(1), ps.FirstOf(1)])
def test_a_name_is_opened_anew_with_another_shape(mode):
    def body(rank):
        for n in (10, 3000, 7):
            t = ps.table("w", n, mode=mode, updater=ps.optim.Add(), block_nbytes=1000)
            kv = ps.hashtable("rows", n, mode=mode, updater=ps.optim.Add())
            rc.barrier()
            t.push(np.ones(n, np.float32))
            kv.push([1], np.ones((1, n), np.float32)).wait()
            t.pull().wait()
            t.close()
            kv.close()
            t.close()  # again
        rc.barrier()
        require_names()
        t = ps.table("w", 4, mode=mode)
        assert (t.pull().wait() == 0).all()

    run_workers(2, body, 2)


def test_a_closed_table_is_an_error_by_name():
    def body(rank):
        t, kv = ps.table("w", 3), ps.hashtable("rows", 2)
        t.close()
        kv.close()
        one = np.ones(3, np.float32)
        for use in (
            t.pull, lambda: t.push(one), lambda: t.call("f"), lambda: t.push(one, assign=True)
        ):  # fmt: skip
            with pytest.raises(rc.RingcommError, match=r"table\[w\]: it was closed"):
                use()
        for use in (
            lambda: kv.pull([1]), lambda: kv.push([1], np.ones((1, 2), np.float32)),
            lambda: len(kv), lambda: kv.erase([1]), lambda: kv.metadata([1]),
        ):  # fmt: skip
            with pytest.raises(rc.RingcommError, match=r"table\[rows\]: it was closed"):
                use()

    run_workers(1, body)


@pytest.mark.long
def test_it_waits_for_all_who_have_opened_it_and_names_them():
    def body(rank):
        t = ps.table("w", 3)
        rc.barrier()
        if rank == 0:
            waits = r"Closing of w waits for worker 1.*Call close\(\)"
            with deadline(1.5), pytest.raises(rc.CommTimeoutError, match=waits):
                t.close()
        require_names("w")
        if rank == 1:
            t.pull().wait()  # it goes on
        t.close()
        require_names()

    run_workers(2, body)


def test_own_requests_come_first():
    def body(rank):
        t = ps.table("w", 3, mode="sync", updater=ps.optim.Add())
        rc.barrier()
        if rank == 0:
            future = t.push(np.ones(3, np.float32))
            with deadline(0.5), pytest.raises(rc.CommTimeoutError, match=r"close\[w\]"):
                t.close()  # the round waits for worker 1
            rc.barrier()
            assert future.wait().applied
        else:
            rc.barrier()
            t.push(np.ones(3, np.float32))
        t.close()

    run_workers(2, body)


def test_who_has_left_is_not_waited_for():
    def body(rank):
        t = ps.table("w", 3)
        rc.barrier()
        if rank == 0:
            t.close()

    run_workers(3, body)


def test_a_snapshot_keeps_it_and_a_save_without_it_is_whole(tmp_path):
    def body(rank):
        t, other = ps.table("w", 3, init=2.0), ps.table("other", 2, init=1.0)
        with ps.snapshot():
            t.pull().wait()
            with pytest.raises(rc.CommTimeoutError):
                t.close(timeout_s=0.3)
            require_names("w", "other")
        t.close()
        ps.save(tmp_path, background=False)
        assert ps.restore(tmp_path) is not None
        assert other.pull().wait().tolist() == [1, 1]

    run_workers(1, body, 2)
    assert list(ps.load_state_dict(tmp_path)) == ["other"]


def test_partitions_that_have_moved_are_closed_too():
    def body(rank):
        t = ps.table("w", 1000, block_nbytes=1000, init=1.0)
        kv = ps.hashtable("rows", 2)
        kv.push(range(50), np.ones((50, 2), np.float32)).wait()
        moves = [Move((t.number, 0), 0, 1), Move((t.number, 0), 1, 0)]
        moves += [Move((kv.number, part), 0, 1) for part in range(20)]
        if rank == 0:
            move_all(session(), moves).wait()
        rc.barrier()
        t.close()
        kv.close()
        require_names()
        u = ps.table("w", 5)
        u.push(np.ones(5, np.float32)).wait()

    run_workers(2, body, 2)
