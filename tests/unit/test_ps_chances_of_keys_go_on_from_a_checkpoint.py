"""Admit(probability=) with rounds: a restored job draws as one that was not interrupted."""

import numpy as np
import pytest
from harness import DEADLINE_S
from ps_ranks_as_threads import ended, kill_server, run_all, run_workers

import ringcomm as rc
from ringcomm import ps
from ringcomm.config import Settings

ELASTIC = Settings(timeout_s=DEADLINE_S, elastic=1)
KEYS = np.arange(300, dtype=np.uint64)
ONES = np.ones((300, 1), np.float32)


def opened():
    admit = ps.Admit(probability=0.05)
    return ps.hashtable("emb", 1, updater=ps.optim.Add(), mode="sync", admit=admit)


def learn(kv, n_rounds):
    """Return for each key how many rounds have been since it was admitted."""
    for _ in range(n_rounds):
        kv.push(KEYS, ONES).wait()
    rc.barrier()
    return kv.pull(KEYS).wait()[:, 0].tolist()


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
            while True:
                kv.push(KEYS, ONES).wait()
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
