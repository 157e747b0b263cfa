"""Hash tables: the bugs of the classics, and what servers tell of rows."""

import contextlib
import threading

import numpy as np
import pytest
from harness import at_length
from ps_ranks_as_threads import run_workers
from ps_row_model import DIM, Model

import ringcomm as rc
from ringcomm import ps
from ringcomm.ps.placement.partitions import HASH_PARTITIONS
from ringcomm.ps.server.core.unit import Unit

pytestmark = [pytest.mark.usefixtures("wire"), pytest.mark.one_wire]


def test_a_rejected_key_does_not_shift_its_neighbours():
    def body(_):
        kv = ps.hashtable("emb", 4, updater=ps.optim.Add(), admit=ps.Admit(min_count=2))
        even = np.arange(0, 2000, 2)
        kv.push(even, np.zeros((1000, 4), np.float32)).wait()
        keys = np.arange(2000)
        done = kv.push(keys, np.repeat(keys[:, None], 4, 1).astype(np.float32)).wait()
        assert done.rejected == 1000
        return kv.pull(keys, missing="zero").wait()

    expected = np.where(np.arange(2000) % 2 == 0, np.arange(2000), 0)
    for rows in run_workers(1, body, 2):
        np.testing.assert_array_equal(rows, np.repeat(expected[:, None], 4, 1))


def test_small_keys_spread_over_servers():
    def body(_):
        kv = ps.hashtable("emb", 1, updater=ps.optim.Add())
        kv.push(np.arange(3000), np.ones((3000, 1), np.float32)).wait()
        return [each["hashtables"]["emb"]["rows"] for each in ps.stats()]

    (rows,) = run_workers(1, body, 3)
    assert sum(rows) == 3000
    assert min(rows) > 750


@pytest.mark.parametrize("n_servers", [1, 3])
def test_a_key_that_stands_in_a_push_often_loses_no_gradient(n_servers):
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 50, 3000)
    grads = rng.integers(-9, 10, (3000, 2)).astype(np.float32)
    expected = np.zeros((50, 2))
    np.add.at(expected, keys, grads)

    def body(_):
        kv = ps.hashtable("emb", 2, updater=ps.optim.Add())
        kv.push(keys, grads).wait()
        return kv.pull(np.arange(50)).wait().tolist()

    assert run_workers(1, body, n_servers) == [expected.tolist()]


def test_a_lookup_beside_evictions_finds_a_whole_row_or_a_new_one(clock):
    n, n_rounds = 200, at_length(300, 40)
    is_over = threading.Event()

    def body(rank):
        kv = ps.hashtable(
            "emb", 8, updater=ps.optim.Add(), evict=ps.Evict(ttl=1),
            init=ps.initializers.constant(-1.0),
        )  # fmt: skip
        if rank == 0:
            for k in range(n_rounds):
                keys = np.arange(k % 3, n, 3)  # the others' rows are due
                clock["tick"]()
                rows = np.repeat(keys[:, None] + 1.0, 8, 1).astype(np.float32)
                kv.push(keys, rows).wait()
                kv.evict().wait()  # and these begin again in the memory of others
            is_over.set()
            return True
        keys = np.random.default_rng(rank).permutation(n)
        seen = set()
        while not is_over.is_set():
            rows = kv.pull(keys).wait()
            assert (rows == rows[:, :1]).all()  # no row is half another's
            is_new = rows[:, 0] == -1
            assert ((rows[:, 0] == keys) | is_new).all()
            seen |= set(is_new.tolist())
            with contextlib.suppress(KeyError):  # or all five have a row at that moment
                held = kv.pull(keys[:5], missing="raise").wait()
                assert (held[:, 0] == keys[:5]).all()
        return seen == {True, False}

    assert run_workers(3, body, 2) == [True] * 3


def test_who_pushed_what_is_known_of_as_many_ranks_as_there_are():
    def body(rank):
        kv = ps.hashtable("emb", 1, updater=ps.optim.Add())
        pushes = [kv.push([5], np.ones((1, 1), np.float32)) for _ in range(300)]  # beyond 8 bits
        for each in pushes:
            each.wait()
        rc.barrier()
        return kv.pull([5]).wait()[0, 0]

    units, make = [], Unit.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Unit, "__init__", lambda *args, **more: (make(*args, **more), units.append(args[0]))[0]
        )
        assert run_workers(2, body) == [600, 600]
    assert [len(unit.applied.all_last()) for unit in units] == [2]


# --- what is measured ---------------------------------------------------------------------------
@pytest.mark.parametrize("n_servers", [1, 3])
def test_servers_tell_what_became_of_rows(n_servers, clock):
    n, n_steps, ttl, min_count = 90, 30, 6, 3
    rng = np.random.default_rng(3)
    batches = [np.repeat(rng.choice(n, 25, replace=False), 2) for _ in range(n_steps)]
    model = Model(min_count, ttl)
    told = {"admitted": 0, "rejected": 0, "evicted": 0}
    for step, keys in enumerate(batches):
        before = len(model.rows)
        told["rejected"] += model.push(keys.tolist(), np.zeros((50, DIM)), float(step + 1))
        told["admitted"] += len(model.rows) - before
        told["evicted"] += model.evict(float(step + 1))

    def body(_):
        kv = ps.hashtable(
            "emb", DIM, updater=ps.optim.SGD(1.0), admit=ps.Admit(min_count=min_count),
            evict=ps.Evict(ttl=ttl),
        )  # fmt: skip
        rejected = 0
        for keys in batches:
            clock["tick"]()
            rejected += kv.push(keys, np.zeros((50, DIM), np.float32)).wait().rejected
            kv.evict().wait()
        kv.erase([k for k in range(n) if k % 2]).wait()
        assert rejected == told["rejected"]
        return ps.stats()

    [stats] = run_workers(1, body, n_servers)
    told["rows"] = sum(1 for key in model.rows if key % 2 == 0)
    told["pushes"] = n_steps * n_servers
    told["partitions"] = HASH_PARTITIONS
    for name, expected in told.items():
        assert sum(each["hashtables"]["emb"][name] for each in stats) == expected, name
        assert sum(each[name] for each in stats) == expected, name
    for each in stats:
        mine = each["hashtables"]["emb"]
        assert mine["admitted"] - mine["evicted"] >= mine["rows"] > 0
        assert mine["row_nbytes"] > mine["rows"] * DIM * 4
        assert sum(mine["staleness"].values()) == mine["pushes"]
    assert told["evicted"] > 20
    assert told["rejected"] > 100
