"""Admit(probability=): a restored job, and a copy of a server, draw as if nothing had been."""

import time

import numpy as np
import pytest
from harness import DEADLINE_S
from ps_ranks_as_threads import ended, kill_server, run_all, run_workers

import ringcomm as rc
from ringcomm import ps
from ringcomm.config import Settings
from ringcomm.ps.session import session

ELASTIC = Settings(timeout_s=DEADLINE_S, elastic=1)
KEYS = np.arange(300, dtype=np.uint64)
ONES = np.ones((300, 1), np.float32)


def opened(mode="sync"):
    admit = ps.Admit(probability=0.05)
    return ps.hashtable("emb", 1, updater=ps.optim.Add(), mode=mode, admit=admit)


def learn(kv, n_rounds):
    """Return for each key how many rounds have been since it was admitted."""
    for _ in range(n_rounds):
        kv.push(KEYS, ONES).wait()
    rc.barrier()
    return kv.pull(KEYS).wait()[:, 0].tolist()


def push_on(kv):
    while True:
        kv.push(KEYS, ONES).wait()


def save(path):
    if ps.is_chief():
        ps.save(path).wait()
    rc.barrier()


def restore(path):
    if ps.is_chief():
        ps.restore(path)
    rc.barrier()


def uninterrupted(n_rounds):
    return run_workers(1, lambda _: learn(opened(), n_rounds), 1)[0]


def test_a_job_that_goes_on_from_one_that_was_restored(tmp_path):
    def first(rank):
        learn(opened(), 4)
        save(tmp_path)

    def again(rank):
        kv = opened()
        learn(kv, 7)  # is gone afterwards
        restore(tmp_path)
        learn(kv, 3)
        save(tmp_path)
        learn(kv, 2)
        restore(tmp_path)  # in the job that has saved it
        return learn(kv, 3)

    def last(rank):
        kv = opened()
        restore(tmp_path)
        return learn(kv, 6)

    run_workers(2, first, 2)
    assert run_workers(2, again, 3) == [uninterrupted(10)] * 2
    assert run_workers(1, last, 1) == [uninterrupted(13)]


def test_servers_that_recover(tmp_path):
    def body(rank):
        kv = opened()
        learn(kv, 4)
        save(tmp_path)
        learn(kv, 1)
        rc.barrier()  # behind the last pull
        if rank == 0:
            kill_server(1)
        with pytest.raises(rc.ServerLostError):  # not learn(): it meets the other worker
            push_on(kv)
        ps.recover(tmp_path)
        return learn(kv, 5)

    results = run_all(2, body, 3, settings=ELASTIC)
    assert ended(results, 1)[:2] == [uninterrupted(9)] * 2


def test_servers_that_were_added_or_have_made_copies_since(tmp_path):
    def first(rank):
        learn(opened(), 4)
        save(tmp_path)

    def again(rank):
        kv = opened()
        restore(tmp_path)
        learn(kv, 2)
        if rank == 0:
            ps.add_servers().wait()
            ps.rebalance().wait()
        rc.barrier()
        learn(kv, 2)
        if rank == 0:
            kill_server(0)
        learn(kv, 2)
        return learn(kv, 2)

    run_workers(2, first, 2)
    results = run_all(2, again, 2, settings=ELASTIC, replication=2, spares=1)
    assert ended(results, 1)[:2] == [uninterrupted(12)] * 2


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_changes_outside_rounds_do_not_draw_again_what_was_drawn_before(mode, tmp_path):
    def change(kv, n):
        for _ in range(n):
            kv.push(KEYS, ONES, assign=mode == "sync").wait()

    def some(rank):
        kv = opened(mode)
        if rank == 0 and any(tmp_path.iterdir()):
            restore(tmp_path)
        change(kv, 5)
        save(tmp_path)
        return len(kv)

    def all_at_once(rank):
        kv = opened(mode)
        change(kv, 20)
        return len(kv)

    found = [run_workers(1, some, n)[0] for n in (2, 1, 3, 1)]
    assert found[0] < found[1] < found[2] < found[3]
    assert found[3:] == run_workers(1, all_at_once, 1)


@pytest.mark.parametrize("victim", [1, 2])
def test_a_copy_of_a_server_admits_the_same_keys_outside_rounds(victim):
    def body(rank):
        kv = opened("async")
        for died in (0, victim):
            learn(kv, 5)
            before = kv.pull(KEYS).wait()
            kill_server(died)
            current = session()
            while current.layout.servers[died] not in current.engine.watch.peers.dead:
                ps.stats()
            assert (kv.pull(KEYS).wait() == before).all()
            end = time.monotonic() + DEADLINE_S
            while died == 0 and any(each["copies"] < 2 for each in ps.stats()):
                assert time.monotonic() < end

    assert ended(run_all(1, body, 3, settings=ELASTIC, replication=2), 2)[0] is None
