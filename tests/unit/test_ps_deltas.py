"""What has changed since: no more than that where nothing moved, and never less."""

import random
import sys
import threading
from functools import partial

import numpy as np
import pytest
from ps_jobs import run_workers
from samples import whole_numbers

import ringcomm as rc
from ringcomm import ps
from ringcomm.ps import changes, functions, hashed
from ringcomm.ps.job import session
from ringcomm.ps.placement import Move
from ringcomm.ps.rebalancing import move_all
from ringcomm.ps.rows import row_spec

COUNT, BLOCK = 6000, 4000  # bytes of a block: 6 blocks of 1000 float32


def table(**options):
    options.setdefault("updater", ps.optim.Add())
    return ps.table("w", COUNT, block_nbytes=BLOCK, **options)


def push(t, part, x=1.0):
    return t.push(np.full(1000, x, np.float32), where=slice(part * 1000, part * 1000 + 1000))


def starts(delta):
    return [where.start // 1000 for where, _ in delta.blocks]


# --- blocks -------------------------------------------------------------------------------------
@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("n_servers", [1, 3])
def test_blocks_come_that_have_changed_and_no_others(n_servers):
    def body(rank):
        t = table()
        first = t.pull(since=0).wait()
        assert starts(first) == list(range(6))
        for part in (1, 4, 4):
            push(t, part)
        second = t.pull(since=first.stamp).wait()
        assert [(where, values[0]) for where, values in second.blocks] == [
            (slice(1000, 2000), 1.0),
            (slice(4000, 5000), 2.0),
        ]
        third = t.pull(since=second.stamp).wait()
        assert (third.blocks, third.stamp) == ([], second.stamp)
        assert starts(t.pull(since=first.stamp).wait()) == [1, 4]
        return True

    assert run_workers(1, body, n_servers) == [True]


def test_what_has_not_changed_is_left_alone_in_out():
    def body(rank):
        t = table()
        stamp = t.pull(since=0).wait().stamp
        push(t, 2, 5.0)
        out = np.full(COUNT, 9.0, np.float32)
        [(where, values)] = t.pull(since=stamp, out=out).wait().blocks
        assert values.base is not None
        assert np.shares_memory(values, out)
        expected = np.full(COUNT, 9.0)
        expected[where] = 5
        return (out == expected).all()

    assert run_workers(1, body) == [True]


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("seed", range(3))
def test_deltas_follow_whatever_happens_to_a_table(seed, monkeypatch):
    monkeypatch.setattr(functions, "_registered", {})

    @ps.function
    def halve(values):
        values /= 2

    def body(rank):
        rng = random.Random(seed)
        t, mirror, stamp, n_blocks = table(), np.full(COUNT, -1.0, np.float32), 0, 0
        for _ in range(60):
            for _ in range(rng.randrange(3)):
                action, part = rng.randrange(4), rng.randrange(6)
                if action == 0:
                    push(t, part, whole_numbers(part, 1000, turn=rng.randrange(9)))
                elif action == 1:
                    where = slice(part * 1000 + 3, part * 1000 + 7)
                    t.push(np.ones(4, np.float32), where=where, assign=True)
                elif action == 2:
                    move_all(session(), [Move((t.number, part), -1, rng.randrange(2))]).wait()
                else:
                    t.call("halve")
            delta = t.pull(since=stamp, out=mirror).wait()
            stamp, n_blocks = delta.stamp, n_blocks + len(delta.blocks)
            assert (mirror == t.pull().wait()).all()
        return n_blocks < 60 * 6

    assert run_workers(1, body, 2) == [True]


@pytest.mark.usefixtures("wire")
def test_deltas_are_whole_while_others_push():
    is_over = threading.Event()

    def body(rank):
        t = table()
        if rank == 0:
            k = 0
            while not is_over.is_set():
                k += 1
                push(t, k % 6).wait()
        else:
            mirror, stamp = np.full(COUNT, -1.0, np.float32), 0
            while mirror.min() < 20:
                before = mirror.copy()
                stamp = t.pull(since=stamp, out=mirror).wait().stamp
                assert (mirror.reshape(6, -1) == mirror[::1000, None]).all()
                assert (mirror >= before).all()
            is_over.set()
        rc.barrier()
        if rank:
            t.pull(since=stamp, out=mirror).wait()
            assert (mirror == t.pull().wait()).all()
        return True

    assert run_workers(2, body, 2) == [True, True]


def test_a_delta_has_the_round_of_the_last_own_push():
    def body(rank):
        t = table(mode="sync", updater=ps.optim.SGD(1.0))
        stamp = t.pull(since=0).wait().stamp
        for k in range(5):
            t.push(np.full(COUNT, -1.0 - rank, np.float32))
            delta = t.pull(since=stamp).wait()
            stamp = delta.stamp
            assert starts(delta) == list(range(6))
            assert {values[0] for _, values in delta.blocks} == {1.5 * (k + 1)}
        return True

    assert run_workers(2, body, 2) == [True, True]


def test_a_stamp_of_another_life_is_worth_nothing(tmp_path):
    def first(rank):
        t = table()
        push(t, 3).wait()
        ps.save(tmp_path).wait()
        return t.pull(since=0).wait().stamp

    [stamp] = run_workers(1, first, 2)

    def again(rank):
        t = table()
        before = t.pull(since=0).wait().stamp
        ps.restore(tmp_path)
        assert starts(t.pull(since=before).wait()) == list(range(6))
        delta = t.pull(since=stamp).wait()
        assert starts(delta) == list(range(6))
        assert delta.blocks[3][1][0] == 1
        return t.pull(since=delta.stamp).wait().blocks

    assert run_workers(1, again, 2) == [[]]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda t, s: t.pull(since="x"), TypeError, "since is 'x'; it must be 0, or the stamp"),
        (lambda t, s: t.pull(since=3), TypeError, "since is 3"),
        (lambda t, s: t.pull(since=s, where=slice(0, 4)), ValueError, "without where="),
        (lambda t, s: ps.table("x", 4).pull(since=s), ValueError, "a stamp of table 'w'"),
        (lambda t, s: t.pull(since=s, out=np.ones(3)), ValueError, "out must be contiguous"),
        (lambda t, s: ps.hashtable("e", 2).changed(since=s), ValueError, "a stamp of table 'w'"),
    ],
)
def test_a_mistake_is_told(call, error, message):
    def body(rank):
        t = table()
        stamp = t.pull(since=0).wait().stamp
        with pytest.raises(error, match=message):
            call(t, stamp)
        with ps.snapshot(), pytest.raises(ValueError, match="not within"):
            t.pull(since=stamp)
        return True

    assert run_workers(1, body) == [True]


# --- rows ---------------------------------------------------------------------------------------
KEYS = np.arange(1, 400, dtype=np.uint64) * 7919


def rows_of(kv):
    """Return all rows by key."""
    there = KEYS[kv.metadata(KEYS).wait().pushes > 0]
    return dict(zip(there.tolist(), kv.pull(there, missing="raise").wait(), strict=True))


def require_equal(known, kv):
    now = rows_of(kv)
    assert known.keys() == now.keys()
    for key, row in now.items():
        np.testing.assert_array_equal(known[key], row)


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("page_nbytes", [24, 1 << 20])  # of 3 rows, or all
@pytest.mark.parametrize("max_tombstones", [1, 1000])
def test_rows_follow_whatever_happens_to_a_table(
    page_nbytes, max_tombstones, monkeypatch, tmp_path
):
    monkeypatch.setattr(changes, "PAGE_NBYTES", page_nbytes)
    monkeypatch.setattr(hashed, "row_spec", partial(row_spec, max_tombstones=max_tombstones))
    hashtable = sys.modules["ringcomm.ps.hashtable"]  # the name is its function's
    monkeypatch.setattr(hashtable, "HASH_PARTITIONS", 16)

    def body(rank):
        rng = np.random.default_rng(0)
        kv = ps.hashtable("e", 2, updater=ps.optim.SGD(1.0))
        known, stamp, n_rows = {}, 0, 0
        for step in range(25):
            action = rng.integers(5)
            some = rng.choice(KEYS, rng.integers(1, 30))
            if step == 5:
                ps.save(tmp_path).wait()
            elif step in (12, 20):
                ps.restore(tmp_path)
            elif action == 0:
                kv.erase(some)
            else:
                kv.push(some, rng.integers(9, size=(len(some), 2)).astype(np.float32))
            if step % 3:
                delta = kv.changed(since=stamp).wait()
                delta.update(known)
                stamp, n_rows = delta.stamp, n_rows + len(delta.keys)
                require_equal(known, kv)
        return n_rows

    [n_rows] = run_workers(1, body, 2)
    assert n_rows < 25 * len(KEYS) / 2


def test_rows_come_that_have_changed_and_no_others():
    def body(rank):
        kv = ps.hashtable("e", 2, updater=ps.optim.SGD(1.0))
        ones = np.ones((len(KEYS), 2), np.float32)
        kv.push(KEYS, ones)
        first = kv.changed().wait()
        assert sorted(first.keys.tolist()) == KEYS.tolist()
        assert len(first.renewed) == first.n_partitions
        kv.push(KEYS[:3], ones[:3])
        kv.erase(KEYS[5:7])
        second = kv.changed(since=first.stamp).wait()
        assert sorted(second.keys.tolist()) == KEYS[:3].tolist()
        assert (second.rows == -2).all()
        assert sorted(second.erased.tolist()) == KEYS[5:7].tolist()
        assert len(second.renewed) == 0
        third = kv.changed(since=second.stamp).wait()
        return len(third.keys) + len(third.erased)

    assert run_workers(1, body, 3) == [0]


def test_a_stamp_of_another_job_is_worth_nothing_for_rows():
    def body(rank):
        kv = ps.hashtable("e", 2)
        kv.push(KEYS, np.ones((len(KEYS), 2), np.float32))
        delta = kv.changed(since=stamps.pop() if stamps else 0).wait()
        stamps.append(delta.stamp)
        return len(delta.keys)

    stamps = []
    assert run_workers(1, body) == [len(KEYS)]
    assert run_workers(1, body) == [len(KEYS)]


@pytest.mark.usefixtures("wire")
def test_rows_are_whole_while_others_push():
    is_over = threading.Event()

    def body(rank):
        kv = ps.hashtable("e", 8, updater=ps.optim.Add())
        if rank == 0:
            while not is_over.is_set():
                kv.push(KEYS, np.ones((len(KEYS), 8), np.float32)).wait()
        else:
            known, stamp = {}, 0
            while not known or min(row[0] for row in known.values()) < 10:
                delta = kv.changed(since=stamp).wait()
                assert (delta.rows == delta.rows[:, :1]).all()
                delta.update(known)
                stamp = delta.stamp
            is_over.set()
        rc.barrier()
        if rank:
            kv.changed(since=stamp).wait().update(known)
            require_equal(known, kv)
        return True

    assert run_workers(2, body, 2) == [True, True]
