"""A rank that stands by takes the place of a worker, or an evaluator, that died."""

import json
import logging
import threading
import time

import numpy as np
import pytest
from harness import DEADLINE_S, at_length, wait_until
from ps_ranks_as_threads import Boom, ended, kill_server, run_all

import ringcomm as rc
from ringcomm import ps
from ringcomm.config import Settings
from ringcomm.data import WorkQueue
from ringcomm.engine.core.group import Group
from ringcomm.ps import evaluation
from ringcomm.ps.control.commands import MEET, STAND_STILL
from ringcomm.ps.members import stand_by
from ringcomm.ps.members.let_in import let_in
from ringcomm.ps.placement.replacement_workers import Newcomer
from ringcomm.ps.session import Session, session

ELASTIC = Settings(timeout_s=DEADLINE_S, elastic=1)
KEYS = np.arange(60, dtype=np.uint64)
N = 600
STEPS = 30
PUSHED = (0.0, 3.0, 9.0)  # by each worker, in each step
MODES = ["sync", "async", ps.SSP(1), ps.FirstOf(2), ps.FirstOf(3)]


def run(body, n_workers, n_dead, *, spares=1, n_servers=2, **options):
    """Return what each worker that lives has returned, and those that joined."""
    results = run_all(n_workers, body, n_servers, settings=ELASTIC, worker_spares=spares, **options)
    return [each for each in ended(results, n_dead) if not isinstance(each, str)]


def tables(mode):
    add = ps.optim.Add()
    table = ps.table("w", N, "float64", updater=add, mode=mode, block_nbytes=400, init=np.zeros(N))
    return table, ps.hashtable("emb", 2, updater=add, mode=mode, dtype="float64")


def step_once(table, rows, x):
    pushed, of_rows = table.push(np.full(N, x)), rows.push(KEYS, np.full((60, 2), x))
    pushed.wait()
    of_rows.wait()
    table.pull().wait()
    rows.pull(KEYS).wait()
    ps.complete_step()


def await_newcomers(n):
    """Stand between two steps until n ranks have joined."""
    current = session()
    until = lambda: len(current.layout.joined) >= n  # noqa: E731
    while not until():
        is_asked = lambda: until() or bool(current.newcomers)  # noqa: E731
        assert current.client.drive_until(is_asked, "test", DEADLINE_S)
        let_in(current)


# --- workers ------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", at_length(MODES, ["sync", MODES[2], MODES[4]]), ids=str)
def test_a_newcomer_trains_in_the_place_of_a_worker(mode):
    """The values are exactly those of the steps that were made: the mean is over 3, 2, and 3."""

    def body(rank):
        table, rows = tables(mode)
        place, began, joined = ps.rank(), ps.step_number(), session().is_newcomer
        assert (rc.rank(), rc.size(), ps.size()) == (place, 3, 3)
        while ps.step_number() < STEPS:
            if place == 1 and not joined and ps.step_number() == 5:
                raise Boom
            if ps.step_number() == 10 and not joined:
                await_newcomers(1)
            step_once(table, rows, PUSHED[place])
        session().rest()  # in FirstOf(2), one that is slower is not left alone
        group = ps.live_workers()
        rc.barrier(group=group)
        values, of_rows = table.pull().wait(), rows.pull(KEYS).wait()
        rc.barrier(group=group)
        return place, began, joined, values, of_rows, group.size

    results = run(body, 3, 1)
    assert sorted(place for place, *_ in results) == [0, 1, 2]
    (began,) = (began for _, began, joined, *_ in results if joined)
    slack = mode.bound if mode == ps.SSP(1) else 0  # the others may be behind who died
    assert 5 - slack <= began <= 11
    assert {each[-1] for each in results} == {3}
    for *_, values, of_rows, _ in results:
        assert (values == values[0]).all()
        assert (of_rows == of_rows[0]).all()
        if str(mode) in ("sync", "FirstOf(3)"):
            expected = 4.0 * (5 + STEPS - began) + 4.5 * (began - 5)
        else:
            expected = 9.0 * STEPS + 3.0 * (5 + STEPS - began)
        if str(mode) != "FirstOf(2)":
            assert values[0] == of_rows[0, 0] == expected


def test_where_nobody_dies_a_spare_ends_with_the_job_and_trains_nothing():
    ran = []

    def body(rank):
        ran.append(rank)
        table, rows = tables("sync")
        step_once(table, rows, 1.0)
        return table.pull().wait()[0]

    results = run_all(2, body, 1, settings=ELASTIC, worker_spares=2)
    assert results == [1.0, 1.0, *["ended with 0"] * 3]
    assert sorted(ran) == [0, 1]


def test_a_newcomer_goes_on_alone_if_all_workers_have_died():
    def body(rank):
        table, rows = tables("sync")
        began = ps.step_number()
        while ps.step_number() < STEPS:
            if not session().is_newcomer and ps.step_number() == 5 + ps.rank():
                raise Boom  # worker 1 makes step 5 alone
            step_once(table, rows, 1.0)
        assert ps.is_chief()
        return began, table.pull().wait()[0], rows.pull(KEYS).wait()[0, 0]

    ((began, *values),) = run(body, 2, 2)
    assert began in (5, 6)  # beside worker 1, or once it was dead
    assert values == [STEPS, STEPS]


def test_the_place_of_a_newcomer_is_taken_again_and_the_chief_is_who_was_there_first():
    """Rank 0 is the chief, then rank 2; of the newcomers rank 3 dies, then rank 4 is followed."""

    def body(rank):
        table, rows = tables("sync")
        chiefs = {ps.is_chief()}
        while ps.step_number() < STEPS:
            step = ps.step_number()
            if (rank, step) in ((0, 3), (1, 3)):
                raise Boom
            if rank == 2 and step == 6:
                await_newcomers(2)
            if rank == 2 and step == 20:
                await_newcomers(3)
            if rank == 3 and step == 12:
                raise Boom
            step_once(table, rows, 1.0)
            chiefs.add(ps.is_chief())
        return rank, ps.rank(), chiefs, table.pull().wait()[0]

    results = run(body, 3, 3, spares=3)
    assert [rank for rank, *_ in results] == [2, 4, 5]
    assert sorted(place for _, place, *_ in results) == [0, 1, 2]
    assert [chiefs for _, _, chiefs, _ in results] == [{False, True}, {False}, {False}]
    assert {values for *_, values in results} == {STEPS}


def test_should_stop_is_true_in_the_same_step_also_on_a_newcomer():
    def body(rank):
        table, rows = tables("sync")
        while not ps.should_stop():
            if rank == 1 and ps.step_number() == 3:
                raise Boom
            if rank == 0 and ps.step_number() == 6:
                await_newcomers(1)
            step_once(table, rows, 1.0)
            if ps.is_chief() and ps.step_number() == STEPS:
                ps.stop()
        return ps.step_number(), table.pull().wait()[0]

    results = run(body, 3, 1)
    assert len(results) == 3
    assert len({*results}) == 1
    assert results[0][0] == results[0][1] >= STEPS


def test_once_a_worker_has_left_no_place_is_taken():
    has_left = threading.Event()

    def body(rank):
        table, rows = tables("async")
        step_once(table, rows, 1.0)
        if rank == 0:
            session().leave()
            has_left.set()
            return "left"
        assert has_left.wait(DEADLINE_S)
        if rank == 1:
            raise Boom
        for _ in range(20):
            step_once(table, rows, 1.0)
        return len(session().layout.joined)

    assert run(body, 3, 1) == [0]


@pytest.mark.parametrize("moment", ["asks", "is on its way", "has its place"])
def test_a_spare_that_dies_is_followed_by_another(monkeypatch, moment):
    real, has_begun, is_on_its_way = (
        stand_by._await_place,
        threading.Semaphore(0),
        threading.Event(),
    )
    take_order = Session.take_order
    others = 3 if moment == "asks" else 2  # rank 3 comes to the later moments after rank 2

    def die_if_first(current, *, evaluates):
        if current.engine.job_rank != 2:
            has_begun.release()
            return real(current, evaluates=evaluates)
        if moment == "is on its way":
            stand_by.ask_leader(current.client, "test", "stand by", evaluates=evaluates)
            until = is_on_its_way.is_set
            assert current.client.drive_until(until, "test", DEADLINE_S)
        elif moment == "has its place":
            assert real(current, evaluates=evaluates)
        # Whoever still makes a group in ps.init() would fail, too.
        assert all(has_begun.acquire(timeout=DEADLINE_S) for _ in range(others))
        raise Boom

    def note(current, frame):
        take_order(current, frame)
        if json.loads(frame.meta)["do"] == STAND_STILL:
            is_on_its_way.set()

    monkeypatch.setattr(stand_by, "_await_place", die_if_first)
    monkeypatch.setattr(Session, "take_order", note)

    def body(rank):
        table, rows = tables("sync")
        if rank < 2:
            has_begun.release()
        while ps.step_number() < STEPS:
            if rank == 1 and ps.step_number() == 3:
                raise Boom
            if rank == 0 and ps.step_number() == 6:
                while 3 not in session().layout.joined:
                    await_newcomers(1 + len(session().layout.joined))
            step_once(table, rows, 1.0)
        return rank, ps.rank(), session().layout.workers, table.pull().wait()[0]

    results = run(body, 2, 2, spares=2)
    assert results == [(0, 0, (0, 3), STEPS), (3, 1, (0, 3), STEPS)]


@pytest.mark.parametrize("fate", ["hangs", "dies"])
def test_a_newcomer_waits_for_no_worker_that_hangs_or_dies(monkeypatch, fate):
    """Rank 0 never says that it knows rank 2: that is an error which names it, unless it dies."""
    take_order, real, has_ended = Session.take_order, stand_by._await_place, threading.Event()

    def await_with_a_deadline(current, *, evaluates):
        current.client.deadline_s = 2.5 if fate == "hangs" else DEADLINE_S
        try:
            return real(current, evaluates=evaluates)
        finally:
            has_ended.set()

    def take_all_but_news(current, frame):
        if current.engine.job_rank == 0 and json.loads(frame.meta)["do"] == MEET:
            current.newcomers.clear()
            current.layout.join(Newcomer(2, "worker", 1, 1))
        else:
            take_order(current, frame)

    monkeypatch.setattr(stand_by, "_await_place", await_with_a_deadline)
    monkeypatch.setattr(Session, "take_order", take_all_but_news)

    def body(rank):
        table, rows = tables("async")
        if rank == 1:
            raise Boom
        if rank == 0:
            await_newcomers(1)
            if fate == "dies":
                raise Boom
            assert session().client.drive_until(has_ended.is_set, "test", DEADLINE_S)
        step_once(table, rows, 1.0)
        return rank

    results = run_all(2, body, 1, settings=ELASTIC, worker_spares=1)
    if fate == "dies":
        assert [each for each in ended(results, 2) if not isinstance(each, str)] == [2]
        return
    (error,) = (each for each in results if isinstance(each, rc.CommTimeoutError))
    assert "A rank that takes a place waits for worker 0. Worker 0 (rank 0 of the job)" in str(
        error
    )
    assert results[0] == 0  # the job goes on


@pytest.mark.parametrize("victim", [0, 1])
def test_a_server_with_copies_dies_while_a_newcomer_joins(victim):
    def body(rank):
        table, rows = tables("sync")
        while ps.step_number() < STEPS:
            if rank == 1 and ps.step_number() == 3:
                kill_server(victim)
                raise Boom
            if rank == 0 and ps.step_number() == 6:
                await_newcomers(1)
            step_once(table, rows, 1.0)
        return rank, table.pull().wait()[0], rows.pull(KEYS).wait()[0, 0]

    results = run(body, 2, 2, replication=2)
    assert results == [(0, STEPS, STEPS), (2, STEPS, STEPS)]


@pytest.mark.long
def test_the_copy_of_a_server_knows_the_newcomers():
    """A server dies after somebody has joined; copies that are made then know it, too."""

    def body(rank):
        table, rows = tables("sync")
        while ps.step_number() < STEPS:
            step = ps.step_number()
            if rank == 1 and step == 3:
                raise Boom
            if rank == 0 and step == 5:
                await_newcomers(1)
            if rank == 0 and step in (10, 20):
                if step == 20:
                    is_whole = lambda: all(each["copies"] == 2 for each in ps.stats())  # noqa: E731
                    while not is_whole():
                        session().client.drive_until(lambda: False, "test", 0.01)
                kill_server(step // 10 - 1)
            step_once(table, rows, PUSHED[ps.rank()])
        return table.pull().wait()[0], rows.pull(KEYS).wait()[0, 0]

    results = run(body, 3, 3, n_servers=3, replication=2)
    assert len(results) == 3
    assert len({*results}) == 1


@pytest.mark.parametrize("has_joined", [False, True])
def test_a_server_without_copies_dies_before_or_after_a_newcomer_joins(has_joined, tmp_path):
    def body(rank):
        opened = tables("sync")
        joined = session().is_newcomer
        if rank == 0:
            ps.save(tmp_path, step=0, background=False)
        while ps.step_number() < STEPS:
            try:
                step = ps.step_number()
                if rank == 1 and step == 3:
                    raise Boom
                if rank == 0 and step == 6 and (has_joined or session().n_recovered):
                    await_newcomers(1)
                if rank == 0 and step == (8 if has_joined else 5) and not session().n_recovered:
                    kill_server(1)
                    while True:
                        opened[0].pull().wait()
                step_once(*opened, 1.0)
            except rc.ServerLostError:
                ps.recover(tmp_path)
        return joined, opened[0].pull().wait()[0], opened[1].pull(KEYS).wait()[0, 0]

    results = run(body, 2, 2)
    assert results == [(False, STEPS, STEPS), (True, STEPS, STEPS)]


def test_who_has_not_heard_of_a_newcomer_before_a_loss_hears_of_it_as_all_recover(
    monkeypatch, tmp_path
):
    """The newcomer knows that it has its place, and waits until the others do."""
    take_order = Session.take_order

    def take_all_but_news(current, frame):
        if current.engine.job_rank != 0 or json.loads(frame.meta)["do"] != MEET:
            take_order(current, frame)
        else:
            kill_server(1)

    monkeypatch.setattr(Session, "take_order", take_all_but_news)

    def body(rank):
        opened = tables("sync")
        if rank == 0:
            ps.save(tmp_path, step=0, background=False)
        while ps.step_number() < STEPS:
            try:
                if rank == 1 and ps.step_number() == 3:
                    raise Boom
                if rank == 0 and ps.step_number() == 6 and not session().n_recovered:
                    while True:
                        session().client.drive_until(lambda: False, "test", 0.01)
                        let_in(session())
                        opened[0].pull().wait()
                step_once(*opened, 1.0)
            except rc.ServerLostError:
                ps.recover(tmp_path)
        return rank, session().layout.workers, opened[0].pull().wait()[0]

    assert run(body, 2, 2) == [(0, (0, 2), STEPS), (2, (0, 2), STEPS)]


def test_servers_end_with_a_rank_that_stood_by_if_nobody_lives_to_recover():
    """The leader alone tells it that nobody recovers; without more the others would wait for it."""

    def body(rank):
        tables("sync")
        kill_server(1)
        current = session()
        assert current.client.drive_until(lambda: current.client.loss, "test", None)
        time.sleep(0.1)  # nothing tells a worker that the other rank waits for a recovery now
        raise Boom

    results = run_all(1, body, 3, settings=ELASTIC, worker_spares=1)
    assert ended(results, 2) == ["ended with 0"] * 3


def test_a_newcomer_takes_parts_of_a_work_queue():
    def body(rank):
        table, rows = tables("async")
        taken = []
        if rank == 0:
            await_newcomers(1)
        for part in WorkQueue(80, 2):
            if rank == 1:
                raise Boom
            taken += part.tolist()
            step_once(table, rows, 1.0)
        return rank, taken

    results = run(body, 2, 1)
    assert [rank for rank, _ in results] == [0, 2]
    assert all(taken for _, taken in results)
    assert sorted(each for _, taken in results for each in taken) == [*range(80)]


def test_who_waits_for_a_group_is_in_it_with_a_newcomer_that_comes_meanwhile(monkeypatch):
    """Worker 2 waits before the newcomer has a place, and the chief lets it in after that."""
    has_asked = threading.Event()
    of_job = Group.of_job

    def ask(ranks):
        if [*ranks] == [0, 2]:
            has_asked.set()
        return of_job(ranks)

    def body(rank):
        table, _ = tables("sync")
        table.pull().wait()
        if rank == 1:
            raise Boom
        if rank == 0:
            has_asked.wait(2.0)  # it may wait for the chief's word instead
            await_newcomers(1)
        return [*ps.live_workers().ranks]

    monkeypatch.setattr(Group, "of_job", staticmethod(ask))
    assert run(body, 3, 1) == [[0, 3, 2]] * 3


def test_who_waits_for_a_group_is_told_that_the_chief_is_late(caplog):
    def body(rank):
        if rank == 0:
            wait_until(lambda: caplog.records, "worker 1 has not warned")
        return [*ps.live_workers().ranks]

    settings = Settings(timeout_s=DEADLINE_S, elastic=1, stall_warning_s=0.2)
    with caplog.at_level(logging.WARNING, logger="ringcomm"):
        assert run_all(2, body, settings=settings, worker_spares=1)[:2] == [[0, 1]] * 2
    assert "rank 0, the chief, has not called it within 0.2 s" in caplog.records[0].getMessage()


def test_collectives_of_a_newcomer_say_that_its_group_has_ended():
    def body(rank):
        table, rows = tables("async")
        if rank == 1:
            raise Boom
        if rank == 0:
            await_newcomers(1)
        else:
            with pytest.raises(rc.PeerFailedError, match=r"in the place of rank 1.*live_workers"):
                rc.barrier()
            with pytest.raises(rc.PeerFailedError, match=r"ps\.live_workers\(\) makes a group"):
                rc.allreduce(np.ones(3))
        step_once(table, rows, 1.0)
        return rc.allreduce(np.ones(1), group=ps.live_workers(), op=rc.SUM)[0]

    assert run(body, 2, 1) == [2.0, 2.0]


# --- evaluators ---------------------------------------------------------------------------------
def test_an_evaluator_that_dies_is_followed_by_a_spare(monkeypatch):
    monkeypatch.setattr(evaluation, "_evaluation", None)

    @ps.evaluator(every=1)
    def evaluate(step):
        if session().engine.job_rank == 2:
            raise Boom
        table, _ = tables("sync")
        ps.report(step, {"value": table.pull().wait()[0]})

    def body(rank):
        table, rows = tables("sync")
        step_once(table, rows, 1.0)
        if rank == 0:
            (report, *_) = ps.reports(until=1)
            assert report.rank == 1
            assert report.metrics == {"value": 1.0}
        return rank

    results = run_all(1, body, 1, settings=ELASTIC, worker_spares=1, evaluators=1)
    assert ended(results, 1) == [0, "ended with 0", "ended with 0"]


# --- what is refused ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"settings": Settings()}, "worker_spares=1: without RINGCOMM_ELASTIC=1 any death ends"),
        ({"colocated": True}, "worker_spares=1: it does not go with colocated=True"),
        ({"worker_spares": -1}, "worker_spares=-1; at least 0"),
    ],
)
def test_spares_that_could_take_no_place_are_refused(options, why):
    options = {"settings": ELASTIC, "worker_spares": 1, **options}
    results = run_all(4, lambda rank: None, 1, **options)
    assert all(isinstance(each, rc.RingcommError) for each in results), results
    assert any(why in str(each) for each in results), results  # some may hear of another's first
