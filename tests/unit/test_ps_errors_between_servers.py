"""What goes wrong between servers is told to who waits for it, or ends the job; nobody hangs."""

import threading

import numpy as np
import pytest
from ps_ranks_as_threads import run_all, run_workers

import ringcomm as rc
from ringcomm import ps
from ringcomm.ps.job import session
from ringcomm.ps.placement.partitions import Move
from ringcomm.ps.placement.rebalance import move_all
from ringcomm.ps.server import catalog as opening
from ringcomm.ps.server.core.migration import Migration
from ringcomm.ps.server.dense.partition import DensePartition
from ringcomm.ps.server.partition_transfer import Transfer
from ringcomm.ps.server.rows.hash_shard import Shard

KEYS, ROWS = np.arange(6), np.ones((6, 2), np.float32)


def owner_of(t):
    [server] = [each["server"] for each in ps.stats() if each["tables"].get(t.name)]
    return server


@pytest.mark.parametrize("broken", [0, 1])
def test_a_table_that_one_server_cannot_make_is_told_and_can_be_made_later(broken, monkeypatch):
    is_short = threading.Event()
    is_short.set()

    def make(spec, start, stop, memory):
        if is_short.is_set() and spec.name == "w" and start == 500 * broken:
            raise MemoryError("no room")
        return DensePartition(spec, start, stop, memory)

    monkeypatch.setattr(opening, "DensePartition", make)

    def body(rank):
        others = ps.table("other", 4, updater=ps.optim.Add())
        who = "server 1" if broken == 0 else "server at rank 2"  # the leader
        with pytest.raises(rc.RingcommError, match=rf"^table\[w\]: .*{who}.*MemoryError: no room"):
            ps.table("w", 1000, updater=ps.optim.Add(), block_nbytes=2000)
        rc.barrier()
        is_short.clear()
        t = ps.table("w", 1000, updater=ps.optim.Add(), block_nbytes=2000)
        t.push(np.ones(1000, np.float32)).wait()
        others.push(np.ones(4, np.float32)).wait()
        rc.barrier()
        return t.pull().wait().sum() + others.pull().wait().sum()

    assert run_workers(2, body, 2) == [2008.0, 2008.0]


def test_a_partition_that_cannot_be_taken_stays_and_who_asked_is_told(monkeypatch):
    def broken(*_):
        raise RuntimeError("no such slot")

    monkeypatch.setattr(Transfer, "_install_dense", broken)

    def body(rank):
        t = ps.table("w", 10, updater=ps.optim.Add())
        before = owner_of(t)
        with pytest.raises(rc.RingcommError, match=r"cannot take it: RuntimeError: no such slot"):
            move_all(session(), [Move((t.number, 0), -1, 1 - before)]).wait()
        t.push(np.ones(10, np.float32)).wait()
        return owner_of(t) == before, t.pull().wait()[0]

    assert run_workers(1, body, 2) == [(True, 1.0)]


@pytest.mark.parametrize(
    "call",
    [
        lambda rows: rows.push(KEYS, ROWS),
        lambda rows: rows.pull(KEYS),
        lambda rows: ps.pull_many([(rows, KEYS), (rows, KEYS[:3])]),
    ],
    ids=["push", "pull", "pull_many"],
)
def test_a_server_without_memory_is_named_and_goes_on(call, monkeypatch):
    is_short = threading.Event()

    def unless_short(real):
        def act(*args, **options):
            if is_short.is_set():
                raise MemoryError("std::bad_alloc")
            return real(*args, **options)

        return act

    for owner, name in ((Shard, "apply"), (Shard, "pull")):
        monkeypatch.setattr(owner, name, unless_short(getattr(owner, name)))

    def body(rank):
        rows = ps.hashtable("rows", 2, updater=ps.optim.Add())
        rows.push(KEYS, ROWS).wait()
        is_short.set()
        named = r"\[rows\]: the server at rank 1 .*no memory for it \(MemoryError: std::bad_alloc"
        with pytest.raises(rc.RingcommError, match=named):
            call(rows).wait()
        is_short.clear()
        rows.push(KEYS, ROWS).wait()
        return rows.pull(KEYS).wait().tolist()

    assert run_workers(1, body, 1) == [[[2.0, 2.0]] * 6]


class WithoutMemory:
    """The rows of a shard, which may take no more memory while `is_short`."""

    def __init__(self, rows, is_short):
        self._rows, self._is_short = rows, is_short

    def __getattr__(self, name):
        return getattr(self._rows, name)

    def __len__(self):
        return len(self._rows)

    def push(self, *args):
        if self._is_short.is_set():
            raise MemoryError("std::bad_alloc")
        return self._rows.push(*args)

    def evict(self, *args):
        if self._is_short.is_set():
            raise MemoryError("std::bad_alloc")
        return self._rows.evict(*args)


@pytest.fixture
def is_short(monkeypatch):
    """Return an event: while it is set, servers have no memory for more rows."""
    event, make = threading.Event(), Shard.__init__

    def making(shard, *args):
        make(shard, *args)
        shard.rows = WithoutMemory(shard.rows, event)

    monkeypatch.setattr(Shard, "__init__", making)
    return event


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_push_for_which_a_server_has_no_memory_says_how_much_it_has(mode, is_short):
    def body(rank):
        rows = ps.hashtable("rows", 2, updater=ps.optim.Add(), mode=mode)
        rows.push(KEYS, ROWS).wait()
        is_short.set()
        named = (
            r"^push\[rows\]: the server at rank 1 .*std::bad_alloc: server 0 has 6 rows of the "
            r"table, in \d+ bytes, and 3 keys came.*has changed nothing there"
        )
        with pytest.raises(rc.RingcommError, match=named):
            rows.push(KEYS[:3], ROWS[:3]).wait()
        is_short.clear()
        rows.push(KEYS, ROWS).wait()
        return rows.pull(KEYS).wait().tolist()

    assert run_workers(1, body, 1) == [[[2.0, 2.0]] * 6]


def test_a_push_after_which_there_is_no_memory_to_evict_was_applied(is_short, monkeypatch):
    monkeypatch.setattr(WithoutMemory, "push", lambda rows, *args: rows._rows.push(*args))

    def body(rank):
        rows = ps.hashtable("rows", 2, updater=ps.optim.Add(), evict=ps.Evict(max_rows=4))
        rows.push(KEYS[:2], ROWS[:2]).wait()
        is_short.set()
        named = r"^push\[rows\]: server 0 has applied it, but has no memory .* of 2 rows to evict"
        with pytest.raises(rc.RingcommError, match=named):
            rows.push(KEYS[:2], ROWS[:2]).wait()
        is_short.clear()
        values = rows.pull(KEYS[:2]).wait().tolist()
        rows.push(KEYS, ROWS).wait()
        return values, ps.stats()[0]["hashtables"]["rows"]["rows"]

    assert run_workers(1, body, 1) == [([[2.0, 2.0]] * 2, 4)]


def test_a_defect_between_servers_ends_the_job(monkeypatch):
    def broken(*_):
        raise KeyError("lost")

    monkeypatch.setattr(Migration, "_taken", broken)

    def body(rank):
        t = ps.table("w", 10, updater=ps.optim.Add())
        move_all(session(), [Move((t.number, 0), -1, 1 - owner_of(t))]).wait()

    results = run_all(1, body, 2)
    assert isinstance(results[0], rc.PeerFailedError)
    told = [str(each) for each in results]
    assert all("with REPLY" in each and "KeyError: 'lost'" in each for each in told), told
