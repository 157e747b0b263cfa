"""Rows that move while everybody works: nothing is lost, doubled, or out of order."""

import contextlib
import random
import threading

import numpy as np
import pytest
from harness import at_length
from ps_ranks_as_threads import moving_beside, run_workers
from sample_values import whole_numbers

import ringcomm as rc
from ringcomm import _core, ps
from ringcomm.ps import end_of_job
from ringcomm.ps.job import session
from ringcomm.ps.placement.partitions import HASH_PARTITIONS, Move
from ringcomm.ps.placement.rebalance import move_all
from ringcomm.ps.protocol.frame_meta import PushMeta
from ringcomm.ps.protocol.frames import ServerOption
from ringcomm.ps.server.rows import hash_shard as hashed

pytestmark = pytest.mark.one_wire

N, DIM = 600, 3
KEYS = np.arange(N, dtype=np.uint64) * np.uint64(7919)
ONES = np.ones((N, DIM), np.float32)


def partitions_of(keys):
    found = np.empty(len(keys), np.uint32)
    _core.partition_of(np.asarray(keys, np.uint64), HASH_PARTITIONS, found)
    return found.tolist()


def owned():
    """Return how many partitions of the one hash table each server has."""
    return [each["hashtables"]["emb"]["partitions"] for each in ps.stats()]


def moving(kv, parts, dest):
    return move_all(session(), [Move((kv.number, part), -1, dest) for part in parts])


def move(kv, keys, dest):
    """Move the partitions of keys to a server; return how many had to."""
    return moving(kv, sorted(set(partitions_of(keys))), dest).wait().moved


def to_and_fro(kv, n_servers, is_over, seed=0):
    """Move half of the partitions at random until is_over(); return how often."""
    rng, n = random.Random(seed), 0
    while not is_over():
        parts = rng.sample(range(HASH_PARTITIONS), 40)
        n += moving(kv, parts, rng.randrange(n_servers)).wait().moved > 0
    return n


# --- many at once -------------------------------------------------------------------------------
@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("n_servers", [2, 3])
def test_no_push_is_lost_or_doubled_while_rows_move(n_servers):
    n_pushes, n_pushers = at_length(400, 60), 3
    are_done = threading.Semaphore(0)

    def body(rank):
        kv = ps.hashtable("emb", DIM, updater=ps.optim.Add())
        if rank == 0:
            n_moved = to_and_fro(kv, n_servers, lambda: are_done._value == n_pushers)
            assert n_moved > 3
        else:
            rng = np.random.default_rng(rank)
            for k in range(n_pushes):
                mine = rng.permutation(N)  # all of them, in some order
                future = kv.push(KEYS[mine], ONES)
                if k % 10 == 9:
                    assert future.wait().applied
                    assert (kv.pull(KEYS).wait() >= k + 1).all()  # read-your-writes
            future.wait()
            are_done.release()
        rc.barrier()
        return kv.pull(KEYS, missing="raise").wait(), len(kv), kv.metadata(KEYS).wait().pushes

    for values, n, pushes in run_workers(1 + n_pushers, body, n_servers):
        assert (values == n_pushes * n_pushers).all()
        assert n == N
        assert (pushes == n_pushes * n_pushers).all()


@pytest.mark.usefixtures("wire")
def test_pushes_of_one_worker_to_a_row_are_applied_in_order_while_rows_move():
    n_pushes, rows = at_length(600, 60), whole_numbers(0, N * DIM).reshape(N, DIM)
    is_over = threading.Event()

    def body(rank):
        kv = ps.hashtable("emb", DIM, updater=ps.optim.Add())
        if rank == 0:
            to_and_fro(kv, 2, is_over.is_set)
            return True
        for k in range(1, n_pushes):
            kv.push(KEYS, rows + k, assign=True)
            if k % 3 == 0:
                kv.push(KEYS[: N // 2], ONES[: N // 2])
            if k % 20 == 0:
                seen = kv.pull(KEYS).wait()
                assert np.array_equal(seen[N // 2 :], rows[N // 2 :] + k)
                assert np.array_equal(seen[: N // 2], rows[: N // 2] + k + (k % 3 == 0))
        is_over.set()
        return True

    assert run_workers(2, body, 2) == [True, True]


UPDATERS = [
    ps.optim.Adagrad(0.1),
    ps.optim.Adam(0.01),
    ps.optim.RowwiseAdagrad(0.1),
    ps.optim.FTRL(0.1),
]


def next_move_of(kv, current):
    """Return what moves some partitions at random; for any thread."""

    def next_move(rng):
        dest = rng.randrange(2)
        parts = rng.sample(range(HASH_PARTITIONS), 60)
        return move_all(current, [Move((kv.number, part), -1, dest) for part in parts])

    return next_move


@pytest.mark.long
@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("updater", at_length(UPDATERS, UPDATERS[1:2]))
def test_rounds_go_on_with_the_same_bits_while_rows_move(updater):
    n_rounds, n_workers = 30, 3
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 400, (n_rounds, n_workers, 50)).astype(np.uint64)
    rows = rng.standard_normal((n_rounds, n_workers, 50, DIM)).astype(np.float32)

    def train(kv, rank):
        for step in range(n_rounds):
            n = 0 if (step + rank) % 7 == 0 else 50
            kv.push(keys[step, rank, :n], rows[step, rank, :n], weight=rank + 1)
            if step % 4:
                kv.pull(keys[step, rank]).wait()
        return kv.pull(np.arange(400)).wait().tobytes()

    def body(rank, does_move):
        init = ps.initializers.normal(std=0.1, seed=5)
        admit = ps.Admit(min_count=3)
        kv = ps.hashtable("emb", DIM, updater=updater, mode="sync", init=init, admit=admit)
        end = moving_beside(next_move_of(kv, session())) if rank == 0 and does_move else None
        values = train(kv, rank)
        n_moved = end() if end else 99
        rc.barrier()
        return values, len(kv), n_moved

    still = run_workers(n_workers, lambda rank: body(rank, does_move=False), 1)
    moved = run_workers(n_workers, lambda rank: body(rank, does_move=True), 2)
    assert {each[:2] for each in still + moved} == {still[0][:2]}
    assert min(n for *_, n in moved) > 3


@pytest.mark.long
@pytest.mark.parametrize("s", at_length([0, 2], [2]))
def test_a_bounded_read_has_every_push_that_it_must_while_rows_move(s):
    n_steps, n_workers = 40, 3
    finished = threading.Semaphore(0)

    def body(rank):
        kv = ps.hashtable("emb", DIM, updater=ps.optim.Add(), mode=ps.SSP(s))
        if rank == 0:
            session().clock = 10**9  # it trains nothing, and is waited for by nobody
            session().tick()
            assert to_and_fro(kv, 2, lambda: finished._value == n_workers - 1) > 3
        else:
            for clock in range(n_steps):
                values = kv.pull(KEYS).wait()
                must = (n_workers - 1) * max(0, clock - s) + min(clock, s)
                assert values.min() >= must, (clock, values.min(), must)
                pushed = kv.push(KEYS, ONES)
                session().tick()
            pushed.wait()
            finished.release()
        rc.barrier()
        return kv.pull(KEYS).wait()[0, 0]

    expected = (n_workers - 1) * n_steps
    assert run_workers(n_workers, body, 2) == [expected] * n_workers


@pytest.mark.long
def test_a_row_is_counted_once_while_it_moves():
    n_counts = at_length(500, 100)
    is_over = threading.Event()

    def body(rank):
        kv = ps.hashtable("emb", DIM, updater=ps.optim.Add())
        if rank == 0:
            kv.push(KEYS, ONES).wait()
        rc.barrier()
        if rank == 0:
            to_and_fro(kv, 3, is_over.is_set)
            return {N}
        counts = {len(kv) for _ in range(n_counts)}
        is_over.set()
        return counts

    assert run_workers(2, body, 3) == [{N}, {N}]


# --- one at a time ------------------------------------------------------------------------------
def test_rows_take_along_all_that_is_known_of_them():
    def body(_):
        kv = ps.hashtable(
            "emb", DIM, updater=ps.optim.Adam(0.1), admit=ps.Admit(min_count=3),
        )  # fmt: skip
        for k in range(4):
            kv.push(KEYS[k * 100 :], ONES[k * 100 :]).wait()
        before = kv.pull(KEYS).wait(), kv.metadata(KEYS).wait()
        for dest in (1, 0, 1):
            assert move(kv, KEYS, dest) > 0
        after = kv.pull(KEYS).wait(), kv.metadata(KEYS).wait()
        np.testing.assert_array_equal(before[0], after[0])
        for name in ("pushes", "steps", "time"):
            np.testing.assert_array_equal(getattr(before[1], name), getattr(after[1], name))
        done = kv.push(KEYS, ONES).wait()  # the third of some, which are admitted now
        return len(kv), done.rejected, [each["rows"] for each in ps.stats()]

    assert run_workers(1, body, 2) == [(500, 100, [0, 500])]


@pytest.mark.long
def test_a_contribution_that_waits_for_its_round_is_split_anew():
    pushed, moved = threading.Event(), threading.Event()

    def body(rank):
        kv = ps.hashtable("emb", DIM, updater=ps.optim.SGD(1.0), mode="sync")
        if rank == 0:
            future = kv.push(KEYS, -ONES)
            pull = kv.pull(KEYS)
            ps.stats()  # it has arrived
            pushed.set()
            assert moved.wait(60)
            done = future.wait()
            assert (done.applied, done.version) == (True, 1)
            return pull.wait().tolist()
        assert pushed.wait(60)
        assert move(kv, KEYS, 1) > 0  # before its own part of the round
        moved.set()
        assert kv.push(KEYS, -3 * ONES).wait().applied
        return kv.pull(KEYS).wait().tolist()

    assert run_workers(2, body, 2) == [(2 * ONES).tolist()] * 2


def test_a_push_that_comes_again_behind_a_move_is_not_applied_again():
    def body(_):
        kv = ps.hashtable("emb", DIM, updater=ps.optim.Add())
        assert move(kv, KEYS, 0) > 0
        client = session().client
        sends, send = [], client._send

        def noting(ask, sequence, epoch):
            sends.append((ask, sequence))
            send(ask, sequence, epoch)

        client._send = noting
        kv.push(KEYS, ONES).wait()
        [(ask, sequence)] = sends
        assert move(kv, KEYS[:300], 1) > 0
        epoch = kv._calls._order.epoch
        kv.pull(KEYS).wait()
        went = np.isin(partitions_of(KEYS), partitions_of(KEYS[:300]))
        ask.server = 1  # what would come if the answer of the server before had been lost
        ask.body = np.concatenate(
            [KEYS[went].view(np.uint8), ONES[went].reshape(-1).view(np.uint8)]
        )
        ask.meta = PushMeta.of(ask.meta)._replace(n=int(went.sum())).packed()
        send(ask, sequence, epoch)
        return kv.pull(KEYS).wait().tolist(), kv.metadata(KEYS).wait().pushes.max()

    assert run_workers(1, body, 2) == [(ONES.tolist(), 1)]


def test_a_call_of_a_view_long_ago_comes_back_and_is_carried_out_once():
    def body(_):
        kv = ps.hashtable("emb", DIM, updater=ps.optim.Add())
        calls = kv._calls
        old = calls._owners.copy()
        for dest in (1, 0):
            assert move(kv, KEYS, dest) > 0
        kv.pull(KEYS).wait()
        calls._order.epoch, calls._owners = 0, old  # as if the news were still on their way
        n_moved = session().client.n_resent
        assert kv.push(KEYS, ONES).wait().applied
        assert session().client.n_resent == n_moved + 1
        calls._order.epoch, calls._owners = 0, old
        assert len(kv) == N
        return kv.pull(KEYS).wait().tolist()

    assert run_workers(1, body, 2) == [ONES.tolist()]


def test_a_worker_that_leaves_during_moves_loses_nothing():
    def body(rank):
        kv = ps.hashtable("emb", DIM, updater=ps.optim.Add())
        rc.barrier()
        if rank == 1:
            for _ in range(30):
                kv.push(KEYS, ONES)  # not waited for
            session().leave()
            return 30.0
        for dest in (0, 1, 0, 1, 0, 1):
            move(kv, KEYS, dest)
        wait = threading.Event()
        while kv.pull(KEYS).wait().min() < 30:
            wait.wait(0.001)
        return kv.pull(KEYS).wait().max()

    assert run_workers(2, body, 2) == [30.0, 30.0]


def test_part_of_a_round_whose_worker_has_left_stays_where_it_is_and_counts():
    has_left = threading.Event()

    def body(rank):
        kv = ps.hashtable("emb", DIM, updater=ps.optim.SGD(1.0), mode="sync")
        if rank == 1:
            kv.push(KEYS, -3 * ONES)
            session().leave()
            has_left.set()
            return 2.0
        assert has_left.wait(60)
        with pytest.raises(rc.RingcommError, match="worker 1 has left, or"):
            move(kv, KEYS, 1)
        assert kv.push(KEYS, -ONES).wait().applied
        assert move(kv, KEYS, 1) > 0
        return kv.pull(KEYS).wait().mean()

    assert run_workers(2, body, 2) == [2.0, 2.0]


@pytest.mark.parametrize("way", ["leaves", "rests"])
def test_rows_do_not_move_while_servers_hear_that_a_worker(way, monkeypatch):
    is_leaving, may_leave, has_left = (threading.Event() for _ in range(3))
    ask_servers = end_of_job.ask_servers

    def slowly(client, label, kind, *args, **options):
        is_gone = options.get("option") in (ServerOption.LEAVE, ServerOption.REST)
        if is_gone and not has_left.is_set():
            is_leaving.set()
            assert may_leave.wait(60)
        return ask_servers(client, label, kind, *args, **options)

    monkeypatch.setattr(end_of_job, "ask_servers", slowly)

    def leave():
        (session().leave if way == "leaves" else session().rest)()
        has_left.set()

    def body(rank):
        mode = "sync" if way == "leaves" else ps.FirstOf(3)
        kv = ps.hashtable("emb", DIM, updater=ps.optim.SGD(1.0), mode=mode)
        rc.barrier()
        if rank == 1:
            kv.push(KEYS, -9 * ONES)
            leave()
            return None
        assert is_leaving.wait(60)
        if rank == 0:
            kv.push(KEYS, -ONES).wait()
            return kv.pull(KEYS).wait().tolist()
        moves = moving(kv, range(64), 1)
        for _ in range(20):
            ps.stats()  # by now rows would have moved, and parts of the round would be on their way
        future = kv.push(KEYS, -5 * ONES)
        ps.stats()
        may_leave.set()
        assert has_left.wait(60)
        future.wait()
        assert moves.wait().moved > 0
        return kv.pull(KEYS).wait().tolist()

    expected = (5 * ONES).tolist()  # (1 + 9 + 5) / 3
    assert run_workers(3, body, 3) == [expected, None, expected]


def test_what_workers_pushed_before_they_left_counts_while_rows_move():
    n_rounds, n_leavers, n_parts = 6, 4, HASH_PARTITIONS // 8
    have_left = threading.Semaphore(0)

    def body(rank):
        kv = ps.hashtable("emb", DIM, updater=ps.optim.SGD(1.0), mode="sync")
        rc.barrier()
        if rank:
            for _ in range(rank):  # not waited for
                kv.push(KEYS, -(rank + 1) * ONES)
            session().leave()
            have_left.release()
            return None
        k = 0
        while have_left._value < n_leavers:
            k += 1
            with contextlib.suppress(rc.RingcommError):  # parts of rounds whose worker has left
                first = n_parts * (k % 8)
                moving(kv, range(first, first + n_parts), k // 8 % 3).wait()
        for _ in range(n_rounds):
            assert kv.push(KEYS, -ONES).wait().applied
        return kv.pull(KEYS).wait()

    rows = run_workers(1 + n_leavers, body, 3)[0]
    of_rounds = [[1, *(w + 1 for w in range(1, n_leavers + 1) if w > k)] for k in range(n_rounds)]
    np.testing.assert_allclose(rows, sum(np.mean(each) for each in of_rounds), rtol=1e-6)


def test_rounds_that_are_over_on_one_server_end_on_the_others_before_rows_move():
    def body(rank):
        kv = ps.hashtable("emb", DIM, updater=ps.optim.SGD(1.0), mode=ps.FirstOf(1))
        for k in range(40):
            kv.push(KEYS, -ONES)
            if rank == 0 and k % 5 == 0:
                moving(kv, random.Random(k).sample(range(HASH_PARTITIONS), 64), k % 3)
        future = kv.push(KEYS, -ONES)
        return future.wait().version >= 41, kv.pull(KEYS).wait()

    results = run_workers(2, body, 3)
    assert all(is_enough for is_enough, _ in results)
    for _, rows in results:
        assert len(np.unique(rows)) == 1  # of all servers the same rounds
        assert rows[0, 0] == 41


def test_a_server_that_has_lost_all_its_rows_takes_part_in_rounds():
    def body(rank):
        kv = ps.hashtable("emb", DIM, updater=ps.optim.SGD(1.0), mode="sync")
        for dest in (1, 0, 1):
            if rank == 0:
                moving(kv, range(HASH_PARTITIONS), dest).wait()
            rc.barrier()
            kv.push(KEYS, -ONES).wait()
        return kv.pull(KEYS).wait().tolist(), owned()

    assert run_workers(2, body, 2) == [((3 * ONES).tolist(), [0, HASH_PARTITIONS])] * 2


def test_nothing_moves_within_a_snapshot():
    holds, asked = threading.Event(), threading.Event()

    def body(rank):
        kv = ps.hashtable("emb", DIM, updater=ps.optim.Add())
        before = owned()
        if rank == 0:
            with ps.snapshot():
                holds.set()
                assert asked.wait(60)
                assert owned() == before
        else:
            assert holds.wait(60)
            future = moving(kv, range(HASH_PARTITIONS), 1)
            asked.set()
            assert future.wait().moved == before[0]
        rc.barrier()
        return owned()

    assert run_workers(2, body, 2) == [[0, HASH_PARTITIONS]] * 2


def test_a_table_that_is_opened_late_is_found_where_it_is():
    def body(rank):
        if rank == 0:
            kv = ps.hashtable("emb", DIM, updater=ps.optim.Add())
            assert moving(kv, range(HASH_PARTITIONS), 1).wait().moved > 0
        rc.barrier()
        kv = ps.hashtable("emb", DIM, updater=ps.optim.Add())
        kv.push(KEYS, ONES).wait()
        rc.barrier()
        return kv.pull(KEYS).wait().sum(), session().client.n_resent * rank

    assert run_workers(2, body, 2) == [(2.0 * N * DIM, 0), (2.0 * N * DIM, 0)]


def test_partitions_that_cannot_be_taken_stay_and_lose_nothing(monkeypatch):
    def body(_):
        kv = ps.hashtable("emb", DIM, updater=ps.optim.Add())
        kv.push(KEYS, ONES).wait()
        before = owned()

        def full(*_):
            raise MemoryError("no memory")

        monkeypatch.setattr(hashed.Shard, "own", full)
        with pytest.raises(rc.RingcommError, match="cannot take it: MemoryError: no memory"):
            move(kv, KEYS[:20], 1)
        monkeypatch.undo()
        assert owned() == before
        kv.push(KEYS, ONES).wait()
        return kv.pull(KEYS).wait().tolist(), len(kv)

    assert run_workers(1, body, 2) == [((2 * ONES).tolist(), N)]


# --- what to move -------------------------------------------------------------------------------
def test_traffic_decides_where_rows_go():
    def body(_):
        kv = ps.hashtable("emb", DIM, updater=ps.optim.Add())
        owners = kv._calls._owners
        many = np.arange(20_000, dtype=np.uint64)
        hot = many[owners[partitions_of(many)] == 0]  # all on server 0
        for _ in range(5):
            kv.push(hot, np.ones((len(hot), DIM), np.float32)).wait()
        done = ps.rebalance().wait()
        assert done.moved > HASH_PARTITIONS // 10
        assert done.load[0] == 1.0
        assert max(done.load_after) < 0.6
        moved_to_1 = owned()[1]
        again = ps.rebalance().wait()  # nothing has been asked since
        assert again.moved == 0
        assert owned()[1] == moved_to_1
        kv.push(hot, np.ones((len(hot), DIM), np.float32)).wait()
        assert max(ps.rebalance().wait().load) < 0.6
        return (kv.pull(hot).wait() == 6).all()

    assert run_workers(1, body, 2) == [True]
