"""Several threads of one rank wait for servers: each has its own deadline, whoever drives."""

import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from ps_ranks_as_threads import run_workers

import ringcomm as rc
from ringcomm import ps
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.current_engine import serve_thread
from ringcomm.ps.client import request_order
from ringcomm.ps.client.client import Client
from ringcomm.ps.client.future import Future
from ringcomm.ps.client.request_order import Credit, PartitionOwners, SendQueue
from ringcomm.ps.job import session
from ringcomm.ps.placement.partitions import Move
from ringcomm.ps.placement.rebalance import move_all

ONES = np.ones(4, np.float32)


class Waiter(threading.Thread):
    """A thread that waits for a future, and notes what became of it, and when."""

    def __init__(self, future, timeout_s):
        super().__init__(daemon=True)
        self.future, self.timeout_s = future, timeout_s
        self.has_begun = threading.Event()
        self.outcome = None
        self.start()

    def run(self):
        self.has_begun.set()
        began_at = time.monotonic()
        try:
            self.outcome = self.future.wait(self.timeout_s)
        except rc.CommTimeoutError as error:
            self.outcome = error
        self.seconds = time.monotonic() - began_at

    def finish(self):
        self.join(60)
        assert not self.is_alive(), "a wait has no end"
        return self.outcome


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("is_first", [True, False])
def test_a_wait_ends_in_time_whoever_drives(is_first):
    has_ended = threading.Event()

    def body(rank):
        t = ps.table("w", 4, updater=ps.optim.SGD(1.0), mode="sync")
        if rank == 1:  # it pushes nothing before the other has waited in vain
            assert has_ended.wait(60)
            return t.push(ONES).wait().applied
        future = t.push(ONES)
        waiters = [Waiter(future, 0.2 if is_first else 60)]
        waiters.append(Waiter(t.pull(), 60 if is_first else 0.2))
        hurried = waiters[not is_first]
        assert isinstance(hurried.finish(), rc.CommTimeoutError)
        assert 0.2 <= hurried.seconds < 40
        has_ended.set()
        return waiters[is_first].finish() is not None and future.wait().applied

    assert run_workers(2, body) == [True, True]


@pytest.mark.usefixtures("wire")
def test_who_drives_finishes_what_others_wait_for():
    are_done = threading.Event()

    def body(rank):
        never = ps.table("never", 4, mode="sync")
        t = ps.table("w", 4, updater=ps.optim.Add())
        if rank == 1:
            assert are_done.wait(60)
            return never.push(ONES).wait().applied
        driver = Waiter(never.push(ONES), 20)
        assert driver.has_begun.wait(60)
        for k in range(50):  # each would take 20 s if it waited for its turn
            t.push(ONES)
            assert t.pull().wait(60)[0] == k + 1
        assert driver.outcome is None
        are_done.set()
        return driver.finish().applied

    assert run_workers(2, body) == [True, True]


def test_collectives_and_requests_wait_in_two_threads():
    def body(rank):
        t = ps.table("w", 4, updater=ps.optim.Add())
        failures = []

        def reduce():
            try:
                for k in range(30):
                    assert rc.allreduce(np.array([k + rank])).item() == 2 * k + 1
            except BaseException as error:
                failures.append(error)

        own = engine()

        def entering():
            with serve_thread(own):
                reduce()

        thread = threading.Thread(target=entering, daemon=True)
        thread.start()
        for _ in range(30):
            t.push(ONES).wait()
        thread.join(60)
        assert not thread.is_alive()
        assert not failures
        rc.barrier()
        return t.pull().wait()[0]

    assert run_workers(2, body) == [60.0, 60.0]


def test_a_wait_of_no_time_takes_what_has_come():
    def body(rank):
        t = ps.table("w", 4, updater=ps.optim.Add())
        future, end = t.push(ONES), time.monotonic() + 10
        while time.monotonic() < end:
            try:
                return future.wait(0).applied
            except rc.CommTimeoutError:
                continue
        return False

    assert run_workers(1, body) == [True]


def test_a_reply_counts_though_another_thread_expects_more_at_that_moment():
    has_read, has_replied = threading.Event(), threading.Event()

    class Halting(Future):
        @property
        def _left(self):
            left = self.left
            if threading.current_thread() is other:
                has_read.set()
                has_replied.wait(0.5)  # in vain where the reply has to wait
            return left

        @_left.setter
        def _left(self, left):
            self.left = left

    future = Halting(SimpleNamespace(timestamp=lambda: 1), "push[w]", 2, lambda: "over")
    other = threading.Thread(target=future.expect, args=(1,))
    other.start()
    assert has_read.wait(60)
    future.replied()
    has_replied.set()
    other.join(60)
    future.replied()
    assert not future.done()
    future.replied()
    assert future.done()


class OwnedLock:
    """A lock that knows which thread holds it."""

    def __init__(self):
        self._lock, self._owner = threading.Lock(), None

    def __enter__(self):
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *_):
        self._owner = None
        self._lock.release()

    @property
    def is_own(self):
        return self._owner == threading.get_ident()


@pytest.mark.usefixtures("wire")
def test_no_thread_looks_at_what_others_change_without_the_lock(monkeypatch):
    """Credit, what waits for it, and the order of requests: the thread that drives changes them."""
    locks, unlocked = {}, set()  # by id of what is guarded

    def note(what, name):
        lock = locks.get(id(what))
        if lock is not None and not lock.is_own:
            caller = sys._getframe(2).f_code.co_name
            unlocked.add(f"{type(what).__name__}.{name} in {caller}()")

    def guarded(name, call):
        def checking(self, *args):
            note(self, name)
            return call(self, *args)

        return checking

    def attribute(name):
        def read(self):
            note(self, name)
            return self.__dict__[name]

        return property(read, lambda self, value: self.__dict__.__setitem__(name, value))

    for kind, names in [
        (Credit, ["busy", "count", "allows"]),
        (SendQueue, ["add", "add_behind", "due", "take_all", "has", "has_table", "n_of"]),
        (PartitionOwners, ["add_table", "forget_table", "note_move", "returned", "take_confirmed"]),
    ]:
        for name in names:
            monkeypatch.setattr(kind, name, guarded(name, getattr(kind, name)))
    monkeypatch.setattr(SendQueue, "n_waiting", attribute("n_waiting"), raising=False)
    for name in ("orders", "notices", "confirmed"):
        monkeypatch.setattr(PartitionOwners, name, attribute(name), raising=False)
    make, alive = Client.__init__, []  # else one could have the id of another

    def making(self, *args):
        make(self, *args)
        alive.append(self)
        self.lock = OwnedLock()
        for each in (self.credit, self.send_queue, self.owners):
            locks[id(each)] = self.lock

    monkeypatch.setattr(Client, "__init__", making)
    monkeypatch.setattr(request_order, "CREDIT_NBYTES", 4000)

    def body(rank):
        w = ps.table("w", 2000, updater=ps.optim.Add(), block_nbytes=1000)
        small = ps.table("s", 4, updater=ps.optim.Add())
        rows = ps.hashtable("e", 4, updater=ps.optim.Add())
        own, keys = engine(), np.arange(100)

        def push_all(n):
            with serve_thread(own):
                for _ in range(n):
                    w.push(np.ones(2000, np.float32))
                    rows.push(keys, np.ones((100, 4), np.float32))
                    small.push(ONES).wait()
                    small.pull().wait()

        other = threading.Thread(target=push_all, args=(5,), daemon=True)
        other.start()
        if rank == 0:
            move_all(session(), [Move((w.number, 0), -1, 1), Move((rows.number, 1), -1, 0)]).wait()
        push_all(5)
        other.join(60)
        assert not other.is_alive()
        ps.complete_step()
        rc.barrier()
        return w.pull().wait()[0]

    assert run_workers(2, body, 2) == [20.0, 20.0]
    assert not unlocked
