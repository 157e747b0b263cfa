"""Pulls of several hash tables at once do what the pulls of each do one after the other."""

import itertools
import random
import threading

import numpy as np
import pytest
from harness import at_length
from ps_ranks_as_threads import deadline, moving_beside, run_workers

import ringcomm as rc
from ringcomm import ps
from ringcomm.ps import evaluation
from ringcomm.ps.client.rows.row_calls import RowCalls
from ringcomm.ps.placement.partitions import HASH_PARTITIONS, Move
from ringcomm.ps.placement.rebalance import move_all
from ringcomm.ps.protocol.frames import FrameKind
from ringcomm.ps.session import session

pytestmark = pytest.mark.one_wire

N = 400
KEYS = np.arange(N, dtype=np.uint64) * np.uint64(7919)


def open_tables(**options):
    """Open tables that differ in all that a table may."""
    init = ps.initializers.normal(std=0.1, seed=5)
    return [
        ps.hashtable("a", 3, updater=ps.optim.Add(), init=init, **options),
        ps.hashtable("b", 16, updater=ps.optim.Add(), dtype="float64", init=init, **options),
        ps.hashtable("c", 1, updater=ps.optim.Add(), mode="sync", **options),
        ps.hashtable("d", 100, updater=ps.optim.Adam(0.1), mode=ps.SSP(3), init=init, **options),
        ps.hashtable("e", 7, updater=ps.optim.Add(), admit=ps.Admit(min_count=2), **options),
    ]


def train(tables, rank):
    """Push to each table, keys of which some have no row yet."""
    rng, pushed = np.random.default_rng(rank), []
    for kv in tables:
        keys = rng.permutation(N)[: N // 2]
        rows = rng.standard_normal((len(keys), kv.dim)).astype(kv.dtype)
        pushed.append(kv.push(KEYS[keys], rows))
    for future in pushed:
        future.wait()


def some_pulls(tables, seed=0):
    """Return pairs of a table and keys: repeated, without any, and of any shape."""
    rng = np.random.default_rng(seed)
    pulls = [(kv, KEYS[rng.integers(0, N, 150)]) for kv in tables]
    pulls += [(tables[0], []), (tables[1], KEYS.reshape(20, -1)), (tables[0], KEYS[::-1])]
    return [pulls[k] for k in rng.permutation(len(pulls))]


def bits(arrays):
    return [(each.shape, each.dtype.str, each.tobytes()) for each in arrays]


def one_by_one(pulls):
    return [kv.pull(keys).wait() for kv, keys in pulls]


# --- the same as pulls --------------------------------------------------------------------------
@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("n_servers", [1, 2, 3])
@pytest.mark.parametrize("colocated", [False, True])
def test_rows_are_those_of_single_pulls(n_servers, colocated):
    def body(rank):
        tables = open_tables()
        train(tables, rank)
        rc.barrier()
        pulls = some_pulls(tables)
        rows = ps.pull_many(pulls).wait()
        return bits(rows) == bits(one_by_one(pulls))

    n = max(2, n_servers) if colocated else 2
    assert run_workers(n, body, n_servers, colocated=colocated) == [True] * n


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8"])
def test_compressed_rows_are_those_of_single_pulls(codec):
    def body(rank):
        tables = open_tables(pull_compression=codec)
        tables.append(ps.hashtable("plain", 5, updater=ps.optim.Add()))
        train(tables, rank)
        pulls = some_pulls(tables)
        rows, exact = ps.pull_many(pulls).wait(), [kv.pull(k, exact=True).wait() for kv, k in pulls]
        if codec == "int8":  # rounds at random, by the version and the server alone
            limits = [0.02 * np.abs(each).max(initial=0) for each in exact]
            pairs = zip(rows, exact, limits, strict=True)
            return all(np.allclose(x, y, rtol=0, atol=limit) for x, y, limit in pairs)
        assert bits(rows) != bits(exact)
        return bits(rows) == bits(one_by_one(pulls))

    assert run_workers(1, body, 2) == [True]


@pytest.mark.usefixtures("wire")
def test_outs_are_filled_and_returned():
    def body(rank):
        tables = open_tables()
        train(tables, rank)
        pulls = some_pulls(tables)
        outs = [
            None if k % 3 == 0 else np.full((*np.shape(keys), kv.dim), -1, kv.dtype)
            for k, (kv, keys) in enumerate(pulls)
        ]
        rows = ps.pull_many(pulls, outs=outs).wait()
        assert all(out is None or out is each for out, each in zip(outs, rows, strict=True))
        return bits(rows) == bits(one_by_one(pulls))

    assert run_workers(1, body, 2) == [True]


def test_servers_write_to_rows_of_shared_memory():
    def body(_):
        tables = open_tables()[:2]
        train(tables, 0)
        outs = [kv.rows(N) for kv in tables]
        pulls = [(kv, KEYS) for kv in tables]
        rows = ps.pull_many(pulls, outs=outs).wait()
        assert all(out is each for out, each in zip(outs, rows, strict=True))
        return bits(rows) == bits(one_by_one(pulls))

    assert run_workers(1, body, 2) == [True]


def test_nothing_is_pulled_by_an_empty_list_or_without_keys():
    def body(_):
        kv = ps.hashtable("a", 3)
        assert ps.pull_many([]).wait() == []
        rows = ps.pull_many([(kv, []), (kv, np.empty((2, 0), np.uint64))]).wait()
        return [each.shape for each in rows]

    assert run_workers(1, body, 2) == [[(0, 3), (2, 0, 3)]]


def test_a_pull_of_many_tables_has_own_pushes_before_it_and_none_behind_it():
    def body(_):
        a, b = (ps.hashtable(name, 3, updater=ps.optim.Add()) for name in "ab")
        ones = np.ones((N, 3), np.float32)
        seen = []
        for _ in range(20):
            a.push(KEYS, ones)
            b.push(KEYS, ones)
            seen.append(ps.pull_many([(a, KEYS), (b, KEYS)]))
            a.push(KEYS, ones)
            b.push(KEYS, ones)
        return [[set(rows.ravel().tolist()) for rows in each.wait()] for each in seen]

    assert run_workers(1, body, 2) == [[[{k}, {k}] for k in range(1, 41, 2)]]


def test_a_server_gets_one_request_and_sends_one_reply():
    def body(_):
        tables = [ps.hashtable(f"t{k}", 4, updater=ps.optim.Add()) for k in range(26)]
        before = [each["requests"] for each in ps.stats()]
        ps.pull_many([(kv, KEYS) for kv in tables]).wait()
        return [each["requests"] - n - 1 for n, each in zip(before, ps.stats(), strict=True)]

    assert run_workers(1, body, 2) == [[1, 1]]


# --- waits --------------------------------------------------------------------------------------
def test_tables_that_wait_for_a_round_hold_up_no_other():
    may_push = threading.Event()

    def body(rank):
        now, later = (
            ps.hashtable(name, 2, updater=ps.optim.SGD(1.0), mode="sync") for name in "ab"
        )
        ones = np.ones((N, 2), np.float32)
        now.push(KEYS, -ones)
        if rank:
            assert may_push.wait(60)
            later.push(KEYS, -3 * ones)
            return None
        later.push(KEYS, -ones)
        future = ps.pull_many([(now, KEYS), (later, KEYS)])
        assert now.pull(KEYS).wait().min() == 1
        assert not future.done()
        with deadline(0.2), pytest.raises(rc.CommTimeoutError, match=r"pull_many.*server 0"):
            future.wait()
        may_push.set()
        return [rows.min() for rows in future.wait()]

    assert run_workers(2, body, 2)[0] == [1, 2]


# --- moves and ranks that leave -----------------------------------------------------------------
def moving(kv, parts, dest):
    return move_all(session(), [Move((kv.number, part), -1, dest) for part in parts])


def test_rows_that_have_moved_are_fetched_where_they_are():
    def body(_):
        tables = open_tables()
        train(tables, 0)
        pulls = some_pulls(tables)
        expected = bits(one_by_one(pulls))
        for kv in tables[:2]:
            calls = kv._calls
            old, epoch = calls._owners.copy(), calls._order.epoch
            assert moving(kv, range(HASH_PARTITIONS // 3), 1).wait().moved > 0
            kv.pull(KEYS).wait()
            calls._order.epoch, calls._owners = epoch, old  # as if the news were on their way
        n_resent = session().client.n_resent
        assert bits(ps.pull_many(pulls).wait()) == expected
        assert session().client.n_resent == n_resent + 4  # of each table two pulls
        assert all(not kv._calls._calls for kv in tables)
        return bits(ps.pull_many(pulls).wait()) == expected

    assert run_workers(1, body, 3) == [True]


@pytest.mark.long
@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("mode", at_length(["async", "sync"], ["sync"]))  # of which more is asked
def test_reads_its_own_writes_while_rows_move(mode):
    n_steps, n_workers = at_length(200, 40), 3
    ones = np.ones((N, 3), np.float32)

    def body(rank):
        tables = [
            ps.hashtable(name, 3, updater=ps.optim.SGD(1.0), mode=mode) for name in ("a", "b", "c")
        ]
        current, which = session(), iter(range(10**9))

        def next_move(rng):
            kv = tables[next(which) % 3]
            parts = rng.sample(range(HASH_PARTITIONS), 60)
            moves = [Move((kv.number, part), -1, rng.randrange(3)) for part in parts]
            return move_all(current, moves)

        end = moving_beside(next_move) if rank == 0 else None
        for k in range(n_steps):
            for kv in random.Random(k).sample(tables, 3):
                kv.push(KEYS, -ones)
            for rows in ps.pull_many([(kv, KEYS) for kv in (*tables, tables[0])]).wait():
                assert rows.min() >= k + 1
                assert mode == "async" or rows.max() == k + 1
        assert end is None or end() > 3
        rc.barrier()
        return [rows.max() for rows in ps.pull_many([(kv, KEYS) for kv in tables]).wait()]

    total = n_steps * (1 if mode == "sync" else n_workers)
    assert run_workers(n_workers, body, 3) == [[total] * 3] * n_workers


def test_a_worker_that_leaves_ends_the_wait_of_the_others():
    def body(rank):
        tables = [ps.hashtable(name, 2, updater=ps.optim.SGD(1.0), mode="sync") for name in "ab"]
        ones = np.ones((N, 2), np.float32)
        if rank:
            tables[0].push(KEYS, -ones)
            session().leave()
            return [1, 1]
        for kv in tables:
            kv.push(KEYS, -ones)
        return [rows.max() for rows in ps.pull_many([(kv, KEYS) for kv in tables]).wait()]

    assert run_workers(2, body, 2) == [[1, 1], [1, 1]]


def test_no_reply_is_awaited_of_a_worker_that_leaves_at_once():
    def body(rank):
        tables = open_tables()
        train(tables, rank)
        ps.pull_many(some_pulls(tables))  # not waited for
        return True

    assert run_workers(2, body, 2) == [True, True]


# --- snapshots ----------------------------------------------------------------------------------
def test_an_evaluator_sees_the_rows_of_its_snapshot(monkeypatch):
    monkeypatch.setattr(evaluation, "_evaluation", None)
    seen = []

    def opened():
        return [ps.hashtable(name, 2, updater=ps.optim.SGD(1.0), mode="sync") for name in "abc"]

    @ps.evaluator(every=2)
    def evaluate(step):
        pulls = [(kv, KEYS) for kv in opened()]
        rows = ps.pull_many(pulls).wait()
        assert all(each.min() == each.max() for each in rows)  # of all servers the same round
        assert bits(rows) == bits(one_by_one(pulls))
        seen.append((step, min(each.min() for each in rows)))

    def body(_):
        tables = opened()
        for _ in range(8):
            for kv in tables:
                kv.push(KEYS, np.full((N, 2), -1, np.float32))
            ps.pull_many([(kv, KEYS) for kv in tables]).wait()
            ps.complete_step()
        return True

    assert run_workers(2, body, 2, evaluators=1) == [True, True]
    assert seen
    assert all(value >= step for step, value in seen)


def test_a_table_that_a_snapshot_does_not_hold_is_an_error():
    def body(_):
        a = ps.hashtable("a", 2, updater=ps.optim.Add())
        with ps.snapshot():
            b = ps.hashtable("b", 2, updater=ps.optim.Add())
            future = ps.pull_many([(a, KEYS), (b, KEYS)])
            with pytest.raises(KeyError, match=r"pull\[b\]: the snapshot does not hold it"):
                future.wait()
        return ps.pull_many([(a, KEYS), (b, KEYS)]).wait()[1].max()

    assert run_workers(1, body, 2) == [0.0]


# --- errors -------------------------------------------------------------------------------------
def test_what_is_no_pair_of_a_hash_table_and_keys_is_refused():
    def body(_):
        kv, dense = ps.hashtable("a", 2), ps.table("w", 10)
        out = np.empty((3, 3), np.float32)
        for pulls, outs, kind, match in (
            ([(kv, [1]), kv], None, TypeError, r"pulls\[1\] is <HashTable a: .*a pair"),
            ([(dense, [1])], None, TypeError, r"pulls\[0\] has <Table w.*ps.hashtable"),
            ([("a", [1])], None, TypeError, r"pulls\[0\] has 'a'"),
            ([(kv, [1]), (kv, [0.5])], None, TypeError, r"pull\[a\]: key 0.5 is a float"),
            ([(kv, [-1])], None, ValueError, r"pull\[a\]: key -1 is not in"),
            ([(kv, [1])], [], ValueError, "0 outs for 1 pairs"),
            ([(kv, [1])], itertools.repeat(None), ValueError, "more than 1 outs for 1 pairs"),
            (itertools.count(), None, TypeError, r"pulls\[0\] is 0"),
            ([(kv, [1])], [out], ValueError, r"pull\[a\]: out must be"),
        ):
            with pytest.raises(kind, match=match):
                ps.pull_many(pulls, outs=outs)
        assert not kv._calls._calls
        return kv

    [kv] = run_workers(1, body, 1)

    def again(_):
        with pytest.raises(ValueError, match=r"<HashTable a.* was opened before this ps.init"):
            ps.pull_many([(kv, [1])])
        return True

    assert run_workers(1, again, 1) == [True]


def test_nothing_is_left_of_a_call_without_credit(monkeypatch):
    def body(_):
        kv = ps.hashtable("a", 2, updater=ps.optim.Add())
        client = session().client

        def no_credit(*_, **__):
            raise rc.CommTimeoutError("pull_many: no credit", missing=[0])

        with monkeypatch.context() as patched:
            patched.setattr(client, "reserve", no_credit)
            with pytest.raises(rc.CommTimeoutError, match="no credit"):
                ps.pull_many([(kv, KEYS)])
        assert not kv._calls._calls
        assert moving(kv, range(20), 1).wait().moved > 0  # which awaits what is under way
        return ps.pull_many([(kv, KEYS)]).wait()[0].max()

    assert run_workers(1, body, 2) == [0.0]


def test_a_request_that_a_server_cannot_read_is_an_error_of_the_future():
    def body(_):
        kv = ps.hashtable("a", 2, updater=ps.optim.Add())
        client = session().client
        submit = client.submit

        def cut(requests):
            for each in requests:
                if each.kind == FrameKind.PULLS:
                    each.body = each.body[:-8]
            submit(requests)

        client.submit = cut
        future = ps.pull_many([(kv, KEYS)])
        client.submit = submit
        with pytest.raises(ValueError, match=r"bytes came for .* keys"):
            future.wait()
        rows = kv.pull(KEYS).wait()
        assert not kv._calls._calls
        return rows.max()

    assert run_workers(1, body, 2) == [0.0]


def test_outs_that_overlap_are_refused():
    def body(_):
        tables = open_tables()
        [first, *_] = tables
        room = np.empty((15, first.dim), first.dtype)
        pulls = [(first, np.arange(10)), (first, np.arange(10))]
        with pytest.raises(ValueError, match=r"outs\[0\] and outs\[1\] overlap in memory"):
            ps.pull_many(pulls, outs=[room[:10], room[5:]])
        with pytest.raises(ValueError, match=r"outs\[0\] and outs\[1\] overlap in memory"):
            ps.pull_many(pulls, outs=(room[:10] for _ in range(2)))
        return True

    assert run_workers(1, body, 1) == [True]


@pytest.mark.parametrize("place", ["join", "flush"])
def test_an_interrupt_leaves_tables_as_they_were(place, monkeypatch):
    """Before anything is sent, and after all has been."""

    def body(_):
        tables = open_tables()
        pulls = some_pulls(tables)
        expected = bits(one_by_one(pulls))
        owner, method = (RowCalls, "join") if place == "join" else (type(session().client), "flush")
        plain, n_calls = getattr(owner, method), itertools.count()

        def interrupted(self, *args, **options):
            result = plain(self, *args, **options)
            if next(n_calls) == (1 if place == "join" else 0):
                raise KeyboardInterrupt
            return result

        monkeypatch.setattr(owner, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            ps.pull_many(pulls)
        monkeypatch.setattr(owner, method, plain)
        moving(tables[0], range(HASH_PARTITIONS // 3), 1).wait()
        assert bits(ps.pull_many(pulls).wait()) == expected
        return [len(each._calls._calls) for each in tables]

    assert not any(run_workers(1, body, 2)[0])
