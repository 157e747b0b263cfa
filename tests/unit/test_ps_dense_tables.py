"""Dense tables: what is pushed is what is pulled, on any number of servers and workers."""

import threading
import time

import harness
import ml_dtypes
import numpy as np
import pytest
from harness import outcomes
from ps_ranks_as_threads import run_workers
from sample_values import total, whole_numbers

import ringcomm as rc
from ringcomm import ps
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.meet_and_leave import leave
from ringcomm.ps.client import request_order
from ringcomm.ps.job import session
from ringcomm.ps.protocol.link import Link

pytestmark = [pytest.mark.usefixtures("wire"), pytest.mark.one_wire]


@pytest.mark.parametrize("n_servers", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 7, 1000, 100_003])
def test_what_is_added_by_all_is_pulled_by_all(count, n_servers):
    def body(rank):
        t = ps.table("w", count, updater=ps.optim.Add(), block_nbytes=60_000)
        for _ in range(3):
            assert t.push(whole_numbers(rank, count)).wait().applied
        rc.barrier()
        return t.pull().wait()

    for values in run_workers(2, body, n_servers):
        assert values.shape == (count,)
        assert np.array_equal(values, 3 * total(2, count))


def test_workers_are_the_default_group():
    assert run_workers(3, lambda _: (rc.rank(), rc.size(), ps.rank(), ps.size()), 2) == [
        (rank, 3, rank, 3) for rank in range(3)
    ]


def test_the_chief_s_values_are_what_a_table_begins_with():
    def body(rank):
        init = whole_numbers(rank, 1200).reshape(30, 40)
        return ps.table("w", (30, 40), init=init, block_nbytes=900).pull().wait()

    for values in run_workers(2, body):
        assert np.array_equal(values, whole_numbers(0, 1200).reshape(30, 40))


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_push_that_comes_before_the_chief_s_values_is_not_lost(mode):
    has_pushed = threading.Event()

    def body(rank):
        if rank == 0:
            assert has_pushed.wait(60)
        values = np.full(6, 5.0)
        t = ps.table("w", 6, updater=ps.optim.Add(), mode=mode, init=values, block_nbytes=8)
        pushed = t.push(np.full(6, rank + 1.0, np.float32))
        has_pushed.set()
        assert pushed.wait().applied
        rc.barrier()
        return t.pull().wait()

    for values in run_workers(2, body, 2):
        assert (values == 5 + (3 if mode == "async" else 1.5)).all()


@pytest.mark.one_wire(False)
def test_values_are_read_where_they_stand_until_they_are_somebody_else_s(wire):
    """A pull costs the server nothing where memory is shared, and never misses an own push."""

    def body(rank):
        small = ps.table("s", 10, updater=ps.optim.Add())
        large = ps.table("l", 10_000, updater=ps.optim.Add(), mode="sync")
        for k in range(1, 6):
            for t in (small, large):
                t.push(np.ones(t.shape, np.float32)).wait()
                assert t.pull().wait().min() >= k
        rc.barrier()
        before = ps.stats()[0]
        for t in (small, large):
            for _ in range(10):
                assert (t.pull().wait() == (10 if t is small else 5)).all()
        rc.barrier()
        after = ps.stats()[0]
        return after["requests"] - before["requests"], after

    for asked, told in run_workers(2, body):
        assert asked <= (6 if wire == "node" else 46)
        assert told["pulls"] == 60
        assert told["pushes"] == 20


@pytest.mark.parametrize("n_servers", [1, 3])
def test_a_round_is_one_update_with_the_weighted_mean(n_servers):
    def body(rank):
        t = ps.table("w", 1000, updater=ps.optim.SGD(1.0), mode="sync", block_nbytes=900)
        for step in range(5):
            t.push(-whole_numbers(rank, 1000, turn=step), weight=rank + 1)
            values = t.pull().wait()
        return values

    sums = [sum((r + 1) * whole_numbers(r, 1000, turn=s) for r in range(3)) for s in range(5)]
    for values in run_workers(3, body, n_servers):
        np.testing.assert_allclose(values, sum(sums) / 6, rtol=1e-5, atol=1e-5)


def test_a_worker_that_raises_ends_the_servers():
    def main(rank):
        ps.init(1, deadline_s=10)
        raise ValueError("boom")

    results = outcomes(2, main)
    assert isinstance(results[0], ValueError)
    assert isinstance(results[1], rc.PeerFailedError)


@pytest.mark.parametrize("what", ["push", "pull"])
def test_who_asks_again_and_again_hears_of_a_death(what):
    def main(rank):
        ps.init(1, deadline_s=10)
        t = ps.table("w", 10, updater=ps.optim.Add())
        calls = {"push": lambda: t.push(np.ones(10, np.float32)), "pull": t.pull}
        while rank == 0:
            calls[what]().wait()
        if rank == 1:
            raise ValueError("boom")

    results = outcomes(3, main)
    assert isinstance(results[0], rc.PeerFailedError)
    assert results[0].rank == 1


def test_a_push_is_a_future():
    def body(rank):
        t = ps.table("w", 10, updater=ps.optim.Add())
        heard = []
        first, second = (t.push(np.ones(10, np.float32)).then(heard.append) for _ in range(2))
        assert second.timestamp > first.timestamp
        assert first.label == "push[w]"
        assert first.wait().applied
        assert second.wait() == second.result()
        assert (second.wait().applied, second.wait().why) == (True, "")
        assert first.done()
        assert heard == [first, second]
        assert not second.unanswered()
        assert t.push(np.ones(10, np.float32)).then(heard.append).wait(0.5).version >= 2
        return t.pull().wait().tolist()

    assert run_workers(1, body) == [[3.0] * 10]


class Interrupted(Exception):
    pass


@pytest.mark.one_wire(False)
@pytest.mark.parametrize("count", [10, 10_000])
def test_an_interrupt_within_a_wait_loses_no_ack(count, monkeypatch):
    """As Ctrl-C does, which is raised as soon as the call into C++ returns."""
    await_ack, is_interrupting = Link.await_ack, [True]

    def interrupted(self, *arguments):
        clock = await_ack(self, *arguments)
        if clock >= 0 and is_interrupting[0]:
            raise Interrupted
        return clock

    def body(rank):
        t = ps.table("w", count, updater=ps.optim.Add())
        monkeypatch.setattr(Link, "await_ack", interrupted)
        n_pushes = n_interrupts = 0
        give_up = time.monotonic() + 60
        while n_pushes < 20 or (n_interrupts == 0 and harness.wire == "node"):
            assert time.monotonic() < give_up, "no push was waited for"
            n_pushes += 1
            is_interrupting[0] = True
            push = t.push(np.ones(count, np.float32))
            try:
                push.wait()
            except Interrupted:
                n_interrupts += 1
                is_interrupting[0] = False
                assert push.wait(60).applied
        assert session().client.requests == {}
        assert (t.pull().wait() == n_pushes).all()

    run_workers(1, body)


def test_what_cannot_be_written_to_or_read_is_refused():
    fixed, odd = np.zeros((2, 3), np.float32), np.zeros((3, 2), np.float32)
    fixed.flags.writeable = False

    def body(rank):
        t = ps.table("w", (2, 3), updater=ps.optim.Add())
        for _ in range(2):  # asked for, and where it stands
            for out in (fixed, odd):
                with pytest.raises(ValueError, match="out must be contiguous and writeable"):
                    t.pull(out=out)
            t.pull(out=np.empty(6, np.float32)).wait()
        with pytest.raises(ValueError, match=r"shape \(3, 2\), for 6 of a table of shape \(2, 3\)"):
            t.push(odd)
        for options in ({}, {"where": slice(0, 3)}, {"assign": True}):
            n = 3 if options.get("where") else 6
            with pytest.raises(TypeError, match=r"dtype >f2, and the table has float32"):
                t.push(np.ones(n, ">f2"), **options)
        kv = ps.hashtable("e", 3)
        with pytest.raises(TypeError, match=r"dtype >f2, and the table has float32"):
            kv.push([1, 2], np.ones((2, 3), ">f2"))
        with pytest.raises(ValueError, match="out must be contiguous and writeable"):
            kv.pull([1, 2], out=fixed)
        t.push(np.ones(6, np.float32)).wait()
        return t.pull().wait().sum()

    assert run_workers(1, body) == [6.0]


def test_a_callback_that_raises_is_logged_and_nobody_else_s_fault(caplog):
    def body(rank):
        t = ps.table("w", 10, updater=ps.optim.Add())
        for _ in range(20):
            t.push(np.ones(10, np.float32)).then(lambda _: 1 / 0).wait()
        t.pull().then(lambda _: 1 / 0).wait()
        return t.pull().wait()[0]

    assert run_workers(1, body) == [20.0]
    assert caplog.text.count("push[w]: a callback of then() raised") == 20
    assert "ZeroDivisionError" in caplog.text


def test_after_shutdown_a_push_is_an_error():
    def body(rank):
        t, kv = ps.table("w", 10), ps.hashtable("e", 2)
        t.push(np.ones(10, np.float32)).wait()
        leave(engine(), "done")
        for ask in (
            lambda: t.push(np.ones(10, np.float32)),
            lambda: t.push(np.ones(5, np.float32), where=slice(5)),
            lambda: kv.push([1], np.ones((1, 2), np.float32)),
        ):
            with pytest.raises(rc.NotInitializedError, match="was shut down"):
                ask()

    run_workers(1, body)


@pytest.mark.parametrize("weights", [(2e-50, 1e-50), (3e38, 1.5e38), (1e300, 5e299), (2.0, 1.0)])
def test_weights_of_any_size_count_by_their_ratio(weights):
    def body(rank):
        t = ps.table("w", 10, updater=ps.optim.Add(), mode="sync")
        t.push(np.full(10, [3e20, 6e20][rank], np.float32), weight=weights[rank]).wait()
        return t.pull().wait()

    for got in run_workers(2, body):
        np.testing.assert_allclose(got, 4e20, rtol=1e-6)


@pytest.mark.parametrize("n_workers", [1, 2])
@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("options", [{}, {"segments": [0, 4]}], ids=str)
def test_gradients_may_have_16_bits_whatever_the_mode(n_workers, mode, dtype, kind, options):
    def body(rank):
        t = ps.table("w", 10, dtype, updater=ps.optim.Add(), mode=mode, **options)
        t.push(np.full(10, rank + 1, kind)).wait()
        t.push(np.full(3, 4, kind), where=slice(2, 5)).wait()
        rc.barrier()
        return t.pull().wait().tolist()

    mean = {"async": n_workers, "sync": 1}[mode] / n_workers
    whole, part = sum(range(1, n_workers + 1)) * mean, 4 * n_workers * mean
    expected = [whole] * 2 + [whole + part] * 3 + [whole] * 5
    assert run_workers(n_workers, body) == [expected] * n_workers


@pytest.mark.parametrize("updater", [ps.optim.SGD(0.1, momentum=0.9), ps.optim.Adam(0.1)], ids=str)
@pytest.mark.parametrize("weights", [(1, 1, 1), (1, 2.5, 0), (0, 0.1, 3)], ids=str)
def test_the_mean_of_a_round_is_summed_in_the_order_of_the_workers(weights, updater):
    n = 5001  # some chunks of what C++ sums at once
    rng = np.random.default_rng(1)
    grads = [rng.standard_normal((3, n)).astype(np.float32) for _ in range(3)]
    if 0 in weights:
        grads[1][weights.index(0)] = np.nan  # it does not count
    alone = 1.0 if weights == (1, 1, 1) else np.float32(sum(weights))

    def body(rank):
        t = ps.table("w", n, updater=updater, mode="sync")
        for each in grads:
            t.push(each[rank], weight=weights[rank])
        return t.pull().wait()

    def reference(rank):
        t = ps.table("w", n, updater=updater, mode="sync")
        for each in grads:
            terms = [g * np.float32(w) for g, w in zip(each, weights, strict=True) if w]
            total = terms[0].copy()
            for term in terms[1:]:
                total += term
            t.push(total / np.float32(3 if weights == (1, 1, 1) else alone))
        return t.pull().wait()

    (expected,) = run_workers(1, reference)
    for got in run_workers(3, body):
        assert np.array_equal(got, expected)


# --- modes --------------------------------------------------------------------------------------
def test_rounds_have_the_same_bits_on_any_number_of_servers():
    rng = np.random.default_rng(0)
    gradients = rng.standard_normal((10, 3, 2001)).astype(np.float32)

    def body(rank):
        adam = ps.optim.Adam(0.01)
        t = ps.table("w", 2001, updater=adam, mode="sync", init=1.0, block_nbytes=1000)
        for step in range(10):
            t.updater = adam.with_(lr=0.01 / (1 + step))
            t.push(gradients[step, rank], weight=rank + 1)
        return t.pull().wait().tobytes()

    bits = {each for n in (1, 2, 3) for each in run_workers(3, body, n)}
    assert len(bits) == 1


def test_the_first_k_make_a_round_and_who_is_late_is_told():
    pushed = threading.Barrier(3)
    came = threading.Event()

    def body(rank):
        t = ps.table("w", 4, updater=ps.optim.SGD(1.0), mode=ps.FirstOf(2))
        pushed.wait(60)
        if rank == 2:
            assert came.wait(60)
        result = t.push(np.full(4, -1.0 - rank, np.float32)).wait()
        came.set()
        return result.applied, result.why, t.pull().wait()[0]

    results = run_workers(3, body)
    assert [each[:2] for each in results] == [(True, ""), (True, ""), (False, "late")]
    assert [each[2] for each in results] == [1.5] * 3


def test_a_worker_that_has_left_is_not_waited_for():
    def body(rank):
        t = ps.table("w", 4, updater=ps.optim.SGD(1.0), mode="sync")
        for _ in range(2 + 3 * rank):
            t.push(np.full(4, -1.0 - rank, np.float32)).wait()
        session().leave()
        return True

    assert run_workers(2, body) == [True, True]


def test_a_table_of_async_pushes_counts_what_they_missed():
    def body(rank):
        t = ps.table("w", 4, updater=ps.optim.SGD(1.0))
        t.pull().wait()
        rc.barrier()
        for _ in range(3):
            t.push(np.ones(4, np.float32)).wait()
        rc.barrier()
        return ps.stats()[0]["tables"]["w"]["0"]["staleness"] if rank == 0 else None

    seen = run_workers(2, body)[0]
    assert sum(seen.values()) == 6
    assert max(map(int, seen)) == 5


# --- mistakes -----------------------------------------------------------------------------------
def test_what_is_assigned_may_begin_as_nan_and_what_does_not_count_may_be():
    def body(rank):
        first = np.array([np.nan, np.inf])
        assigned = ps.table("a", 2, updater=ps.optim.Assign(), init=first)
        added = ps.table(
            "b", 2, updater=ps.optim.Add(), init=first * rank if rank else first[1:].repeat(2)
        )
        return assigned.pull().wait().tolist(), added.pull().wait().tolist()

    for assigned, added in run_workers(2, body):
        assert str(assigned) == "[nan, inf]"
        assert added == [np.inf] * 2


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda t: t.push(np.ones(5, np.float32)), ValueError, "5 elements, shape .5,., for 4"),
        (lambda t: t.push(np.ones(4)), TypeError, "dtype float64, and the table has float32"),
        (lambda t: t.push(np.ones(4, np.float32), weight=0), ValueError, "weight is 0"),
        (lambda t: t.push(np.ones(1, np.float32), where=slice(0, 4, 4)), ValueError, "with step 1"),
        (
            lambda t: t.pull(out=np.ones(4)),
            ValueError,
            "out must be contiguous and writeable, of float32",
        ),
        (lambda t: t.pull(out=np.ones(8, np.float32)[::2]), ValueError, "out must be contiguous"),
        (lambda _: ps.table("w", 5), rc.MismatchError, r"it has shape=\(?\[?4.* with shape="),
        (lambda _: ps.table("x", -1), ValueError, "shape is"),
        (lambda _: ps.table("x", 2.5), TypeError, "shape is 2.5"),
        (lambda _: ps.table(7, 4), TypeError, "name must be a str, not 7"),
        (lambda _: ps.table("x", 4, updater="Adam"), TypeError, "updater must be .* not 'Adam'"),
        (
            lambda _: ps.table("x", (2**31, 2**31)),
            ValueError,
            "4611686018427387904 .* 1048576 blocks",
        ),
        (
            lambda _: ps.table("x", 2**44, block_nbytes=2**45, updater=ps.optim.Adam()),
            rc.RingcommError,
            "server . on .* is to own 211106232532992 bytes of its 17592186044416 elements",
        ),
        (lambda _: ps.hashtable("x", 2**40), ValueError, "dim is 1099511627776"),
        (lambda _: ps.table("x", 4, "int32"), ValueError, "dtype is int32; it must be float32"),
        (lambda _: ps.table("x", 4, mode="fast"), ValueError, "mode is 'fast'; it must be 'sync'"),
        (lambda _: ps.table("x", 4, init=np.ones(3)), ValueError, "init has shape .3,., the table"),
        (lambda _: ps.table("x", 4, init=np.nan), ValueError, "init is NaN in 1 of 1 elements"),
        (
            lambda _: ps.table("x", (2, 2), init=[[0, np.inf], [np.nan, np.nan]]),
            ValueError,
            "init is NaN in 2 of 4 elements, first in element 2, and no update",
        ),
    ],
)
def test_a_mistake_is_told_to_who_made_it_and_changes_nothing(call, error, message):
    def body(rank):
        t = ps.table("w", 4, updater=ps.optim.Add())
        if rank == 0:
            with pytest.raises(error, match=message):
                call(t)
        rc.barrier()
        t.push(np.ones(4, np.float32)).wait()
        rc.barrier()
        return t.pull().wait().tolist()

    assert run_workers(2, body) == [[2.0] * 4] * 2


def test_a_wait_that_is_too_long_names_the_server_and_can_be_taken_up_again():
    told = threading.Event()

    def body(rank):
        t = ps.table("w", 4, updater=ps.optim.SGD(1.0), mode="sync")
        if rank == 0:
            future = t.push(np.ones(4, np.float32))
            with pytest.raises(
                rc.CommTimeoutError, match=r"push\[w\]: no answer within 0.1 s"
            ) as e:
                future.wait(0.1)
            assert e.value.missing == (2,)
            told.set()
            return future.wait().applied
        assert told.wait(60)
        return t.push(np.ones(4, np.float32)).wait().applied

    assert run_workers(2, body) == [True, True]


def test_more_than_the_credit_waits_and_goes_on(monkeypatch):
    monkeypatch.setattr(request_order, "CREDIT_NBYTES", 200_000)
    most = []

    def body(rank):
        t = ps.table("w", 25_000, updater=ps.optim.Add())
        for _ in range(20):
            t.push(np.ones(25_000, np.float32))
            most.append(max(session().client.credit.n_bytes.values()))
        return t.pull().wait()[0]

    assert run_workers(1, body) == [20.0]
    assert max(most) <= 200_000


# --- other layouts ------------------------------------------------------------------------------
@pytest.mark.parametrize("n_servers", [1, 3])
def test_servers_may_live_with_workers(n_servers):
    def body(rank):
        assert (rc.rank(), rc.size()) == (rank, 3)
        t = ps.table("w", 1000, updater=ps.optim.Add(), block_nbytes=500)
        t.push(whole_numbers(rank, 1000)).wait()
        rc.barrier()
        return t.pull().wait()

    for values in run_workers(3, body, n_servers, colocated=True):
        assert np.array_equal(values, total(3, 1000))


def test_collectives_of_workers_go_on_beside_requests():
    def body(rank):
        t = ps.table("w", 100_000, updater=ps.optim.Add())
        total = 0
        for step in range(10):
            future = t.push(np.ones(100_000, np.float32))
            total += rc.allreduce(np.array([rank + step])).item()
            future.wait()
        return total

    assert run_workers(2, body) == [2 * sum(range(10)) + 10] * 2


def test_a_slice_is_pushed_and_pulled():
    def body(rank):
        t = ps.table("w", 100, updater=ps.optim.Adagrad(1.0), block_nbytes=120, init=5.0)
        t.push(np.ones(20, np.float32), where=slice(25, 45)).wait()
        part = t.pull(where=slice(20, 50)).wait()
        whole = t.pull().wait()
        np.testing.assert_array_equal(whole[20:50], part)
        np.testing.assert_array_equal(np.flatnonzero(whole != 5.0), np.arange(25, 45))
        return True

    assert run_workers(1, body, 2) == [True]


def test_a_table_may_have_thousands_of_blocks():
    def body(rank):
        t = ps.table("w", 3000, updater=ps.optim.Add(), block_nbytes=4)
        t.push(np.ones(3000, np.float32))
        return t.pull().wait().sum()

    assert run_workers(1, body, 2) == [3000.0]


def test_large_pushes_that_nobody_has_answered_keep_their_values(monkeypatch):
    """The memory of an answered push serves the next one, and of no other."""

    def body(rank):
        t = ps.table("w", 10_000, updater=ps.optim.Add())
        t.push(np.zeros(10_000, np.float32)).wait()  # leaves memory for the next
        held, client_of = [], session().client
        push = client_of.push
        monkeypatch.setattr(client_of, "push", held.append)
        pushes = [t.push(np.full(10_000, 10.0**k, np.float32)) for k in range(4)]
        for each in held:
            push(each)
        for each in pushes:
            each.wait()
        return np.unique(t.pull().wait()).tolist()

    assert run_workers(1, body) == [[1111.0]]
