"""Partitions that move by themselves: soon enough, and never to and fro."""

import itertools
import random
import threading

import numpy as np
import pytest
from ps_jobs import run_all, run_workers

import ringcomm as rc
from ringcomm import ps
from ringcomm.ps.job import session
from ringcomm.ps.placement import plan_balance
from ringcomm.ps.placement.plan_balance import LEAST, PATIENCE, REST, Balance
from ringcomm.ps.placement.view import View

N = 12  # partitions, in turn on each server


class Job:
    """A job whose traffic is made up."""

    def __init__(self, n_servers):
        self.view = View().with_({(1, k): (k % n_servers,) for k in range(N)})
        self.balance = Balance(range(n_servers), request=1.0)
        self.traffic = dict.fromkeys(self.view.chains, 0.0)
        self.n_moves = []

    def period(self, heat):
        for k, x in enumerate(heat):
            self.traffic[1, k] += x
        moves = self.balance.moves(self.view, self.traffic)
        self.view = self.view.with_({move.partition: (move.dest,) for move in moves})
        self.n_moves.append(len(moves))
        return moves

    def share(self, server, heat):
        return sum(x for k, x in enumerate(heat) if self.view.owner((1, k)) == server) / sum(heat)


@pytest.mark.parametrize("n_servers", [2, 3, 4])
def test_a_balanced_job_never_moves_anything(n_servers):
    job, rng = Job(n_servers), random.Random(n_servers)
    for _ in range(500):
        job.period([1000 * rng.uniform(0.7, 1.3) for _ in range(N)])
    assert sum(job.n_moves) == 0


@pytest.mark.parametrize("n_servers", [2, 3, 4])
def test_a_server_that_is_overloaded_for_a_while_is_relieved_once(n_servers):
    job, rng = Job(n_servers), random.Random(0)
    heat = [5000 if k % n_servers == 0 else 500 for k in range(N)]
    for _ in range(100):
        job.period([x * rng.uniform(0.9, 1.1) for x in heat])
    assert job.n_moves[: PATIENCE - 1] == [0] * (PATIENCE - 1)
    assert job.n_moves[PATIENCE - 1] > 0
    assert sum(job.n_moves[PATIENCE:]) == 0
    assert job.share(0, heat) < 1.35 / n_servers


def test_a_peak_of_one_period_moves_nothing():
    job = Job(2)
    for step in range(100):
        job.period([9000 if k % 2 == 0 and step % PATIENCE == 0 else 1000 for k in range(N)])
    assert sum(job.n_moves) == 0


def test_traffic_that_goes_to_and_fro_moves_nothing():
    job = Job(2)
    for step in range(100):
        job.period([9000 if k % 2 == step % 2 else 1000 for k in range(N)])
    assert sum(job.n_moves) < N  # the odd period of a window makes a difference, once


def test_one_partition_that_outweighs_all_stays_and_the_others_settle():
    job = Job(2)
    for _ in range(200):
        job.period([100_000, *[1000] * (N - 1)])
    assert job.view.owner((1, 0)) == 0
    assert sum(job.n_moves) <= N
    assert sum(job.n_moves[20:]) == 0


@pytest.mark.parametrize("seed", range(10))
def test_what_has_moved_stays_for_a_while(seed):
    job, rng = Job(3), random.Random(seed)
    moved_at = {}
    for step in range(300):
        hot = rng.randrange(N) if step % 7 == 0 else step % N
        for move in job.period([rng.uniform(0, 20_000 if k == hot else 2000) for k in range(N)]):
            assert step - moved_at.get(move.partition, -REST) >= REST
            moved_at[move.partition] = step


def test_few_requests_decide_nothing():
    job = Job(2)
    for _ in range(50):
        job.period([2 * LEAST / N - 1 if k % 2 else 0 for k in range(N)])
    assert sum(job.n_moves) == 0


def test_a_partition_on_its_way_is_counted_when_it_is_back():
    job = Job(2)
    job.period([1000] * N)
    whole = dict(job.traffic)
    for _ in range(PATIENCE + 2):
        job.traffic = {p: x for p, x in whole.items() if p[1] != 0}
        assert job.balance.moves(job.view, job.traffic) == []
        whole = {p: x + 1000 for p, x in whole.items()}
    assert job.balance.moves(job.view, whole) == []


def test_a_partition_that_is_on_its_way_when_moves_are_planned_stays_out_of_the_plan():
    job = Job(2)
    heat = [5000 if k % 2 == 0 else 500 for k in range(N)]
    for _ in range(PATIENCE - 1):
        job.period(heat)
    chains = {p: chain for p, chain in job.view.chains.items() if p != (1, 0)}
    traffic = {p: x + heat[p[1]] for p, x in job.traffic.items() if p in chains}
    moves = job.balance.moves(View(1, chains), traffic)
    assert moves
    assert (1, 0) not in [move.partition for move in moves]


# --- in a job -----------------------------------------------------------------------------------
def owners(t):
    return {int(part): s["server"] for s in ps.stats() for part in s["tables"].get(t.name, {})}


def push_to(t, parts):
    for part in parts:
        t.push(np.ones(100, np.float32), where=slice(part * 100, part * 100 + 100))


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("colocated", [False, True])
def test_the_servers_relieve_each_other_while_all_go_on(colocated, monkeypatch):
    monkeypatch.setattr(plan_balance, "LEAST", 10.0)  # however slow this machine is
    n_pushes = 0

    def body(rank):
        nonlocal n_pushes
        t = ps.table("w", 600, updater=ps.optim.Add(), block_nbytes=400)
        if rank == 0:
            hot = [part for part, server in owners(t).items() if server == 0]
            wait = threading.Event()
            while len(set(map(owners(t).get, hot)) - {None}) < 2:  # None: on its way
                push_to(t, hot * 30)
                n_pushes += 30
                t.pull().wait()
                wait.wait(0.002)
        rc.barrier()
        return t.pull().wait().sum()

    sums = run_workers(2, body, 2, rebalance_every_s=0.05, colocated=colocated)
    assert sums == [n_pushes * 3 * 100.0] * 2


def test_a_job_that_is_balanced_stays_as_it_is():
    def body(rank):
        t = ps.table("w", 600, updater=ps.optim.Add(), block_nbytes=400)
        before = owners(t)
        for _ in range(200):
            push_to(t, range(6))
            t.pull().wait()
        return owners(t) == before and session().client.outstanding.n_resent == 0

    assert run_workers(1, body, 2, rebalance_every_s=0.01) == [True]


def test_a_period_that_is_none_is_refused():
    results = run_all(1, lambda _: None, rebalance_every_s=0.0)
    assert all("rebalance_every_s=0.0; it must be more than 0" in str(each) for each in results)


def test_an_error_in_one_period_is_logged_and_the_next_one_balances_again(monkeypatch, caplog):
    decide, n_periods, goes_on = Balance.moves, itertools.count(1), threading.Event()

    def fail_once(self, view, traffic):
        if next(n_periods) == 1:
            raise KeyError((1, 0))
        goes_on.set()
        return decide(self, view, traffic)

    monkeypatch.setattr(Balance, "moves", fail_once)
    assert run_workers(1, lambda _: goes_on.wait(120), 2, rebalance_every_s=0.01) == [True]
    assert "nothing moved in this period: KeyError: (1, 0)" in caplog.text
