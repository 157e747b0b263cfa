"""News of what changes: nothing is left out, nothing is late, and it ends when the job does."""

import itertools
import threading
import time

import numpy as np
import pytest
from harness import outcomes
from ps_jobs import deadline, run_workers

import ringcomm as rc
from ringcomm import ps
from ringcomm.engine.api.world import engine
from ringcomm.engine.core.current import serve_thread
from ringcomm.engine.core.lifecycle import leave
from ringcomm.ps import functions
from ringcomm.ps.job import session
from ringcomm.ps.placement import Move
from ringcomm.ps.rebalancing import move_all

COUNT, BLOCK = 600, 400  # bytes of a block: 6 blocks of 100 float32
KEYS = np.arange(1, 50, dtype=np.uint64)


def run_with_follower(work, follow, n_workers=2, n_servers=2, deadline_s=10):
    """Run work(rank) on workers and follow() on an evaluator of its own script."""

    def main(rank):
        is_follower = rank == n_workers
        try:
            ps.init(n_servers, role="evaluator" if is_follower else None, deadline_s=deadline_s)
            result = follow() if is_follower else work(rank)
            leave(engine(), "done")
        except SystemExit:
            leave(engine(), "done")
            return None
        return result

    results = outcomes(n_workers + 1 + n_servers, main)
    for each in results:
        if isinstance(each, BaseException):
            raise each
    return results[:n_workers], results[n_workers]


def table(name="w", **options):
    options.setdefault("updater", ps.optim.Add())
    return ps.table(name, COUNT, block_nbytes=BLOCK, **options)


class Mirror:
    """What somebody knows by news alone."""

    def __init__(self):
        self.tables, self.rows = {}, {}

    def update(self, news):
        for name, delta in news.tables.items():
            spec = news.specs[name]
            values = self.tables.setdefault(name, np.full(spec.count, np.nan, spec.dtype))
            for where, block in delta.blocks:
                values[where] = block
        for name, delta in news.hashtables.items():
            delta.update(self.rows.setdefault(name, {}))


@pytest.mark.usefixtures("wire")
def test_a_follower_knows_all_that_was_done_and_ends_with_the_workers():
    acknowledged, begun = [], threading.Event()

    def work(rank):
        t = table()
        kv = ps.hashtable("e", 4, updater=ps.optim.SGD(1.0))
        assert begun.wait(60)
        for k in range(1, 40):
            t.push(np.ones(COUNT, np.float32))
            kv.push(KEYS[:k], np.ones((k, 4), np.float32))
            if rank == 0:
                move_all(session(), [Move((t.number, k % 6), -1, k // 6 % 2)]).wait()
            elif k % 5 == 0:
                kv.erase(KEYS[:3])
            if rank:
                t.pull().wait()
                acknowledged.append((time.monotonic(), k))
        late = table("late", init=np.arange(float(COUNT)))
        late.push(np.ones(COUNT, np.float32)).wait()
        rc.barrier()
        there = KEYS[kv.metadata(KEYS).wait().pushes > 0]
        rows = dict(zip(there.tolist(), kv.pull(there).wait(), strict=True))
        return t.pull().wait(), late.pull().wait(), rows

    def follow():
        mirror, n_news = Mirror(), 0
        with ps.subscribe(every=0.0) as subscription:
            for news in subscription:
                mirror.update(news)
                n_news += 1
                begun.set()
                must = max((k for at, k in tuple(acknowledged) if at < news.asked_at), default=0)
                assert mirror.tables["w"].min() >= must
        assert n_news > 3
        return mirror

    [(values, late, rows), _], mirror = run_with_follower(work, follow)
    np.testing.assert_array_equal(mirror.tables["w"], values)
    np.testing.assert_array_equal(mirror.tables["late"], late)
    assert mirror.rows["e"].keys() == rows.keys()
    for key, row in rows.items():
        np.testing.assert_array_equal(mirror.rows["e"][key], row)


def test_news_have_what_has_changed_and_no_more():
    def body(rank):
        t, other = table(), table("other")
        with ps.subscribe(t, every=0.0) as news:
            first = next(news)
            assert list(first.tables) == ["w"]
            assert first.specs["w"].shape == (COUNT,)
            other.push(np.ones(COUNT, np.float32)).wait()
            t.push(np.ones(100, np.float32), where=slice(200, 300)).wait()
            [(where, values)] = next(news).tables["w"].blocks
        assert list(news) == []
        return where == slice(200, 300) and values.max() == 1

    assert run_workers(1, body, 2) == [True]


def test_it_asks_no_more_often_than_it_is_told_to():
    every, n_news = 0.05, 5

    def body(rank):
        t = table()
        asked = []
        with ps.subscribe(every=every) as subscription:
            for news in itertools.islice(subscription, n_news):
                asked.append(news.asked_at)
                t.push(np.ones(COUNT, np.float32)).wait()
        return np.diff(asked).min() >= every and asked[-1] - asked[0] < 10 * n_news * every

    assert run_workers(1, body) == [True]


def test_news_do_not_wait_for_rounds():
    def work(rank):
        t = table(mode="sync", updater=ps.optim.SGD(1.0))
        if rank == 0:
            with ps.subscribe(every=0.0) as news:
                own = t.push(np.full(COUNT, -1.0, np.float32))  # waits for the other
                assert (next(news).tables["w"].blocks[0][1] == 0).all()
                has_seen.set()
                assert (next(news).tables["w"].blocks[0][1] == 2).all()
            return own.wait().applied
        assert has_seen.wait(60)
        return t.push(np.full(COUNT, -3.0, np.float32)).wait().applied

    has_seen = threading.Event()
    assert run_workers(2, work) == [True, True]


@pytest.mark.parametrize("how", ["close", "leave"])
def test_it_ends_in_another_thread_when_it_is_closed_or_the_worker_leaves(how):
    def body(rank):
        t = table()
        own, came, has_ended = engine(), threading.Event(), threading.Event()
        subscription = ps.subscribe(every=1000.0)

        def follow():
            with serve_thread(own):
                for _ in subscription:
                    came.set()
            has_ended.set()

        threading.Thread(target=follow, daemon=True).start()
        assert came.wait(60)
        t.push(np.ones(COUNT, np.float32)).wait()  # beside a thread that waits for 1000 s
        if how == "close":
            subscription.close()
        else:
            leave(engine(), "done")
        return has_ended.wait(60)

    assert run_workers(1, body) == [True]


def test_a_server_that_does_not_answer_is_an_error(monkeypatch):
    monkeypatch.setattr(functions, "_registered", {})
    may_end = threading.Event()

    @ps.function
    def block(values):
        assert may_end.wait(60)

    def body(rank):
        t = table()
        with ps.subscribe(every=0.0) as news:
            next(news)
            future = t.call("block")
            with deadline(1), pytest.raises(rc.CommTimeoutError, match="no answer within 1 s"):
                next(news)
            may_end.set()
            future.wait(60)
        return True

    assert run_workers(1, body) == [True]


def test_a_mistake_is_told():
    def body(rank):
        table()
        for every in (-1, float("inf"), float("nan")):
            with pytest.raises(ValueError, match=r"ps.subscribe: every is"):
                ps.subscribe(every=every)
        with ps.subscribe() as news, ps.snapshot(), pytest.raises(rc.RingcommError, match="not wi"):
            next(news)
        return True

    assert run_workers(1, body) == [True]
