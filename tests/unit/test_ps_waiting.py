"""Requests that wait at a server: who is looked at, who is answered, and who hears of an error."""

import threading

import numpy as np
import pytest
from harness import wait_until
from ps_jobs import run_workers

from ringcomm import ps
from ringcomm.ps.dense import DensePartition
from ringcomm.ps.table import Table
from ringcomm.ps.waiting import Waiters


class Counted(int):
    """A number that counts how often it is compared."""

    n = 0

    def __le__(self, other):
        Counted.n += 1
        return int(self) <= other

    def __lt__(self, other):
        Counted.n += 1
        return int(self) < other


def waiters(progress, failed=None):
    return Waiters(progress.__getitem__, lambda *told: failed.append(told))


def test_a_change_of_one_partition_looks_at_its_own_requests_and_at_those_that_it_lets_go():
    progress = {(1, part): 0 for part in range(1000)}
    waiting, answered = waiters(progress), []
    for part in range(1000):
        for round_ in (3, 2, 1):
            answer = lambda part=part, round_=round_: answered.append((part, round_))  # noqa: E731
            waiting.wait((1, part), Counted(round_), answer, (part, round_))
    progress[1, 7] = 1
    Counted.n = 0
    waiting.look_at((1, 7))
    assert answered == [(7, 1)]
    assert Counted.n < 20
    assert len(waiting) == 2999


def test_requests_of_one_round_are_answered_in_the_order_in_which_they_came():
    progress, answered = {(1, 0): 0}, []
    waiting = waiters(progress)
    for number in range(20):
        waiting.wait((1, 0), 1 + number % 2, lambda number=number: answered.append(number), None)
    progress[1, 0] = 2
    waiting.look_at_all()
    assert answered == [*range(0, 20, 2), *range(1, 20, 2)]


def test_what_goes_along_with_a_partition_is_forgotten_and_the_rest_stays():
    progress, answered = {(1, 0): 0, (1, 1): 0}, []
    waiting = waiters(progress)
    for number, wanted in enumerate((3, 1, 2, 1)):
        answer = lambda number=number: answered.append(number)  # noqa: E731
        waiting.wait((1, 0), wanted, answer, number, goes_along=number != 1)
    waiting.wait((1, 1), 1, lambda: answered.append("other"), None)
    assert waiting.take((1, 0)) == [0, 2, 3]
    progress.update({(1, 0): 3, (1, 1): 1})
    waiting.look_at_all()
    assert sorted(map(str, answered)) == ["1", "other"]
    assert len(waiting) == 0


def test_an_error_goes_to_who_asked_and_the_others_are_answered():
    progress, failed, answered = {(1, 0): 0}, [], []
    waiting, error = waiters(progress, failed), ValueError("bad")

    def fail():
        raise error

    waiting.wait((1, 0), 1, fail, "first")
    waiting.wait((1, 0), 1, lambda: answered.append("second"), "second")
    waiting.when(lambda: progress[1, 0], fail, "third")
    progress[1, 0] = 1
    waiting.look_at_all()
    assert failed == [("first", error), ("third", error)]
    assert answered == ["second"]


# --- in a job -----------------------------------------------------------------------------------
def test_a_push_looks_only_at_the_pulls_of_its_own_block(monkeypatch):
    n, looks, is_ready = 200, [0], DensePartition.is_ready

    def counted(self):
        looks[0] += 1
        return is_ready.fget(self)

    monkeypatch.setattr(DensePartition, "is_ready", property(counted, is_ready.fset))

    def body(rank):
        t = ps.table("w", n, updater=ps.optim.SGD(1.0), mode="sync", block_nbytes=4)
        if rank == 0:  # the other's pulls wait for it
            wait_until(lambda: ps.stats()[0]["waiting"] == n, "the pulls do not wait")
            looks[0] = 0
        t.push(np.ones(n, np.float32))
        return t.pull().wait().sum()

    assert run_workers(2, body) == [-n, -n]
    assert looks[0] < 20 * n < n * n / 2


@pytest.mark.usefixtures("wire")
def test_a_push_that_waited_for_the_chiefs_values_and_is_refused_fails_alone(monkeypatch):
    has_pushed, push_initial = threading.Event(), Table.push_initial

    def late(self, values):
        assert has_pushed.wait(120)
        return push_initial(self, values)

    monkeypatch.setattr(Table, "push_initial", late)

    def body(rank):
        t = ps.table("w", 4, updater=ps.optim.SGD(1.0), init=np.zeros(4))
        if rank == 0:
            return t.pull().wait()[0]
        good = t.push(-np.ones(4, np.float32))
        good_updater, t._updater = t._updater, ps.optim.Adam(0.1)  # as another version might send
        bad = t.push(-np.ones(4, np.float32))
        t._updater = good_updater
        last = t.push(-np.ones(4, np.float32))
        wait_until(lambda: ps.stats()[0]["waiting"] == 3, "the pushes do not wait")
        has_pushed.set()
        with pytest.raises(ValueError, match="hyper-parameters"):
            bad.wait()
        assert good.wait().applied
        assert last.wait().applied
        return t.pull().wait()[0]

    assert run_workers(2, body)[1] == 2.0
