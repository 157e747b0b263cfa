"""Requests that wait at a server: who is looked at, who is answered, and who hears of an error."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from harness import wait_until
from ps_ranks_as_threads import run_workers

from ringcomm import ps
from ringcomm.ps.client.dense.table import Table
from ringcomm.ps.server.core.actions import Retry, Serve
from ringcomm.ps.server.core.unit import Unit, Waiting


class Counted(int):
    """A number that counts how often it is compared."""

    n = 0

    def __le__(self, other):
        Counted.n += 1
        return int(self) <= other

    def __lt__(self, other):
        Counted.n += 1
        return int(self) < other


def request(number, source=0):
    return SimpleNamespace(source=source, number=number)


def waiting(*wanted):
    found = Waiting()
    for number, each in enumerate(wanted):
        found.add(each, Serve(request(number, source=number % 2)))
    return found


def numbers(due):
    return [each.request.number for each in due]


def test_a_change_looks_at_the_requests_that_it_lets_go_and_at_one_more():
    found = waiting(*(Counted(1 + number) for number in range(1000)))
    Counted.n = 0
    assert numbers(found.due(2)) == [0, 1]
    assert Counted.n < 60
    assert len(found) == 998


def test_requests_of_one_round_are_answered_in_the_order_in_which_they_came():
    found = waiting(*(1 + number % 2 for number in range(20)))
    assert numbers(found.due(2)) == [*range(0, 20, 2), *range(1, 20, 2)]


def test_what_waits_is_given_back_in_the_order_in_which_it_came():
    found = waiting(3, 1, 2, 1)
    assert [each.number for each in found.take_all()] == [0, 1, 2, 3]
    assert found.due(3) == []


def test_a_rank_that_has_left_reads_no_more_and_what_it_has_pushed_counts():
    found = waiting(3, 1, 2, 1)
    found.add(0, Retry(request(4, source=1)))
    found.forget(1)
    assert numbers(found.due(3)) == [4, 2, 0]


# --- in a job -----------------------------------------------------------------------------------
def test_a_push_looks_only_at_the_pulls_of_its_own_block(monkeypatch):
    n, looks, progress = 200, [0], Unit.progress

    def counted(self, clocks):
        looks[0] += 1
        return progress(self, clocks)

    monkeypatch.setattr(Unit, "progress", counted)

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
def test_a_push_before_the_chiefs_values_that_is_refused_fails_alone(monkeypatch):
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
        wait_until(lambda: ps.stats()[0]["waiting"] == 2, "the pushes do not wait")
        has_pushed.set()
        with pytest.raises(ValueError, match="hyper-parameters"):
            bad.wait()
        assert good.wait().applied
        assert last.wait().applied
        return t.pull().wait()[0]

    assert run_workers(2, body)[1] == 2.0
