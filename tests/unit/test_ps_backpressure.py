"""However slow the servers are, or another worker is: what a rank has under way stays bounded."""

import math
import threading
import tracemalloc

import numpy as np
import pytest
from ps_ranks_as_threads import run_workers

import ringcomm as rc
from ringcomm import codec, ps
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.ps import end_of_job
from ringcomm.ps.client import client as client_module
from ringcomm.ps.client import request_order
from ringcomm.ps.client.request import Request
from ringcomm.ps.client.request_order import Credit, Turns
from ringcomm.ps.job import session
from ringcomm.ps.placement.partitions import Move
from ringcomm.ps.placement.rebalance import move_all
from ringcomm.ps.protocol.frames import FrameKind
from ringcomm.ps.server.dense.partition import DensePartition
from ringcomm.ps.server.rows.hash_shard import Shard
from ringcomm.ps.server.server import Server

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
        wait_until, decoded = client_module.Client.wait_until, kind.decoded
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
            return decoded(self, *args)

        monkeypatch.setattr(client_module.Client, "wait_until", waiting)
        monkeypatch.setattr(kind, "decoded", late_push)

    def note(self, its_client, change):
        with self.changed:
            self.n_at_rest += change
            self.n_waits += change > 0
            self.most = max(self.most, sum(its_client.credit.n_bytes.values()))
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
    monkeypatch.setattr(request_order, "CREDIT_NBYTES", CREDIT if has_credit else 1 << 40)
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
    limit = CREDIT if compression is None else CREDIT // 50
    monkeypatch.setattr(request_order, "CREDIT_NBYTES", limit if has_credit else 1 << 40)
    may_go, n_waits = threading.Semaphore(0), []

    def body(rank):
        push = dense(mode="sync", compression=compression)
        if rank == 0:
            wait_until = client_module.Client.wait_until

            def waiting(self, *args):
                if self is session().client:
                    n_waits.append(sum(self.credit.n_bytes.values()))
                    may_go.release()
                wait_until(self, *args)

            monkeypatch.setattr(client_module.Client, "wait_until", waiting)
            for _ in range(N_PUSHES):
                future = push()
            for _ in range(N_PUSHES):
                may_go.release()
        else:
            for _ in range(N_PUSHES):
                assert may_go.acquire(timeout=120)
                future = push()
        assert future.wait().applied

    peak, total = peak_of(body, 2), N_PUSHES * NBYTES
    if has_credit:
        assert max(n_waits) <= limit
        assert len(n_waits) > N_PUSHES / 2
        assert peak < 3 * CREDIT + 1_500_000 < total / 2
    elif compression is None:
        assert peak > total / 2
    else:
        assert peak < total / 2


# --- tables in any order ------------------------------------------------------------------------
def dense_tables(names, n_blocks, block_nbytes):
    n = n_blocks * block_nbytes // 4
    tables = [
        ps.table(name, n, updater=ps.optim.SGD(1.0), mode="sync", block_nbytes=block_nbytes)
        for name in names
    ]
    x = -np.ones(n, np.float32)
    return [(lambda t=t: t.push(x), lambda t=t: t.pull().wait()) for t in tables]


def hash_tables(names, n_blocks, block_nbytes):
    n = n_blocks * block_nbytes // 40
    tables = [ps.hashtable(name, 8, updater=ps.optim.SGD(1.0), mode="sync") for name in names]
    keys, x = np.arange(n), -np.ones((n, 8), np.float32)
    return [(lambda t=t: t.push(keys, x), lambda t=t: t.pull(keys).wait()) for t in tables]


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("make", [dense_tables, hash_tables], ids=["dense", "hash"])
@pytest.mark.parametrize("n_servers", [1, 2])
def test_workers_may_push_large_tables_in_different_orders(make, n_servers, monkeypatch):
    """Each has more than its credit under way, which waits for what the others push later."""
    block, n_blocks = 32_000, 8
    monkeypatch.setattr(request_order, "CREDIT_NBYTES", 3 * block)
    monkeypatch.setattr(client_module, "STALL_S", 0.02)
    most = []

    def body(rank):
        tables = make("abc", n_blocks, block)
        order = tables[rank:] + tables[:rank]
        for _ in range(2):
            futures = [push() for push, _ in order]
            most.append(max(session().client.credit.n_bytes.values()))
            assert all(each.wait().applied for each in futures)
        return [pull().mean() for _, pull in tables]

    assert run_workers(3, body, n_servers) == [[2.0] * 3] * 3
    if make is dense_tables:
        assert max(most) <= (3 + 3) * block  # of each table one more


@pytest.mark.usefixtures("wire")
def test_an_earlier_block_does_not_wait_for_a_later_one_that_moved_to_its_server(monkeypatch):
    """One worker has sent block 3 before 2, and the other, after the move, 2 before 3."""
    has_come, kept, hear = threading.Event(), [], Server.on_request

    def hear_late(server, delivery):
        """Keep the second worker's block 1 until the first one's block 3 is at its new server."""
        header = delivery.header
        pushed = header.kind == FrameKind.PUSH and (header.origin, header.partition, server.index)
        if pushed == (1, 1, 1) and not has_come.is_set():
            kept.append((server, delivery))
            return
        if pushed == (0, 3, 1):
            has_come.set()
        hear(server, delivery)
        while kept and has_come.is_set():
            hear(*kept.pop())

    def place(t, owners):
        moves = [Move((t.number, part), -1, owner) for part, owner in enumerate(owners)]
        move_all(session(), moves).wait()

    def body(rank):
        t = ps.table("w", 40, updater=ps.optim.Add(), mode="sync", block_nbytes=40)
        if rank == 0:
            place(t, [0, 1, 1, 0])
        rc.barrier()
        if rank == 0:
            push = t.push(np.ones(40, np.float32))
            place(t, [0, 1, 1, 1])
        rc.barrier()
        if rank == 1:
            push = t.push(np.ones(40, np.float32))
        assert push.wait().applied
        return t.pull().wait().tolist()

    monkeypatch.setattr(request_order, "CREDIT_NBYTES", 10)
    monkeypatch.setattr(client_module, "STALL_S", 0.02)
    monkeypatch.setattr(Server, "on_request", hear_late)
    assert run_workers(2, body, 2) == [[1.0] * 40] * 2
    assert has_come.is_set()


def test_who_leaves_behind_pushes_that_wait_for_credit_stops_no_move_that_others_wait_for(
    monkeypatch,
):
    monkeypatch.setattr(request_order, "CREDIT_NBYTES", 10)
    monkeypatch.setattr(client_module, "STALL_S", 0.02)
    has_settled, settle = threading.Event(), end_of_job._settle

    def note_settling(current):
        has_settled.set()
        settle(current)

    monkeypatch.setattr(end_of_job, "_settle", note_settling)

    def body(rank):
        t = ps.table("w", 40, updater=ps.optim.Add(), mode="sync", block_nbytes=40)
        rc.barrier()
        if rank == 1:
            t.push(np.ones(40, np.float32))
            session().leave()
            return None
        assert has_settled.wait(30)
        for dest in (1, 0):
            move_all(session(), [Move((t.number, 3), -1, dest)]).wait()
        assert t.push(np.ones(40, np.float32)).wait().applied
        return t.pull().wait().tolist()

    assert run_workers(2, body, 2) == [[1.0] * 40, None]


def test_a_table_has_one_push_under_way_whatever_others_wait_for(monkeypatch):
    def request(table, nbytes=100, kind=FrameKind.PUSH, server=0):
        return Request(kind, (table, 0), server=server, body=np.empty(nbytes, np.uint8))

    monkeypatch.setattr(request_order, "CREDIT_NBYTES", 250)
    monkeypatch.setattr(request_order, "CREDIT_REQUESTS", 3)
    bound = Credit()
    for _ in range(2):
        bound.count(request(1), 1)
    assert not bound.allows(request(1))
    assert bound.allows(request(1, nbytes=50))
    assert bound.allows(request(1, server=1))
    assert bound.allows(request(2))
    assert not bound.allows(request(2, kind=FrameKind.CALL))
    bound.count(request(2), 1)
    assert not bound.allows(request(2))
    assert not bound.allows(request(2, nbytes=0))
    assert bound.allows(request(3, nbytes=0))
    assert bound.allows(request(0, kind=FrameKind.SERVER))
    assert bound.busy() == {0}
    bound.count(request(2), -1)
    assert bound.allows(request(2))


def test_the_least_turn_is_known_whatever_left_and_came_back_in_which_order():
    random = np.random.default_rng(7)
    turns, present = Turns(), set()
    for turn in random.integers(1, 50, 3000).tolist():
        if turn in present:
            turns.discard(turn)
            present.discard(turn)
        else:
            turns.add(turn)
            present.add(turn)
        assert turns.least() == min(present, default=math.inf)
    for turn in present:
        turns.discard(turn)
    assert turns.least() == math.inf
