"""ps.FirstOf(k): a gradient counts in all blocks that it has a part in, or in none."""

import random
import threading

import numpy as np
import pytest
from harness import at_length
from ps_ranks_as_threads import cross_gradients, run_workers

import ringcomm as rc
from ringcomm import ps
from ringcomm.ps import job
from ringcomm.ps.client import json_requests, request_order
from ringcomm.ps.client.first_of import FirstOfRounds
from ringcomm.ps.placement.partitions import Move
from ringcomm.ps.placement.rebalance import move_all
from ringcomm.ps.protocol.frames import ServerOption
from ringcomm.ps.server.core.rounds import Entries

pytestmark = pytest.mark.one_wire

N = 30


def table(k=1, name="w", **options):
    options = {"updater": ps.optim.SGD(1.0), "block_nbytes": 40, **options}
    return ps.table(name, N, mode=ps.FirstOf(k), **options)


def gradient(rank):
    return np.full(N, -(2.0**rank), np.float32)


@pytest.fixture
def crossed(monkeypatch):
    """Set: each worker is late at another server."""
    return cross_gradients(monkeypatch)


def test_who_would_be_late_in_another_block_each_is_late_in_all_or_none(crossed):
    def body(rank):
        t = table()
        t.pull().wait()
        rc.barrier()
        crossed.set()
        applied, squares = 0, []
        for _ in range(4):
            told = t.push(gradient(rank), hold=True).wait()
            assert (told.applied, told.why) in ((True, ""), (False, "late"))
            if told.applied:
                applied += 1
                squares.append(told.squares)
                t.release(0.5).wait()
            t.pull().wait()
            rc.barrier()
        return applied, squares, t.pull().wait()

    (n0, squares0, values), (n1, squares1, same) = run_workers(2, body, 2)
    assert n0 + n1 == 4
    assert squares0 == [N] * n0  # the norm of the gradient that is applied, in all blocks
    assert squares1 == [4 * N] * n1
    assert (values == 0.5 * (n0 + 2 * n1)).all()
    assert (same == values).all()


def is_applied(rank, tables, rounds):
    """Make a step; return True if all tables have taken the gradient, False if none has."""
    pushes = [t.push(gradient(rank)) for t in tables]
    rounds.enter()
    told = {push.wait().why for push in pushes}
    assert len(told) == 1
    for t in tables:
        t.pull().wait()
    return told == {""}


def test_tables_that_share_rounds_take_a_gradient_all_or_none(crossed):
    def body(rank):
        tables = [table(name=name) for name in "abc"]
        rounds = FirstOfRounds(job.session().client, is_shared=True)
        for t in tables:
            t.share_rounds(rounds)
            t.pull().wait()
        rc.barrier()
        crossed.set()
        n_applied = 0
        for _ in range(4):
            n_applied += is_applied(rank, tables, rounds)
            rc.barrier()
        return n_applied, [t.pull().wait().tolist() for t in tables]

    (n0, values), (n1, same) = run_workers(2, body, 2)
    assert n0 + n1 == 4
    assert values == same == [[n0 + 2.0 * n1] * N] * 3


@pytest.mark.long
@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("n_servers", [1, 3])
def test_k_are_in_each_round_of_every_block_and_the_same_k(n_servers):
    """Each pushes to an element of its own of every block: a round adds 1/k to those of k."""
    n_workers, n_rounds, k = 3, at_length(12, 6), 2
    is_over, have_left = threading.Event(), threading.Barrier(n_workers)

    def body(rank):
        t = table(k, updater=ps.optim.Add())
        rng, mine = random.Random(rank), np.zeros(N, np.float32)
        mine[rank::10] = 1.0
        pushes = []
        while not is_over.is_set():
            push = t.push(mine)
            pushes.append(push)
            if rank == 0:
                push.wait()
                if len(pushes) == n_rounds:
                    is_over.set()
            while not (push.done() or is_over.is_set()):
                job.session().client.listen()
            for _ in range(rng.randrange(2 * rank + 1)):
                t.pull().wait() if push.done() else None
        if rank:
            job.session().leave()  # the round that it is in may lack a second one
        for _ in range(4):  # who is let in tells the servers, which then apply it and answer
            have_left.wait(60)
            json_requests.ask_json(
                job.session().client, ServerOption.STATS, {}
            ).wait()  # behind all that
        have_left.wait(60)
        values = None if rank else t.pull().wait()
        return sum(push.done() and push.wait().applied for push in pushes), values

    (n0, values), (n1, _), (n2, _) = run_workers(n_workers, body, n_servers)
    for block in values.reshape(3, 10):
        assert block[:3].tolist() == [n0 / k, n1 / k, n2 / k]


@pytest.mark.parametrize("kind", ["dense", "rows"])
def test_who_leaves_behind_a_push_that_it_did_not_wait_for_is_in_its_round(kind):
    has_left = threading.Event()

    def body(rank):
        t, kv = table(2), ps.hashtable("emb", 2, updater=ps.optim.SGD(1.0), mode=ps.FirstOf(2))
        rc.barrier()
        push = (
            (lambda: t.push(gradient(rank)))
            if kind == "dense"
            else (lambda: kv.push([1], np.full((1, 2), -(2.0**rank), np.float32)))
        )
        if rank:
            push()
            job.session().leave()
            has_left.set()
            return None
        assert has_left.wait(30)
        assert push().wait().applied
        assert push().wait().applied
        return np.unique(t.pull().wait() if kind == "dense" else kv.pull([1]).wait()).tolist()

    assert run_workers(2, body, 2) == [[2.5], None]  # the mean of both, then its own


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("is_moving", [False, True], ids=["at rest", "blocks move"])
def test_rounds_go_on_when_all_leave_whose_mean_is_held(is_moving):
    def body(rank):
        t, kv = table(2), ps.hashtable("emb", 2, updater=ps.optim.SGD(1.0), mode=ps.FirstOf(2))
        rows = np.full((1, 2), -(2.0**rank), np.float32)
        rc.barrier()
        if rank < 2:
            assert t.push(gradient(rank), hold=True).wait().applied
            assert kv.push([1], rows, hold=True).wait().applied
        rc.barrier()
        if rank == 2 and is_moving:
            moves = [Move((t.number, part), -1, part % 2) for part in range(t.n_partitions)]
            moves += [Move((kv.number, part), -1, 1) for part in range(64)]
            move_all(job.session(), moves).wait()
        rc.barrier()
        if rank < 2:
            job.session().leave()
            return None
        late = t.push(gradient(rank), hold=True), kv.push([1], rows, hold=True)
        assert [push.wait().why for push in late] == ["late"] * 2
        pushes = t.push(gradient(rank)), kv.push([1], rows)
        assert [push.wait().applied for push in pushes] == [True] * 2
        return [np.unique(each).tolist() for each in (t.pull().wait(), kv.pull([1]).wait())]

    assert run_workers(3, body, 2) == [None, None, [[4.0], [4.0]]]  # its own alone


@pytest.mark.usefixtures("wire")
def test_blocks_that_move_take_along_who_is_in_their_rounds():
    n_rounds = 20

    def body(rank):
        t = table()
        rng, n_applied = random.Random(rank), 0
        for _ in range(n_rounds):
            push = t.push(gradient(rank))
            if rank == 0:
                part = rng.randrange(t.n_partitions)
                move_all(job.session(), [Move((t.number, part), -1, rng.randrange(2))])
            n_applied += push.wait().applied
            t.pull().wait()
        rc.barrier()
        return n_applied * 2.0**rank, t.pull().wait().tolist()

    results = run_workers(2, body, 2)
    assert [values for _, values in results] == [[sum(own for own, _ in results)] * N] * 2


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("limit", [{"CREDIT_NBYTES": 10}, {"CREDIT_REQUESTS": 3}], ids=str)
def test_a_gradient_that_is_more_than_the_credit_enters_its_round(limit, is_shared, monkeypatch):
    """Blocks hold the credit until it is known whether what they keep counts."""
    for name, value in limit.items():
        monkeypatch.setattr(request_order, name, value)

    def body(rank):
        tables = [table(2, name) for name in ("ab" if is_shared else "a")]
        rounds = tables[0].blocks.first_of
        if is_shared:
            rounds = FirstOfRounds(job.session().client, is_shared=True)
            for t in tables:
                t.share_rounds(rounds)
        n_applied = 0
        for _ in range(4):
            n_applied += is_applied(rank, tables, rounds)
            if rank == 0 and n_applied == 3:
                break
        job.session().leave()
        return n_applied

    n0, n1 = run_workers(2, body)
    assert n0 == 3
    assert n1 == 4  # the last one alone


def test_an_entry_that_fails_is_raised_by_every_push_of_its_step(monkeypatch):
    """Also by those that join the step later."""

    def refuse(*_):
        raise ValueError("no entry today")

    monkeypatch.setattr(Entries, "ask", refuse)

    def body(rank):
        tables = [table(name=name) for name in "ab"]
        rounds = FirstOfRounds(job.session().client, is_shared=True)
        for t in tables:
            t.share_rounds(rounds)
        push = tables[0].push(gradient(rank))
        rounds._ask(rounds._open)  # as it does for want of credit
        with pytest.raises(ValueError, match="no entry today"):
            push.wait()
        push = tables[1].push(gradient(rank))
        with pytest.raises(ValueError, match="no entry today"):
            push.wait(120)

    run_workers(1, body)


def test_a_push_without_its_entry_holds_up_nobody():
    """As of a worker whose step fails half-way."""
    is_over = threading.Event()

    def body(rank):
        t = table()
        rc.barrier()
        if rank == 1:
            t.share_rounds(FirstOfRounds(job.session().client, is_shared=True))
            push = t.push(gradient(rank))
            json_requests.ask_json(
                job.session().client, ServerOption.STATS, {}
            ).wait()  # servers have it
        rc.barrier()
        if rank == 0:
            for _ in range(2):
                assert t.push(gradient(rank)).wait().applied
            is_over.set()
            return t.pull().wait()[0]
        assert is_over.wait(30)
        t.blocks.first_of.enter()
        return push.wait().why

    assert run_workers(2, body, 2) == [2.0, "late"]
