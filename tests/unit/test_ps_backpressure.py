"""However slow the servers are, or another worker is: what a rank has under way stays bounded."""

import threading
import tracemalloc

import numpy as np
import pytest
from ps_jobs import run_workers

from ringcomm import codec, ps
from ringcomm.engine.world import engine
from ringcomm.ps import client
from ringcomm.ps.dense import DensePartition
from ringcomm.ps.hashed import Shard
from ringcomm.ps.job import session

NBYTES, CREDIT, N_PUSHES = 100_000, 400_000, 60


class Slow:
    """Lets servers carry out a push only when no worker could have sent any more.

    Attributes:
        most: bytes of bodies that were under way.
        n_waits: how often a worker had to wait for credit.
    """

    def __init__(self, monkeypatch, kind, n_workers):
        self.changed = threading.Condition()
        self.n_at_rest, self.n_workers = 0, n_workers
        self.most = self.n_waits = 0
        wait_until, push = client.Client._wait_until, kind.push
        slow = self

        def waiting(self, *args):
            slow.note(self, 1)
            try:
                wait_until(self, *args)
            finally:
                slow.note(self, -1)

        def late_push(self, *args):
            with slow.changed:
                assert slow.changed.wait_for(lambda: slow.n_at_rest == slow.n_workers, 20)
            push(self, *args)

        monkeypatch.setattr(client.Client, "_wait_until", waiting)
        monkeypatch.setattr(kind, "push", late_push)

    def note(self, its_client, change):
        with self.changed:
            self.n_at_rest += change
            self.n_waits += change > 0
            self.most = max(self.most, sum(its_client.n_bytes.values()))
            self.changed.notify_all()


def peak_of(body, n_workers=1):
    """Return the most memory that was in use at once, of all ranks, shared and their own."""
    shared = [0] * n_workers

    def main(rank):
        body(rank)
        shared[rank] = engine().shared_usage()[2]

    tracemalloc.start()
    try:
        run_workers(n_workers, main)
        return tracemalloc.get_traced_memory()[1] + sum(shared)
    finally:
        tracemalloc.stop()


def dense(**options):
    t = ps.table("w", NBYTES // 4, updater=ps.optim.Add(), **options)
    x = np.ones(NBYTES // 4, np.float32)
    return lambda: t.push(x)


def hashed(**options):
    kv = ps.hashtable("e", 23, updater=ps.optim.Add(), **options)
    keys, x = np.arange(1000), np.ones((1000, 23), np.float32)
    return lambda: kv.push(keys, x)


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize(
    ("make", "kind"), [(dense, DensePartition), (hashed, Shard)], ids=["dense", "hash"]
)
@pytest.mark.parametrize("has_credit", [True, False], ids=["bounded", "without credit"])
def test_memory_stays_bounded_when_the_server_is_slow(make, kind, has_credit, monkeypatch):
    monkeypatch.setattr(client, "CREDIT_NBYTES", CREDIT if has_credit else 1 << 40)
    slow = []

    def body(_):
        push = make()
        slow.append(Slow(monkeypatch, kind, 1))
        futures = [push() for _ in range(N_PUSHES)]
        assert all(each.wait().applied for each in futures)

    peak, total = peak_of(body), N_PUSHES * NBYTES
    if has_credit:
        assert slow[0].most <= CREDIT
        assert slow[0].n_waits > N_PUSHES / 8
        assert peak < 3 * CREDIT + 1_500_000 < total / 2
    else:  # what the test would see of an unbounded one
        assert slow[0].most == pytest.approx(total, rel=0.1)
        assert peak > total


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("compression", [None, codec.TopK(0.01)], ids=str)
@pytest.mark.parametrize("has_credit", [True, False], ids=["bounded", "without credit"])
def test_memory_stays_bounded_when_another_worker_is_slow(compression, has_credit, monkeypatch):
    """Rounds wait at the server; compressed pushes do so as they are."""
    credit = CREDIT if compression is None else CREDIT // 50
    monkeypatch.setattr(client, "CREDIT_NBYTES", credit if has_credit else 1 << 40)
    may_go, n_waits = threading.Semaphore(0), []

    def body(rank):
        push = dense(mode="sync", compression=compression)
        if rank == 0:
            wait_until = client.Client._wait_until

            def waiting(self, *args):
                if self is session().client:
                    n_waits.append(sum(self.n_bytes.values()))
                    may_go.release()
                wait_until(self, *args)

            monkeypatch.setattr(client.Client, "_wait_until", waiting)
            for _ in range(N_PUSHES):
                future = push()
            for _ in range(N_PUSHES):
                may_go.release()
        else:
            for _ in range(N_PUSHES):
                assert may_go.acquire(timeout=20)
                future = push()
        assert future.wait().applied

    peak, total = peak_of(body, 2), N_PUSHES * NBYTES
    if has_credit:
        assert max(n_waits) <= credit
        assert len(n_waits) > N_PUSHES / 2
        assert peak < 3 * CREDIT + 1_500_000 < total / 2
    elif compression is None:
        assert peak > total / 2
    else:
        assert peak < total / 2
