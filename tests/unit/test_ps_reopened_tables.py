"""A table that is opened again: the same one, whatever has been learned, on each rank."""

import itertools
import threading

import numpy as np
import pytest
from ps_ranks_as_threads import run_workers

import ringcomm as rc
from ringcomm import ps
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.current_engine import serve_thread
from ringcomm.ps.client.dense.table import Table
from ringcomm.ps.job import session
from ringcomm.ps.placement.partitions import Move
from ringcomm.ps.placement.rebalance import move_all
from ringcomm.ps.table_spec import Spec

pytestmark = [pytest.mark.usefixtures("wire"), pytest.mark.one_wire]
SGD = ps.optim.SGD(1.0)


@pytest.mark.parametrize("init", [0.0, np.zeros(4)], ids=["number", "array"])
def test_a_table_that_is_opened_again_is_the_same_and_keeps_what_it_has_learned(init):
    def body(rank):
        t = ps.table("w", 4, updater=SGD, mode="sync", init=init)
        for _ in range(3):
            t.push(np.full(4, -1, np.float32))
        before = t.pull().wait().tolist()
        rc.barrier()
        again = ps.table("w", 4, updater=SGD, mode="sync", init=init)
        rc.barrier()
        untouched = t.pull().wait().tolist()
        rc.barrier()
        pushes = [each.push(np.full(4, -2.0, np.float32)) for each in (again, t)]
        assert [each.wait().applied for each in pushes] == [True, True]
        return again is t, before, untouched, t.pull().wait().tolist()

    assert run_workers(2, body) == [(True, [3.0] * 4, [3.0] * 4, [7.0] * 4)] * 2


def test_a_hash_table_that_is_opened_again_counts_its_rounds_once():
    def body(rank):
        one = -np.ones((1, 2), np.float32)
        kv = ps.hashtable("emb", 2, updater=SGD, mode="sync")
        for _ in range(3):
            assert kv.push([1], one).wait().applied
        rc.barrier()
        again = ps.hashtable("emb", 2, updater=SGD, mode="sync")
        told = [each.push([1], one).wait().why for each in (again, kv)]
        return told, kv.pull([1]).wait().tolist()

    assert run_workers(2, body) == [(["", ""], [[5.0, 5.0]])] * 2


def test_threads_that_open_a_table_at_once_get_one_object():
    def body(rank):
        opened, both = [], threading.Barrier(2)

        def open_it():
            both.wait(60)
            with serve_thread(current):
                opened.append(ps.table("w", 4, init=np.ones(4)))

        current = engine()
        threads = [threading.Thread(target=open_it) for _ in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(30)
        return opened[0] is opened[1], opened[0].pull().wait().tolist()

    assert run_workers(2, body) == [(True, [1.0] * 4)] * 2


def test_other_options_than_the_first_time_are_refused_with_both():
    def body(rank):
        ps.table("w", 4, updater=SGD)
        ps.hashtable("emb", 2)
        for options, both in (
            ({"mode": "sync"}, "mode=.*'async'.*mode=.*'sync'"),
            ({"shape": 5}, r"shape=.*4.*shape=.*5"),
            ({"updater": ps.optim.SGD(2.0)}, r"updater=.*1\.0.*updater=.*2\.0"),
            ({"init": 3.0}, r"init=0\.0.*init=3\.0"),
        ):
            with pytest.raises(rc.MismatchError, match=r"table\[w\]: .*" + both):
                ps.table("w", **{"shape": 4, "updater": SGD} | options)
        with pytest.raises(rc.MismatchError, match=r"kind='dense'.*kind='hash'"):
            ps.hashtable("w", 4)
        with pytest.raises(rc.MismatchError, match=r"opened it with nan='raise'.*nan='allow' now"):
            ps.hashtable("emb", 2, nan="allow")
        return True

    assert run_workers(1, body) == [True]


def test_what_a_table_begins_with_does_not_undo_what_it_has_learned(monkeypatch):
    """As when the chief's values come again, behind a wait that was given up."""

    def body(rank):
        t = ps.table("w", 4, updater=SGD, init=np.zeros(4))
        t.push(-np.ones(4, np.float32)).wait()
        assert Table.push_initial(t, np.zeros(4, np.float32)).wait().applied
        return t.pull().wait().tolist()

    assert run_workers(1, body) == [[1.0] * 4]


def test_tables_are_placed_by_what_servers_own_now_which_is_not_counted_anew(monkeypatch):
    n_looks, count = itertools.count(), Spec.count.func
    monkeypatch.setattr(Spec, "count", property(lambda spec: (next(n_looks), count(spec))[1]))

    def owners(t):
        return [t.client.owner((t.number, part)) for part in range(t.n_partitions)]

    def body(rank):
        big = ps.table("big", 1000, block_nbytes=2000)
        assert owners(big) == [0, 1]
        move_all(session(), [Move((big.number, 0), 0, 1)]).wait()
        looks, placed = [next(n_looks)], []
        for k in range(60):
            placed += owners(ps.table(f"w{k}", 10))
            looks.append(next(n_looks))
        assert len(set(np.diff(looks))) == 1  # for the last one as often as for the first
        return placed

    assert run_workers(1, body, 2) == [[0] * 60]
