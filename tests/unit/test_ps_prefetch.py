"""Rows that are fetched ahead are never older than the mode of their table promises."""

import numpy as np
import pytest
from ps_ranks_as_threads import run_workers

import ringcomm as rc
from ringcomm import ps
from ringcomm.ps.client.rows.pushes import UsedKeys
from ringcomm.ps.client.rows.rows_ahead import prefetch, rows_of
from ringcomm.ps.session import session

N = 200
KEYS = np.arange(N, dtype=np.uint64) * np.uint64(7919)
ONES = np.ones((N, 2), np.float32)
HALF = N // 2


def opened(**options):
    return ps.hashtable("a", 2, **{"updater": ps.optim.Add()} | options)


def ahead_of(kv, keys=KEYS):
    [ahead] = prefetch([(kv, keys)])
    return ahead


def use(kv, ahead, keys=KEYS):
    """Return the rows, and how many pulls that took."""
    before = session().client.timestamp()
    [rows] = rows_of([(kv, keys, ahead)])
    return rows, session().client.timestamp() - before - 1


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("mode", ["async", ps.SSP(0), ps.SSP(2)], ids=str)
def test_rows_that_nobody_pushed_to_are_not_pulled_again(mode):
    def body(_):
        kv = opened(mode=mode)
        kv.push(KEYS, ONES).wait()
        ahead = ahead_of(kv)
        if mode == ps.SSP(0):
            session().tick()
        ahead.future.wait()
        rows, n_asked = use(kv, ahead)
        return rows.tolist(), n_asked <= 1  # the number of a future

    assert run_workers(1, body, 2) == [(ONES.tolist(), True)]


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("mode", ["async", ps.SSP(2)], ids=str)
def test_rows_that_this_worker_has_pushed_to_are_new(mode, assign):
    def body(_):
        kv = opened(mode=mode)
        kv.push(KEYS, ONES).wait()
        ahead = ahead_of(kv)
        ahead.future.wait()
        kv.push(KEYS[:HALF], 5 * ONES[:HALF], assign=assign)
        assert ahead.stale().tolist() == [True] * HALF + [False] * HALF
        return use(kv, ahead)[0][:, 0].tolist()

    assert run_workers(1, body, 2) == [[5.0 if assign else 6.0] * HALF + [1.0] * HALF]


def test_rows_of_a_round_come_once_it_is_over():
    def body(_):
        kv = opened(mode="sync", updater=ps.optim.SGD(1.0))
        ahead, seen = None, []
        for _ in range(6):
            rows, n_asked = use(kv, ahead)
            seen.append((rows.min(), rows.max(), n_asked <= 1))
            ahead = ahead_of(kv)
            kv.push(KEYS, -ONES)
        return seen

    expected = [(0, 0, False), *((k, k, True) for k in range(1, 6))]
    assert run_workers(2, body, 2) == [expected] * 2


@pytest.mark.parametrize("n_pushes", [0, 2])
def test_rows_of_another_round_are_pulled_again(n_pushes):
    def body(_):
        kv = opened(mode="sync", updater=ps.optim.SGD(1.0))
        ahead = ahead_of(kv)
        for _ in range(n_pushes):
            kv.push(KEYS, -ONES)
        assert ahead.stale() is None
        return set(use(kv, ahead)[0].ravel().tolist())

    assert run_workers(2, body, 2) == [{n_pushes}] * 2


def test_values_set_between_rounds_are_seen():
    def body(_):
        kv = opened(mode="sync", updater=ps.optim.SGD(1.0))
        ahead = ahead_of(kv)
        kv.push(KEYS, -ONES).wait()
        ahead.future.wait()
        kv.push(KEYS[:3], 9 * ONES[:3], assign=True)
        return use(kv, ahead)[0][:, 0].tolist()

    assert run_workers(1, body, 2) == [[9.0] * 3 + [1.0] * (N - 3)]


def test_rows_that_lack_steps_beyond_the_bound_are_pulled_again():
    def body(rank):
        kv = opened(mode=ps.SSP(1))
        rc.barrier()
        if rank == 1:
            for _ in range(4):
                kv.push(KEYS, ONES).wait()
                session().tick()
            rc.barrier()
            return None
        ahead = ahead_of(kv)  # after no step
        for _ in range(4):
            session().tick()
        rows, _ = use(kv, ahead)
        rc.barrier()
        return rows.min() >= 3

    assert run_workers(2, body, 2)[0]


def test_rows_are_never_ahead_of_a_round_of_the_first():
    def body(_):
        kv = opened(mode=ps.FirstOf(1), updater=ps.optim.SGD(1.0))
        ahead = ahead_of(kv)
        kv.push(KEYS, -ONES).wait()
        return ahead, use(kv, ahead)[0].max()

    assert run_workers(1, body, 2) == [(None, 1.0)]


@pytest.mark.parametrize("what", ["erase", "evict", "restore"])
def test_rows_are_pulled_again_after_they_may_all_have_changed(what, tmp_path):
    def body(_):
        kv = opened(evict=ps.Evict(ttl=1e9))
        kv.push(KEYS, ONES).wait()
        ps.save(tmp_path).wait()
        kv.push(KEYS, ONES).wait()
        ahead = ahead_of(kv)
        ahead.future.wait()
        {"erase": lambda: kv.erase(KEYS[:3]).wait(), "evict": lambda: kv.evict().wait(),
         "restore": lambda: ps.restore(tmp_path)}[what]()  # fmt: skip
        rows = use(kv, ahead)[0]
        assert np.array_equal(rows, kv.pull(KEYS).wait())
        return ahead.stale() is None

    assert run_workers(1, body, 1) == [True]


def test_rows_of_now_are_not_those_of_a_snapshot():
    def body(_):
        kv = opened()
        kv.push(KEYS, ONES).wait()
        ahead = ahead_of(kv)
        with ps.snapshot():
            assert ahead.stale() is None
            of_snapshot = ahead_of(kv)
            assert use(kv, of_snapshot)[0].max() == 1
        assert of_snapshot.stale() is None
        return use(kv, ahead)[0].max()

    assert run_workers(1, body, 2) == [1.0]


def test_a_worker_leaves_though_rows_of_a_round_that_never_ends_are_awaited():
    def body(_):
        kv = opened(mode="sync", updater=ps.optim.SGD(1.0))
        ahead_of(kv)
        return True

    assert run_workers(2, body, 2) == [True] * 2


def test_some_rows_are_here_and_others_are_pulled_together():
    def body(_):
        tables = [ps.hashtable(name, 2, updater=ps.optim.Add()) for name in "abc"]
        for kv in tables:
            kv.push(KEYS, ONES).wait()
        a, b = prefetch([(tables[0], KEYS), (tables[1], KEYS[:5])])
        tables[0].push(KEYS[:1], ONES[:1])
        rows = rows_of(
            [(tables[0], KEYS, a), (tables[2], KEYS[:3], None), (tables[1], KEYS[:5], b)]
        )
        return [each.sum() for each in rows]

    assert run_workers(1, body, 2) == [[2 * N + 2, 6, 10]]


def test_keys_that_the_caller_changes_after_a_push_were_still_pushed_to():
    def body(_):
        kv = opened()
        ahead = ahead_of(kv)
        keys = KEYS[:HALF].copy()
        kv.push(keys, ONES[:HALF]).wait()
        keys[:] = 1
        return use(kv, ahead)[0].tolist()

    assert run_workers(1, body, 2) == [[[1.0, 1.0]] * HALF + [[0.0, 0.0]] * HALF]


def test_rows_are_never_older_than_those_that_were_pulled_before():
    def body(rank):
        kv = opened()
        if rank == 0:
            ahead = ahead_of(kv)
            ahead.future.wait()
        rc.barrier()
        if rank == 1:
            kv.push(KEYS, ONES).wait()
        rc.barrier()
        if rank == 1:
            return True
        seen = kv.pull(KEYS[:HALF]).wait()
        return bool((use(kv, ahead)[0][:HALF] >= seen).all())

    assert run_workers(2, body, 2) == [True, True]


def test_what_is_kept_of_used_keys_is_bounded():
    used = UsedKeys(100)
    used.add(KEYS[:60])
    assert used.among(KEYS).tolist() == [True] * 60 + [False] * (N - 60)
    used.add(KEYS[:41])
    assert used.among(KEYS) is None  # perhaps all
    assert used._keys is None
