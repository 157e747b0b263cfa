"""A push of several blocks is sent whole or not at all, also where servers do not answer."""

import threading
from functools import partial

import numpy as np
import pytest
from harness import listen
from ps_ranks_as_threads import deadline, run_workers

import ringcomm as rc
from ringcomm import ps
from ringcomm.codec import TopK
from ringcomm.ps.client import request_order
from ringcomm.ps.client.request_order import Credit
from ringcomm.ps.job import session
from ringcomm.ps.server.server import Server

BLOCK, N_BLOCKS = 4096, 16
COUNT = N_BLOCKS * BLOCK // 4


class Deaf:
    """Servers that answer no push until they are let."""

    def __init__(self, monkeypatch):
        self.is_deaf, self.kept = threading.Event(), []
        on_request = Server.on_request

        def handle(server, delivery):
            self.kept.append((server, delivery))
            while self.kept and not self.is_deaf.is_set():
                on_request(*self.kept.pop(0))

        monkeypatch.setattr(Server, "on_request", handle)


def table(**options):
    t = ps.table("w", COUNT, updater=ps.optim.SGD(1.0), block_nbytes=BLOCK, **options)
    t.pull().wait()
    return t


@pytest.fixture
def deaf(monkeypatch):
    monkeypatch.setattr(request_order, "CREDIT_NBYTES", 8 * BLOCK)
    return Deaf(monkeypatch)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_push_whose_blocks_wait_for_credit_arrives_whole_and_once(deaf, mode):
    """Half of its blocks have credit; the others leave as it comes back."""

    def body(_):
        t = table(mode=mode)
        deaf.is_deaf.set()
        with deadline(0.3):
            push = t.push(np.ones(COUNT, np.float32))
            assert 0 < session().client.credit.n_bytes[0] <= 8 * BLOCK
            with pytest.raises(rc.CommTimeoutError, match=r"push\[w\]: no answer within 0.01 s"):
                push.wait(0.01)
            with pytest.raises(rc.CommTimeoutError, match=r"push\[w\]"):
                t.push(np.ones(COUNT, np.float32))  # nothing of it is sent
        deaf.is_deaf.clear()
        ps.stats()  # which the servers hear
        assert push.wait(120).applied
        np.testing.assert_array_equal(t.pull().wait(), -1.0)
        assert t.push(np.ones(COUNT, np.float32)).wait().applied
        return t.pull().wait()

    np.testing.assert_array_equal(run_workers(1, body)[0], -2.0)


def test_nothing_overtakes_what_waits_for_credit(deaf):
    """A pull needs no credit, and has all own pushes all the same."""

    def body(_):
        t = table()
        deaf.is_deaf.set()
        with deadline(0.3):
            t.push(np.ones(COUNT, np.float32))
            with pytest.raises(rc.CommTimeoutError, match=r"pull\[w\]"):
                t.pull(where=slice(-3, None))
        deaf.is_deaf.clear()
        return t.pull().wait()

    np.testing.assert_array_equal(run_workers(1, body)[0], -1.0)


@pytest.mark.parametrize("mode", ["async", "sync", ps.FirstOf(1)], ids=str)
def test_a_push_in_a_callback_that_cannot_wait_is_sent_whole_or_not_at_all(deaf, mode):
    has_pushed = threading.Event()
    told = []

    def body(_):
        t, x = table(mode=mode), np.ones(COUNT, np.float32)

        def push(_):
            deaf.is_deaf.set()
            try:
                told.append(t.push(x))
                t.push(x)
            except rc.RingcommError as error:
                told.append(str(error))
            has_pushed.set()

        deaf.is_deaf.set()
        pull = t.pull().then(push)
        assert not pull.done()
        deaf.is_deaf.clear()
        t.pull(where=slice(1))  # the servers hear both
        listen(has_pushed.is_set)
        deaf.is_deaf.clear()
        ps.stats()
        first, second = told
        assert first.wait().applied
        assert second.startswith("push[w]: server 0 takes no more")
        assert "nothing was sent" in second
        assert t.push(x).wait().applied
        return t.pull().wait()

    np.testing.assert_array_equal(run_workers(1, body)[0], -2.0)


def test_a_push_that_is_not_sent_leaves_the_residual_as_it_was(deaf, monkeypatch):
    x = np.random.default_rng(3).standard_normal(COUNT).astype(np.float32)

    def body(_):
        t = table(compression=TopK(0.1))
        t.push(x).wait()
        before, values = t.residual, t.pull().wait()
        with monkeypatch.context() as patch:
            patch.setattr(Credit, "allows", lambda *_: False)
            for options in ({}, {"assign": True}):
                with deadline(0.1), pytest.raises(rc.CommTimeoutError, match=r"push\[w\]"):
                    t.push(x, **options)
                np.testing.assert_array_equal(t.residual, before)
        np.testing.assert_array_equal(t.pull().wait(), values)
        t.push(x).wait()
        np.testing.assert_allclose(t.residual - t.pull().wait(), 2 * x, atol=1e-5)

    run_workers(1, body)


def test_a_step_is_not_told_before_its_pushes_have_left(deaf):
    """A worker's clock says that all it pushed is on its way."""

    def body(_):
        t = table(mode=ps.SSP(0))
        deaf.is_deaf.set()
        with deadline(0.3):
            push = t.push(np.ones(COUNT, np.float32))
            with pytest.raises(rc.CommTimeoutError, match=r"tick: .* server 0 \(rank 1\)"):
                ps.complete_step()
        deaf.is_deaf.clear()
        ps.stats()
        assert push.wait(120).applied
        ps.complete_step()
        return session().clock

    assert run_workers(1, body) == [1]


@pytest.mark.parametrize("kind", ["dense", "hash"])
def test_push_pull_raises_at_once_only_if_nothing_was_sent(kind, monkeypatch):
    def body(_):
        x = np.ones((3, 2), np.float32)
        if kind == "dense":
            t = ps.table("w", (3, 2), updater=ps.optim.Add())
            push_pull, pull = t.push_pull, t.pull
        else:
            t = ps.hashtable("e", 2, updater=ps.optim.Add())
            push_pull = partial(t.push_pull, np.arange(3))
            pull = partial(t.pull, np.arange(3))
        with pytest.raises(ValueError, match="out must be contiguous"):
            push_pull(x, out=np.empty((2, 2), np.float32))
        np.testing.assert_array_equal(pull().wait(), 0)

        def late(*args, **kwargs):
            raise rc.CommTimeoutError("no credit", missing=[1])

        with monkeypatch.context() as no_credit:
            no_credit.setattr(type(t), "pull", late)
            pulled = push_pull(x)
            with pytest.raises(rc.CommTimeoutError, match="no credit"):
                pulled.wait()
        return pull().wait()

    np.testing.assert_array_equal(run_workers(1, body)[0], 1)


def test_a_step_that_was_not_told_is_told_once(monkeypatch):
    def body(_):
        with monkeypatch.context() as no_credit:
            no_credit.setattr(Credit, "allows", lambda self, ask: False)
            told = pytest.raises(rc.CommTimeoutError, match=r"tick: .* server 0 \(rank 1\)")
            with deadline(0.1), told:
                ps.complete_step()
        ps.complete_step()
        return session().clock

    assert run_workers(1, body) == [1]
