"""Hash tables: rows by key, on any number of servers and workers, against a plain dict."""

import itertools
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from harness import DEADLINE_S, at_length
from ps_ranks_as_threads import run_all, run_workers
from ps_row_model import DIM, Model

import ringcomm as rc
from ringcomm import _core, ps
from ringcomm.config import Settings
from ringcomm.ps.job import session
from ringcomm.ps.server.clock import OwnClock
from ringcomm.ps.server.rows import hash_shard as hashed

pytestmark = [pytest.mark.usefixtures("wire"), pytest.mark.one_wire]

BIG = 1 << 63
ONE = np.ones((1, 4), np.float32)


def act(kv, model, rng, clock):
    """Do one random thing to a table and its model, and compare."""
    n = int(rng.integers(0, 40))
    universe = np.array([*range(30), BIG, BIG + 1, 2**64 - 1], np.uint64)
    keys = rng.choice(universe, n)
    plain = [int(key) for key in keys]
    what = rng.choice(
        ["push", "pull", "erase", "evict", "metadata"], p=[0.5, 0.3, 0.08, 0.04, 0.08]
    )
    if what == "push":
        clock["tick"]()
        grads = rng.integers(-3, 4, (n, DIM)).astype(np.float32)
        done = kv.push(keys, grads).wait()
        assert done.rejected == model.push(plain, grads, clock["now"])
    elif what == "pull":
        missing = str(rng.choice(["init", "zero"]))
        np.testing.assert_array_equal(
            kv.pull(keys, missing=missing).wait(), model.pull(plain, missing)
        )
    elif what == "erase":
        few = keys[:5]
        assert kv.erase(few).wait() == model.erase([int(key) for key in few])
    elif what == "evict":
        assert kv.evict().wait() == model.evict(clock["now"])
    else:
        told = kv.metadata(keys).wait()
        assert told.pushes.tolist() == [model.pushes.get(key, 0) for key in plain]
        np.testing.assert_array_equal(told.time, [model.times.get(key, np.nan) for key in plain])
        assert len(kv) == len(model.rows)


@pytest.mark.parametrize("n_servers", at_length([1, 2, 3], [1, 3]))
@pytest.mark.parametrize("n_workers", [1, 3])
@pytest.mark.parametrize("min_count", [1, 3])
def test_any_sequence_of_calls_does_what_a_dict_does(n_servers, n_workers, min_count, clock):
    rng = np.random.default_rng([n_servers, n_workers, min_count])
    model = Model(min_count, ttl=12)
    n_steps = at_length(2000, 60)
    actors = rng.integers(0, n_workers, n_steps)

    def body(rank):
        kv = ps.hashtable(
            "emb", DIM, updater=ps.optim.SGD(1.0), init=ps.initializers.constant(5.0),
            admit=ps.Admit(min_count=min_count), evict=ps.Evict(ttl=12),
        )  # fmt: skip
        for actor in actors:
            if rank == actor:
                act(kv, model, rng, clock)
            rc.barrier()
        return True

    assert run_workers(n_workers, body, n_servers) == [True] * n_workers


# --- rounds -------------------------------------------------------------------------------------
def batches(n_steps, n_workers, dim, seed=0):
    rng = np.random.default_rng(seed)

    def batch():
        n = int(rng.integers(0, 30))
        return rng.integers(0, 50, n), rng.standard_normal((n, dim)).astype(np.float32)

    return [[batch() for _ in range(n_workers)] for _ in range(n_steps)]


@pytest.mark.parametrize("n_servers", [1, 3])
def test_a_round_is_one_update_with_the_weighted_mean(n_servers):
    steps = batches(12, 3, 5)

    def body(rank):
        kv = ps.hashtable("emb", 5, updater=ps.optim.SGD(0.5), mode="sync")
        for step in steps:
            keys, grads = step[rank]
            kv.push(keys, grads, weight=rank + 1)
            rows = kv.pull(np.arange(50)).wait()
        return rows

    expected = np.zeros((50, 5))
    for step in steps:
        for rank, (keys, grads) in enumerate(step):
            np.subtract.at(expected, keys, 0.5 * (rank + 1) / 6 * grads.astype(np.float64))
    for rows in run_workers(3, body, n_servers):
        np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("updater", [ps.optim.Adam(0.01), ps.optim.RowwiseAdagrad(0.1)])
def test_rounds_have_the_same_bits_on_any_number_of_servers(updater):
    steps = batches(10, 3, 7, seed=1)

    def body(rank):
        kv = ps.hashtable(
            "emb", 7, updater=updater, mode="sync", init=ps.initializers.normal(seed=7),
            admit=ps.Admit(min_count=2),
        )  # fmt: skip
        for number, step in enumerate(steps):
            kv.updater = updater.with_(lr=0.1 / (1 + number))
            keys, grads = step[rank]
            kv.push(keys, grads, weight=rank + 1)
        return kv.pull(np.arange(60)).wait().tobytes()

    bits = {each for n in (1, 2, 3) for each in run_workers(3, body, n)}
    assert len(bits) == 1


def test_who_is_admitted_by_chance_to_rounds_does_not_depend_on_servers():
    """Nor on what servers do besides: one of them has erased a row."""
    keys = np.arange(200)

    def body(rank):
        admit = ps.Admit(probability=0.3)
        kv = ps.hashtable("emb", 1, updater=ps.optim.Add(), mode="sync", admit=admit)
        for number in range(4):
            kv.push(keys, np.ones((200, 1), np.float32)).wait()
            if number == 1 and rank == 0:
                kv.erase([7]).wait()
            rc.barrier()
        return kv.pull(keys).wait().tobytes()

    bits = {each for n in (1, 2, 3) for each in run_workers(2, body, n)}
    assert len(bits) == 1


def test_a_worker_with_no_keys_takes_part_in_a_round():
    def body(rank):
        kv = ps.hashtable("emb", 2, updater=ps.optim.SGD(1.0), mode="sync")
        keys = [1, 2] if rank == 0 else []
        done = kv.push(keys, np.ones((len(keys), 2), np.float32)).wait()
        return done.applied, kv.pull([1, 2]).wait().tolist()

    assert run_workers(2, body, 2) == [(True, [[-0.5, -0.5]] * 2)] * 2


def test_the_first_k_make_a_round_and_who_is_late_is_told():
    came = threading.Event()

    def body(rank):
        kv = ps.hashtable("emb", 2, updater=ps.optim.SGD(1.0), mode=ps.FirstOf(2))
        rc.barrier()
        if rank == 2:
            assert came.wait(60)
        done = kv.push([4], np.full((1, 2), rank + 1.0, np.float32)).wait()
        came.set()
        return done.applied, done.why, kv.pull([4]).wait()[0, 0]

    assert run_workers(3, body) == [(True, "", -1.5), (True, "", -1.5), (False, "late", -1.5)]


def test_a_worker_that_has_left_is_not_waited_for():
    def body(rank):
        kv = ps.hashtable("emb", 2, updater=ps.optim.SGD(1.0), mode="sync")
        for _ in range(2 + 3 * rank):
            kv.push([1], np.ones((1, 2), np.float32)).wait()
        rows = kv.pull([1]).wait()
        session().leave()
        return rows[0, 0]

    assert run_workers(2, body)[1] == -5


def test_a_pull_under_ssp_has_what_all_pushed_so_many_steps_before():
    def body(rank):
        kv = ps.hashtable("emb", 1, updater=ps.optim.SGD(1.0), mode=ps.SSP(1))
        seen = []
        for step in range(20):
            seen.append(-kv.pull([9]).wait()[0, 0] - 2 * max(0, step - 1))
            kv.push([9], np.ones((1, 1), np.float32))
            session().tick()
        return min(seen), max(seen)

    for least, most in run_workers(2, body):
        assert least >= 0
        assert most <= 4


# --- what is pushed -----------------------------------------------------------------------------
@pytest.mark.parametrize("n_servers", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 7, 500, 20_000])
def test_what_is_pushed_is_pulled(count, n_servers):
    def body(_):
        kv = ps.hashtable("emb", 5, updater=ps.optim.Add())
        keys = np.random.default_rng(0).permutation(count).astype(np.uint64) * np.uint64(
            7919
        ) + np.uint64(BIG)
        rows = np.random.default_rng(1).standard_normal((count, 5)).astype(np.float32)
        kv.push(keys, rows)
        out = np.empty((count, 5), np.float32)
        assert kv.pull(keys, out=out).wait() is out
        np.testing.assert_array_equal(out, rows)
        np.testing.assert_array_equal(kv.pull(keys[::-1]).wait(), rows[::-1])
        return len(kv)

    assert run_workers(1, body, n_servers) == [count]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_of_16_bits_are_summed_wide(dtype):
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16

    def body(_):
        kv = ps.hashtable("emb", 2, updater=ps.optim.Add())
        keys = np.repeat(np.arange(10), 300)
        kv.push(keys, np.ones((3000, 2), kind)).wait()
        with pytest.raises(ValueError, match="NaN or inf"):
            kv.push([1], np.full((1, 2), np.inf, kind))
        return kv.pull(np.arange(10)).wait()

    for rows in run_workers(1, body, 2):
        assert (rows == 300).all()


def test_a_pull_makes_no_rows_and_tells_what_they_will_begin_with():
    def body(_):
        init = ps.initializers.uniform(-1, 1, seed=3)
        kv = ps.hashtable("emb", 4, updater=ps.optim.Add(), init=init)
        before = kv.pull([[1, 2], [3, 4]]).wait()
        assert (before.shape, len(kv)) == ((2, 2, 4), 0)
        kv.push([1, 2, 3, 4], np.zeros((4, 4), np.float32)).wait()
        np.testing.assert_array_equal(kv.pull([1, 2, 3, 4]).wait(), before.reshape(4, 4))
        return np.unique(before).size

    assert run_workers(1, body, 2) == [16]


@pytest.mark.parametrize("n_servers", [1, 2])
def test_assign_replaces_rows_and_the_last_of_a_key_counts(n_servers):
    def body(_):
        kv = ps.hashtable("emb", 2, updater=ps.optim.SGD(1.0), mode="sync")
        rows = np.arange(8, dtype=np.float32).reshape(4, 2)
        kv.push([5, 6, 5, 7], rows, assign=True).wait()
        return kv.pull([5, 6, 7]).wait().tolist()

    assert run_workers(1, body, n_servers) == [[[4, 5], [2, 3], [6, 7]]]


@pytest.mark.parametrize(("max_rows", "n_keys"), [(1, 3), (30, 30), (100, 50), (1000, 1000)])
def test_a_small_cap_is_exact_on_any_number_of_servers(max_rows, n_keys):
    def body(rank):
        evict = ps.Evict(max_rows=max_rows)
        kv = ps.hashtable("t", 1, updater=ps.optim.Add(), evict=evict)
        rng = np.random.default_rng(0)
        keys = rng.choice(10**12, n_keys, replace=False)
        for _ in range(3):
            for some in np.array_split(rng.permutation(keys), 5):
                kv.push(some, np.ones((len(some), 1), np.float32)).wait()
                assert len(kv) <= max_rows
        assert len(kv) == min(max_rows, n_keys)
        if n_keys <= max_rows:
            assert (kv.pull(keys).wait() == 3).all()
            assert ps.rebalance().wait().moved == 0

    run_workers(1, body, 3)


def test_a_large_cap_is_shared_by_servers_and_holds_to_within_one_percent():
    def body(rank):
        most = 500_000
        kv = ps.hashtable("t", 1, updater=ps.optim.Add(), evict=ps.Evict(max_rows=most))
        keys = np.random.default_rng(0).choice(2**62, int(0.99 * most), replace=False)
        for some in np.array_split(keys, 10):
            kv.push(some, np.ones((len(some), 1), np.float32)).wait()
        assert len(kv) == len(keys)
        assert all(each["hashtables"]["t"]["rows"] for each in ps.stats())
        more = np.arange(20_000)
        kv.push(more, np.ones((len(more), 1), np.float32)).wait()
        assert 0.99 * most <= len(kv) <= most
        assert (kv.pull(more).wait() == 1).all()

    run_workers(1, body, 3)


def test_rows_are_evicted_by_pushes_to_others(monkeypatch):
    seconds = itertools.count()
    monkeypatch.setattr(OwnClock, "time", lambda _: float(next(seconds)))

    def body(_):
        kv = ps.hashtable("emb", 2, updater=ps.optim.Add(), evict=ps.Evict(ttl=5))
        kv.push(np.arange(100), np.ones((100, 2), np.float32)).wait()
        for _ in range(8):
            kv.push([1000], np.ones((1, 2), np.float32)).wait()
        assert ps.stats()[0]["hashtables"]["emb"]["evicted"] == 100
        return len(kv)

    assert run_workers(1, body) == [1]


@pytest.mark.parametrize("replication", [1, 2])
def test_a_clock_that_is_set_ages_no_row(monkeypatch, replication):
    """Somebody, or a daemon, sets the machine's clock while servers run: an hour on, and back."""
    real, ahead_s = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + ahead_s[0])

    def body(_):
        kv = ps.hashtable("emb", 2, updater=ps.optim.Add(), evict=ps.Evict(ttl="10m"))
        kv.push(np.arange(100), np.ones((100, 2), np.float32)).wait()
        for ahead_s[0] in (3600.0, -3600.0, 3600.0):
            for _ in range(8):
                kv.push([1000], np.ones((1, 2), np.float32)).wait()
        return len(kv)

    settings = Settings(timeout_s=DEADLINE_S, elastic=1)
    results = run_all(1, body, 2, settings=settings, replication=replication)
    assert results[0] == 101


def test_a_push_that_comes_twice_is_applied_once():
    def body(_):
        kv = ps.hashtable("emb", 2, updater=ps.optim.Add())
        client = session().client
        ask, twice = client.link.ask, []

        def ask_twice(dest, header, meta, body):
            ask(dest, header, meta, body)
            if meta:
                twice.append(header)
                ask(dest, header, meta, body)

        client.link.ask = ask_twice
        for _ in range(3):
            kv.push([1], np.ones((1, 2), np.float32)).wait()
        client.link.ask = ask
        assert len(twice) == 3
        return kv.pull([1]).wait().tolist(), int(kv.metadata(1).wait().pushes)

    assert run_workers(1, body) == [([[3, 3]], 3)]


# --- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys",
    [
        [(1 << 64) - 1, 3],
        (0, (1 << 64) - 6),
        np.array([5, 7], np.int64),
        np.array([[127, 7]], np.int8),
        np.array([(1 << 64) - 5], np.uint64),
        np.array([-5, 7], np.int64).view(np.uint64),
        7,
        [],
    ],
    ids=str,
)
def test_keys_are_any_integers_of_64_bits(keys):
    patterns = [int(key) for key in np.ravel(np.asarray(keys, object))]

    def body(rank):
        kv = ps.hashtable("kv", 2, updater=ps.optim.Add())
        shape = np.asarray(keys, object).shape
        kv.push(keys, np.ones((*shape, 2), np.float32)).wait()
        again = kv.pull(np.array(patterns, np.uint64)).wait()
        return len(kv), again.tolist(), kv.pull(keys).wait().shape

    ((n, rows, shape),) = run_workers(1, body)
    assert n == len({*patterns})
    assert rows == [[1.0, 1.0]] * len(patterns)
    assert shape == (*np.asarray(keys, object).shape, 2)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda kv: kv.push([1, 2], ONE), ValueError, r"shape \(1, 4\), and the keys \(2,\)"),
        (lambda kv: kv.push([1], ONE[:, :3]), ValueError, r"must be \(1, 4\)"),
        (lambda kv: kv.push([1], ONE.astype(np.float64)), TypeError, "dtype float64, and"),
        (lambda kv: kv.push(np.array([-1]), ONE), ValueError, r"key -1 is .* as keys.view\(np.ui"),
        (lambda kv: kv.push([-1], ONE), ValueError, r"as np.array\(keys, np.int64\).view\(np.uint"),
        (lambda kv: kv.push([-1, 2**64 - 1], np.ones((2, 4), np.float32)), ValueError, "key -1 is"),
        (lambda kv: kv.push([1 << 64], ONE), ValueError, "key 18446744073709551616 is not in"),
        (lambda kv: kv.push([1.0], ONE), TypeError, "key 1.0 is a float, not an integer"),
        (lambda kv: kv.push(np.ones(1), ONE), TypeError, "keys are float64; they must be integers"),
        (lambda kv: kv.push([True], ONE), TypeError, "key True is a bool, not an integer"),
        (lambda kv: kv.push([1], ONE * np.nan), ValueError, r"push\[emb\]: NaN or inf"),
        (lambda kv: kv.push([1], ONE * np.inf), ValueError, r"push\[emb\]: NaN or inf"),
        (lambda kv: kv.push([1], ONE, weight=0), ValueError, "weight is 0"),
        (lambda kv: kv.pull([77], missing="raise").wait(), KeyError, "key 77 has no row"),
        (lambda kv: kv.pull([1], missing="none"), ValueError, "missing is 'none'"),
        (lambda kv: kv.pull([1], out=np.empty(4, np.float32)), ValueError, "out must be cont"),
        (lambda kv: setattr(kv, "updater", ps.optim.Adam()), ValueError, "it was made for Add"),
        (lambda _: ps.hashtable("emb", 5), rc.MismatchError, "it has shape="),
        (lambda _: ps.hashtable("x", 0), ValueError, "dim is 0"),
        (lambda _: ps.hashtable("x", 4, dtype="int64"), ValueError, "dtype is int64"),
        (lambda _: ps.hashtable("x", 4, nan="drop"), ValueError, "nan is 'drop'"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_to_who_made_it_and_changes_nothing(call, error, message):
    def body(rank):
        kv = ps.hashtable("emb", 4, updater=ps.optim.Add())
        if rank == 0:
            with pytest.raises(error, match=message):
                call(kv)
        rc.barrier()
        kv.push([1], ONE).wait()
        rc.barrier()
        return kv.pull([1]).wait().tolist(), len(kv)

    assert run_workers(2, body, 2) == [([[2.0] * 4], 1)] * 2


def test_nan_goes_through_where_it_is_allowed():
    def body(_):
        kv = ps.hashtable("emb", 4, updater=ps.optim.Add(), nan="allow")
        kv.push([1], ONE * np.nan).wait()
        return bool(np.isnan(kv.pull([1]).wait()).all())

    assert run_workers(1, body) == [True]


def test_a_shard_refuses_keys_of_others_and_changes_nothing():
    spec = hashed.row_spec(2, ps.optim.Add())
    owners = np.arange(16, dtype=np.uint32) % 2
    shard = _core.Shard(spec, owners, 0)
    keys = np.arange(100, dtype=np.uint64)
    grads = np.ones((100, 2), np.float32)
    with pytest.raises(ValueError, match="which another server owns"):
        shard.push([(keys, grads, 1.0, None)], 1, np.empty(0), 1.0, 0.0, 1, 1)
    assert len(shard) == 0
