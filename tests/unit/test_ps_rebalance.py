"""Partitions that move while everybody works: nothing is lost, doubled, or out of order."""

import itertools
import random
import threading

import harness
import numpy as np
import pytest
from harness import wait_until
from ps_ranks_as_threads import moving_beside, run_workers
from sample_values import whole_numbers

import ringcomm as rc
from ringcomm import ps
from ringcomm.ps.client.request_order import RequestOrder
from ringcomm.ps.job import session
from ringcomm.ps.placement.partitions import Move
from ringcomm.ps.placement.rebalance import move_all
from ringcomm.ps.protocol.frames import FrameKind
from ringcomm.ps.server.partition_transfer import Transfer

pytestmark = pytest.mark.one_wire

COUNT, BLOCK = 6000, 4000  # bytes of a block: 6 partitions of 1000 float32


def owners(t):
    """Return who owns each partition, as ps.stats() tells."""
    return {
        int(part): each["server"] for each in ps.stats() for part in each["tables"].get(t.name, {})
    }


def move(t, part, dest):
    return move_all(session(), [Move((t.number, part), -1, dest)]).wait()


def to_and_fro(t, n_servers, is_over, seed=0):
    """Move partitions at random until is_over(); return how many have moved."""
    rng, n_moved = random.Random(seed), 0
    while not is_over():
        n_moved += move(t, rng.randrange(6), rng.randrange(n_servers)).moved
    return n_moved


# --- many at once -------------------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("n_servers", [2, 3])
def test_no_push_is_lost_or_doubled_while_partitions_move(n_servers):
    n_pushes, n_pushers = 100, 3
    are_done, first = threading.Semaphore(0), whole_numbers(0, COUNT)

    def body(rank):
        t = ps.table("w", COUNT, updater=ps.optim.Add(), block_nbytes=BLOCK, init=first)
        if rank == 0:
            n_moved = to_and_fro(t, n_servers, lambda: are_done._value == n_pushers)
            assert n_moved > 5
        else:
            for k in range(n_pushes):
                future = t.push(np.ones(COUNT, np.float32))
                if k % 10 == 9:
                    assert future.wait().applied
                    assert (t.pull().wait() >= first + k + 1).all()  # read-your-writes
            future.wait()
            are_done.release()
        rc.barrier()
        return t.pull().wait()

    for values in run_workers(1 + n_pushers, body, n_servers):
        assert np.array_equal(values, first + n_pushes * n_pushers)


def next_move_of(t, current):
    """Return what moves a partition at random; for any thread."""
    return lambda rng: move_all(current, [Move((t.number, rng.randrange(6)), -1, rng.randrange(2))])


@pytest.mark.long
@pytest.mark.usefixtures("wire")
def test_rounds_go_on_with_the_same_bits_while_partitions_move():
    n_rounds, n_workers = 40, 3
    rng = np.random.default_rng(0)
    gradients = rng.standard_normal((n_workers, COUNT)).astype(np.float32)

    def train(t, rank):
        for step in range(n_rounds):
            t.push(gradients[rank] * np.float32(1 + step % 5), weight=rank + 1)
            values = t.pull().wait()
        return values.tobytes()

    def body(rank, does_move):
        adam = ps.optim.Adam(0.01)
        t = ps.table("w", COUNT, updater=adam, mode="sync", block_nbytes=BLOCK, init=1.0)
        if rank == 0 and does_move:
            end = moving_beside(next_move_of(t, session()))
            values = train(t, rank)
            return values, end()
        return train(t, rank), 99

    still = run_workers(n_workers, lambda rank: body(rank, does_move=False), 1)
    moved = run_workers(n_workers, lambda rank: body(rank, does_move=True), 2)
    assert {values for values, _ in still + moved} == {still[0][0]}
    assert min(n for _, n in moved) > 5


@pytest.mark.long
@pytest.mark.parametrize("s", [0, 2])
def test_a_bounded_read_has_every_push_that_it_must_while_partitions_move(s):
    n_steps, n_workers = 40, 3
    finished = threading.Semaphore(0)

    def body(rank):
        t = ps.table("w", COUNT, updater=ps.optim.Add(), mode=ps.SSP(s), block_nbytes=BLOCK)
        if rank == 0:
            session().clock = 10**9  # it trains nothing, and is waited for by nobody
            session().tick()
            assert to_and_fro(t, 2, lambda: finished._value == n_workers - 1) > 3
        else:
            for clock in range(n_steps):
                values = t.pull().wait()
                must = (n_workers - 1) * max(0, clock - s) + min(clock, s)
                assert values.min() >= must, (clock, values.min(), must)
                pushed = t.push(np.ones(COUNT, np.float32))
                session().tick()
            pushed.wait()
            finished.release()
        rc.barrier()
        return t.pull().wait()[0]

    expected = (n_workers - 1) * n_steps
    assert run_workers(n_workers, body, 2) == [expected] * n_workers


# --- one at a time ------------------------------------------------------------------------------
def test_a_contribution_that_waits_for_its_round_goes_along():
    pushed, moved = threading.Event(), threading.Event()

    def body(rank):
        t = ps.table("w", 10, updater=ps.optim.SGD(1.0), mode="sync")
        if rank == 0:
            future = t.push(np.full(10, -1.0, np.float32))
            pull = t.pull()
            pushed.set()
            assert moved.wait(60)
            assert future.wait().applied
            return pull.wait()[0]
        assert pushed.wait(60)
        before = owners(t)[0]
        ps.stats()
        assert move(t, 0, 1 - before).moved == 1
        assert owners(t)[0] == 1 - before
        moved.set()
        assert t.push(np.full(10, -3.0, np.float32)).wait().applied
        return t.pull().wait()[0]

    assert run_workers(2, body, 2) == [2.0, 2.0]


def test_a_mean_that_waits_for_its_release_goes_along():
    def body(rank):
        t = ps.table("w", 10, updater=ps.optim.SGD(1.0), mode="sync")
        told = t.push(np.full(10, -1.0 - rank, np.float32), hold=True).wait()
        assert told.squares == 10 * 1.5**2
        early = t.push(np.full(10, -4.0, np.float32)) if rank else None
        if rank:
            assert move(t, 0, 1 - owners(t)[0]).moved == 1
        rc.barrier()
        t.release(2.0)
        (early or t.push(np.full(10, -8.0, np.float32))).wait()
        return t.pull().wait()[0]

    assert run_workers(2, body, 2) == [3.0 + 6.0] * 2


@pytest.mark.usefixtures("wire")
def test_what_was_sent_in_an_older_view_is_sent_back_though_the_partition_is_there_again():
    def body(rank):
        t = ps.table("w", 10, updater=ps.optim.Add())
        client, partition = session().client, (t.number, 0)
        owner = owners(t)[0]
        for dest in (1 - owner, owner):
            assert move(t, 0, dest).moved == 1
        t.pull().wait()
        n_moved = client.n_resent
        assert client.owners.orders[partition].epoch == 2
        client.owners.orders[partition].epoch = 1  # as one that was on its way all the time
        assert t.push(np.ones(10, np.float32)).wait().applied
        assert client.n_resent == n_moved + 1
        return t.pull().wait()[0]

    assert run_workers(1, body, 2) == [1.0]


def test_who_only_reads_where_values_stand_hears_of_what_moves(monkeypatch):
    monkeypatch.setattr(harness, "wire", "node")
    transfers, is_over, begin = [], threading.Event(), Transfer.__init__

    def begin_noted(transfer, *arguments, **options):
        transfers.append(transfer)
        begin(transfer, *arguments, **options)

    def body(rank):
        t = ps.table("w", COUNT, block_nbytes=BLOCK)
        t.pull().wait()
        rc.barrier()
        if rank == 1:
            while not is_over.is_set():
                t.pull(where=slice(1000, 2000)).wait()
            return
        try:
            assert move(t, 0, 1 - owners(t)[0]).moved == 1
            wait_until(lambda: owners(t) and not any(each._retired for each in transfers), "kept")
        finally:
            is_over.set()

    monkeypatch.setattr(Transfer, "__init__", begin_noted)
    run_workers(2, body, 2)


def test_a_worker_that_leaves_during_moves_loses_nothing():
    def body(rank):
        t = ps.table("w", COUNT, updater=ps.optim.Add(), block_nbytes=BLOCK)
        rc.barrier()
        if rank == 1:
            for _ in range(30):
                t.push(np.ones(COUNT, np.float32))  # not waited for
            session().leave()
            return 30.0
        for part, dest in itertools.product(range(6), (0, 1, 0)):
            move(t, part, dest)
        wait = threading.Event()
        while t.pull().wait().min() < 30:
            wait.wait(0.001)
        return t.pull().wait().max()

    assert run_workers(2, body, 2) == [30.0, 30.0]


def moved_while_the_news_is_under_way():
    """Return a table of which a partition moved; what is pushed to it next comes back."""
    t = ps.table("w", 10, updater=ps.optim.Add())
    assert move(t, 0, 1 - owners(t)[0]).moved == 1
    t.pull().wait()
    session().client.owners.orders[t.number, 0].epoch = 0
    return t


def test_who_leaves_has_first_sent_again_what_came_back():
    def body(rank):
        t = moved_while_the_news_is_under_way()
        future = t.push(np.ones(10, np.float32))
        session().leave()
        return future.done() and future.result().applied

    assert run_workers(1, body, 2) == [True]


def test_a_push_that_came_back_is_sent_again_as_it_was_made():
    def body(rank):
        t = moved_while_the_news_is_under_way()
        x = np.ones(10, np.float32)
        future = t.push(x)
        x.fill(7)
        future.wait()
        return t.pull().wait().tolist()

    assert run_workers(1, body, 2) == [[1.0] * 10]


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_push_that_comes_again_after_a_move_is_not_applied_again(mode):
    def body(rank):
        t = ps.table("w", 10, updater=ps.optim.SGD(1.0), mode=mode)
        current, sent = session(), []
        wire, dest = current.client.link, 1 - owners(t)[0]
        ask = wire.ask
        wire.ask = lambda *request: sent.append(request) or ask(*request)
        t.push(np.full(10, -1, np.float32)).wait()
        wire.ask = ask
        (request,) = [each for each in sent if each[1][0] == FrameKind.PUSH]
        assert move(t, 0, dest).moved == 1
        t.pull().wait()
        _, (kind, _, *rest), *payload = request
        epoch = current.client.owners.orders[t.number, 0].epoch
        wire.ask(current.layout.servers[dest], (kind, epoch, *rest), *payload)
        assert owners(t)[0] == dest  # the server has answered what came after it
        t.push(np.zeros(10, np.float32)).wait()
        return t.pull().wait().tolist()

    assert run_workers(1, body, 2) == [[1.0] * 10]


def test_values_are_not_read_any_more_where_they_stood_before_a_move(monkeypatch):
    monkeypatch.setattr(harness, "wire", "node")

    def body(rank):
        t = ps.table("w", 10, updater=ps.optim.Add())
        t.pull().wait()
        before = t._pulls.known[0]
        assert move(t, 0, 1 - owners(t)[0]).moved == 1
        t.push(np.ones(10, np.float32)).wait()
        t._pulls.known[0] = before  # as if the news were still on their way
        session().client.owners.orders[t.number, 0].epoch = before[0]
        return t.pull().wait().tolist()

    assert run_workers(1, body, 2) == [[1.0] * 10]


def test_nothing_moves_within_a_snapshot():
    holds, asked = threading.Event(), threading.Event()

    def body(rank):
        t = ps.table("w", 10, updater=ps.optim.Add())
        owner = owners(t)[0]
        if rank == 0:
            with ps.snapshot():
                holds.set()
                assert asked.wait(60)
                assert owners(t)[0] == owner
                with pytest.raises(rc.RingcommError, match=r"not within ps.snapshot"):
                    ps.rebalance()
        else:
            assert holds.wait(60)
            future = move_all(session(), [Move((t.number, 0), -1, 1 - owner)])
            asked.set()
            assert future.wait().moved == 1
        rc.barrier()
        return owners(t)[0] == owner

    assert run_workers(2, body, 2) == [False, False]


def test_a_table_that_is_opened_late_is_found_where_it_is():
    def body(rank):
        if rank == 0:
            t = ps.table("w", COUNT, updater=ps.optim.Add(), block_nbytes=BLOCK)
            for part in range(6):
                move(t, part, 1)
        rc.barrier()
        t = ps.table("w", COUNT, updater=ps.optim.Add(), block_nbytes=BLOCK)
        t.push(np.ones(COUNT, np.float32)).wait()
        rc.barrier()
        return t.pull().wait().sum(), session().client.n_resent * rank

    assert run_workers(2, body, 2) == [(2.0 * COUNT, 0), (2.0 * COUNT, 0)]


# --- what to move -------------------------------------------------------------------------------
def test_traffic_decides_where_partitions_go():
    def body(rank):
        t = ps.table("w", COUNT, updater=ps.optim.Add(), block_nbytes=BLOCK)
        placed = owners(t)
        hot = [part for part, server in placed.items() if server == 0]
        for _ in range(20):
            for part in hot:
                t.push(np.ones(1000, np.float32), where=slice(part * 1000, part * 1000 + 1000))
        t.pull().wait()
        done = ps.rebalance().wait()
        now = owners(t)
        assert done.moved == 1
        assert done.load[0] > 0.8
        assert max(done.load_after) < 0.7
        assert sum(now[part] == 1 for part in hot) == 1
        again = ps.rebalance().wait()  # nothing has been asked since
        assert again.moved == 0
        return t.pull().wait().sum()

    assert run_workers(1, body, 2) == [20.0 * 3000]


def test_only_traffic_since_the_last_rebalance_decides():
    def body(rank):
        t = ps.table("w", COUNT, updater=ps.optim.Add(), block_nbytes=BLOCK)

        def push_to_blocks_of(server):
            for part, owner in owners(t).items():
                where = slice(part * 1000, part * 1000 + 1000)
                for _ in range(20 * (owner == server)):
                    t.push(np.ones(1000, np.float32), where=where).wait()

        push_to_blocks_of(0)
        ps.rebalance().wait()
        push_to_blocks_of(1)
        return ps.rebalance().wait().load

    assert run_workers(1, body, 2) == [(0.0, 1.0)]


def test_servers_tell_what_they_do():
    def body(rank):
        t = ps.table("w", COUNT, updater=ps.optim.SGD(0.1), block_nbytes=BLOCK)
        first = ps.stats()
        for _ in range(10):
            t.push(np.ones(COUNT, np.float32)).wait()
        t.pull().wait()
        return first, ps.stats()

    [(first, now)] = run_workers(1, body, 2)
    for before, after in zip(first, now, strict=True):
        assert after["elements"] == 3000
        assert after["pushes"] == 30
        assert after["pulls"] == 3
        assert after["nbytes_in"] - before["nbytes_in"] == 10 * 3000 * 4
        assert after["nbytes_out"] >= 3000 * 4
        assert 0 < after["apply_s"] < after["seconds"]
        seconds = after["seconds"] - before["seconds"]
        requests = after["requests"] - before["requests"]
        assert after["requests_per_s"] == pytest.approx(requests / seconds)
        assert requests == 30 + 3 + 1
        assert after["waiting"] == 0
        assert sum(after["staleness"].values()) == 30


# --- orders --------------------------------------------------------------------------------------
def test_what_came_back_leaves_in_the_order_in_which_it_was_made():
    order = RequestOrder()
    assert [order.add(k) for k in (1, 2, 3)] == [True] * 3
    assert order.returned(2, epoch=5) == []
    assert not order.add(4)
    assert order.returned(3, epoch=5) == []
    assert order.answered(1) == [2, 3, 4]
    assert order.is_settled
    assert order.add(5)


def test_news_of_two_moves_may_come_in_the_wrong_order():
    order = RequestOrder()
    order.add(1)
    order.add(2)
    assert order.moved(7) == []
    assert order.moved(6) == []
    assert order.returned(1, epoch=6) == []
    assert order.returned(2, epoch=6) == [1, 2]
    assert order.epoch == 7


def test_a_server_that_sends_back_what_is_its_own_is_at_fault():
    order = RequestOrder(epoch=4)
    order.add(1)
    with pytest.raises(ValueError, match="of epoch 4 came back with epoch 4"):
        order.returned(1, epoch=4)
