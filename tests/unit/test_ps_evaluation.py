"""Evaluators and snapshots: one moment, whatever the workers do meanwhile."""

import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from harness import at_length, wait_until
from ps_ranks_as_threads import run_all, run_workers, stop_rounds

import ringcomm as rc
from ringcomm import ps
from ringcomm.ps import evaluation
from ringcomm.ps.client.request import NO_BODY
from ringcomm.ps.control import commands
from ringcomm.ps.job import session
from ringcomm.ps.protocol.frame_meta import packed_json
from ringcomm.ps.protocol.frames import FrameHeader, FrameKind, NewsOption
from ringcomm.ps.protocol.link import Delivery

pytestmark = [pytest.mark.usefixtures("wire"), pytest.mark.one_wire]


@pytest.fixture(autouse=True)
def no_evaluation(monkeypatch):
    monkeypatch.setattr(evaluation, "_evaluation", None)


def train(t, steps, count):
    for _ in range(steps):
        t.push(np.full(count, -1.0, np.float32))
        t.pull().wait()
        ps.complete_step()


@pytest.mark.parametrize("n_servers", [1, 3])
def test_an_evaluator_sees_one_round_at_a_time_and_reports_to_the_chief(n_servers):
    count, seen, came = 5000, [], []

    @ps.evaluator(every=3)
    def evaluate(step):
        t = ps.table("w", count, updater=ps.optim.SGD(1.0), mode="sync", block_nbytes=1000)
        values = t.pull().wait()
        assert len(set(values.tolist())) == 1  # of all blocks the same round
        assert values[0] >= step
        seen.append((step, values[0]))
        ps.report(step, {"value": values[0]})

    def body(rank):
        t = ps.table("w", count, updater=ps.optim.SGD(1.0), mode="sync", block_nbytes=1000)
        train(t, 12, count)
        if ps.is_chief():
            came.extend(ps.reports(until=12))
        return t.pull().wait()[0]

    assert run_workers(2, body, n_servers, evaluators=1) == [12.0, 12.0]
    steps = [step for step, _ in seen]
    assert steps == sorted(set(steps))
    assert [(each.step, each.metrics["value"]) for each in came] == seen
    assert seen[-1] == (12, 12.0)


def test_an_evaluator_that_was_slow_goes_on_with_the_step_of_now_and_says_so(caplog):
    is_trained, steps = threading.Event(), []

    @ps.evaluator(every=3)
    def evaluate(step):
        steps.append(step)
        assert is_trained.wait(60)
        ps.report(step, {})

    def body(rank):
        t = ps.table("w", 4, updater=ps.optim.SGD(1.0), mode="sync")
        train(t, 3, 4)
        wait_until(lambda: steps, "no evaluation")
        train(t, 10, 4)
        is_trained.set()
        return [each.step for each in ps.reports(until=13)]

    assert run_workers(1, body, evaluators=1) == [[3, 13]]
    assert steps == [3, 13]
    (said,) = [each.getMessage() for each in caplog.records if "evaluation" in each.getMessage()]
    assert "this one is of step 13, not 6" in said


def test_a_report_that_does_not_come_is_told_with_who_should_have_sent_it():
    @ps.evaluator(every=1)
    def evaluate(step):
        """Report nothing."""

    def body(rank):
        with pytest.raises(rc.CommTimeoutError, match=r"no report of step 1 .* rank 1.*ps.report"):
            ps.reports(until=1, timeout_s=0.1)
        return ps.reports()

    assert run_workers(1, body, evaluators=1) == [[]]


def test_a_report_that_comes_while_others_are_looked_at_is_found(monkeypatch):
    """Another thread drives, and takes what arrives."""

    @ps.evaluator(every=1000)
    def evaluate(step):
        """Report nothing."""

    def report(step):
        return Delivery(
            1,
            FrameHeader(FrameKind.NEWS, option=NewsOption.REPORT),
            packed_json([step, {}]),
            NO_BODY,
        )

    others = []

    def loads(text):
        if not others:  # the first report is looked at
            arrived = session().dispatcher.reports
            others.append(threading.Thread(target=arrived.append, args=(report(9),)))
            others[0].start()
            others[0].join(60)
        return json.loads(text)

    def body(rank):
        for step in (1, 2):
            session().dispatcher.reports.append(report(step))
        monkeypatch.setattr(evaluation, "json", SimpleNamespace(loads=loads))
        return [each.step for each in ps.reports(until=9)]

    assert run_workers(1, body, evaluators=1) == [[1, 2, 9]]


def test_who_waits_for_reports_hears_that_the_evaluator_has_left():
    @ps.evaluator(every=1)
    def evaluate(step):
        ps.report(step, {})
        raise SystemExit(0)  # in order: its program ends

    def body(rank):
        ps.complete_step()
        assert [each.step for each in ps.reports(until=1)] == [1]
        ps.complete_step()
        with pytest.raises(rc.PeerFailedError, match=r"rank 1, an evaluator, has left before"):
            ps.reports(until=2, timeout_s=60)
        return True

    assert run_workers(1, body, evaluators=1) == [True]


def test_reports_are_not_waited_for_where_nobody_evaluates():
    def body(rank):
        with pytest.raises(rc.RingcommError, match=r"nobody evaluates. Pass evaluators=1"):
            ps.reports(until=1)
        return True

    assert run_workers(1, body) == [True]


def test_pulls_of_a_snapshot_do_not_change_while_others_push():
    def body(rank):
        t = ps.table("w", 20_000, updater=ps.optim.Add(), block_nbytes=4000)
        t.push(np.ones(20_000, np.float32)).wait()
        with ps.snapshot():
            before = t.pull().wait()
            t.push(np.ones(20_000, np.float32)).wait()
            assert (t.pull().wait() == before).all()
        assert (t.pull().wait() == before + 1).all()
        return True

    assert run_workers(1, body, 2) == [True]


def test_a_dense_table_that_a_snapshot_does_not_hold_is_an_error():
    def body(_):
        with ps.snapshot():
            table = ps.table("late", 4, updater=ps.optim.Add(), init=np.ones(4))
            with pytest.raises(KeyError, match=r"pull\[late\]: the snapshot does not hold it"):
                table.pull().wait()
        return table.pull().wait().tolist()

    assert run_workers(1, body, 2) == [[1.0] * 4]


def test_a_mark_behind_init_is_refused():
    def body(rank):
        with pytest.raises(rc.ConfigError, match=r"must stand before ps.init"):
            ps.evaluator(every=1)(lambda _: None)
        return True

    assert run_workers(1, body) == [True]


@pytest.mark.long
@pytest.mark.parametrize("n_servers", [1, 3])
def test_a_snapshot_needs_one_attempt_however_fast_rounds_are(monkeypatch, n_servers):
    monkeypatch.setattr(commands, "_TRIES", 1)
    seen = []

    @ps.evaluator(every=1)
    def evaluate(step):
        t = ps.table("w", 30, updater=ps.optim.SGD(1.0), mode="sync", block_nbytes=40)
        values = t.pull().wait()
        assert len(set(values.tolist())) == 1
        seen.append(values[0])
        ps.report(len(seen), {})

    def body(rank):
        t = ps.table("w", 30, updater=ps.optim.SGD(1.0), mode="sync", block_nbytes=40)
        while not any(each.step == 30 for each in ps.reports()):
            train(t, 1, 30)

    run_workers(1, body, n_servers, evaluators=1)
    assert len(set(seen)) > 10


@pytest.mark.long
@pytest.mark.parametrize("n_servers", at_length([1, 2], [2]))
def test_tables_that_open_beside_a_snapshot_need_no_second_attempt(monkeypatch, n_servers):
    monkeypatch.setattr(commands, "_TRIES", 1)
    are_open = threading.Event()

    def body(rank):
        updater = ps.optim.SGD(1.0)
        if rank == 1:
            for number in range(150):
                ps.table(f"t{number}", 30, updater=updater, mode="sync", block_nbytes=40)
            are_open.set()
            return 0
        n = 0
        while not are_open.is_set():
            with ps.snapshot():
                n += 1
        return n

    first, _ = run_workers(2, body, n_servers)
    assert first > 3


def test_rounds_that_a_rank_has_stopped_go_on_once_it_has_left():
    def body(rank):
        t = ps.table("w", 30, updater=ps.optim.SGD(1.0), mode="sync")
        if rank == 1:
            stop_rounds()
            return None
        train(t, 5, 30)
        return t.pull().wait()[0]

    assert run_workers(2, body, 2) == [5.0, None]


def test_an_evaluator_that_raises_ends_the_job():
    @ps.evaluator(every=1)
    def evaluate(step):
        raise ValueError("bad metric")

    def body(rank):
        t = ps.table("w", 4, mode="sync")
        while True:
            train(t, 1, 4)

    results = run_all(1, body, evaluators=1)
    assert isinstance(results[1], ValueError)
    for each in (results[0], results[2]):
        assert isinstance(each, rc.PeerFailedError)
        assert "bad metric" in str(each)
