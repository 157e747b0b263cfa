"""A rank that stands by takes the place of a worker, or an evaluator, that died."""

import itertools
import logging
import random
import threading
import time
from collections import deque
from functools import partial

import numpy as np
import pytest
from harness import DEADLINE_S, at_length, wait_until
from ps_core_steps import KEY, arrive, core_of, leave, names, push
from ps_ranks_as_threads import Boom, ended, kill_server, run_all
from ps_simulation import Members
from ps_simulation_message_types import Request

import ringcomm as rc
from ringcomm import ps
from ringcomm.config import Settings
from ringcomm.data import WorkQueue
from ringcomm.engine.core.group import Group
from ringcomm.ps import evaluation
from ringcomm.ps.members import let_in
from ringcomm.ps.members.let_in import end_step
from ringcomm.ps.members.stand_by import _Spare
from ringcomm.ps.placement.replacement_workers import Beginning, Newcomer
from ringcomm.ps.protocol.frames import Coming, Header, Kind
from ringcomm.ps.server.core import events as on
from ringcomm.ps.server.core.actions import End, Late, Reply
from ringcomm.ps.server.core.core import Core
from ringcomm.ps.server.core.table_owners_and_units import Table
from ringcomm.ps.server.core.unit import AppliedHere, Unit
from ringcomm.ps.session import session
from ringcomm.ps.update_modes import FirstOf, Mode

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
        end_step(current)


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
    assert 5 <= began <= 11
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


@pytest.mark.parametrize("moment", ["await_place", "take", "_tell"])
def test_a_spare_that_dies_is_followed_by_another(monkeypatch, moment):
    real, has_begun = getattr(_Spare, moment), threading.Semaphore(0)

    def die_if_first(spare, *args, **kwargs):
        if spare._current.engine.job_rank == 2:
            # Whoever still makes a group in ps.init() would fail, too.
            assert all(has_begun.acquire(timeout=DEADLINE_S) for _ in range(others))
            raise Boom
        has_begun.release()
        return real(spare, *args, **kwargs)

    monkeypatch.setattr(_Spare, moment, die_if_first)
    others = 3 if moment == "await_place" else 2  # rank 3 comes to the later moments after rank 2

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
        return rank, table.pull().wait()[0]

    assert run(body, 2, 2, spares=2) == [(0, STEPS), (3, STEPS)]


@pytest.mark.parametrize("fate", ["hangs", "dies"])
def test_a_newcomer_waits_for_no_worker_that_hangs_or_dies(monkeypatch, fate):
    """Rank 0 never says that it knows rank 2: that is an error which names it, unless it dies."""
    real_tell, real_send, has_ended = _Spare._tell, let_in.send, threading.Event()

    def tell_with_a_deadline(spare, newcomer):
        spare._current.client.deadline_s = 0.5 if fate == "hangs" else DEADLINE_S
        try:
            real_tell(spare, newcomer)
        finally:
            has_ended.set()

    def send_but_seen(current, to, option, *meta):
        if not (option == Coming.SEEN and current.engine.job_rank == 0):
            real_send(current, to, option, *meta)

    monkeypatch.setattr(_Spare, "_tell", tell_with_a_deadline)
    monkeypatch.setattr(let_in, "send", send_but_seen)

    def body(rank):
        table, rows = tables("async")
        if rank == 1:
            raise Boom
        if rank == 0:
            await_newcomers(1)
            if fate == "dies":
                raise Boom
            assert has_ended.wait(DEADLINE_S)
        step_once(table, rows, 1.0)
        return rank

    results = run_all(2, body, 1, settings=ELASTIC, worker_spares=1)
    if fate == "dies":
        assert [each for each in ended(results, 2) if not isinstance(each, str)] == [2]
        return
    (error,) = (each for each in results if isinstance(each, rc.CommTimeoutError))
    assert error.missing == (0,)
    assert "worker 1 now, but rank 0" in str(error)
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


def test_servers_end_with_a_rank_that_stood_by_if_nobody_lives_to_recover():
    """The leader alone tells it that nobody recovers; without more the others would wait for it."""

    def body(rank):
        tables("sync")
        kill_server(1)
        current = session()
        assert current.client.drive_until(lambda: current.client.outstanding.loss, "test", None)
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


# --- decisions of one server --------------------------------------------------------------------
SYNC = Mode("sync")


def take(core, rounds, *, rank=7, place=1, clock=0, beside=2):
    """Let rank 7 take the place of worker 1; return what follows."""
    request = Request(rank, Header(Kind.JOIN, origin=rank, sequence=1))
    newcomer = Newcomer(rank, "worker", place, 1)
    begins = Beginning(clock, rounds)
    return core.handle(on.TookPlace(request, newcomer, begins, beside, (0, 1)), 0.0)


def die(core, rank):
    return names(core.handle(on.Died(rank), 0.0))


def test_a_round_that_has_begun_does_not_wait_for_a_newcomer():
    core = core_of(SYNC)
    die(core, 1)
    assert arrive(core, push(2, 1)) == ["End"]
    assert [each.is_late for each in take(core, {1: 2})] == [False]
    assert arrive(core, push(7, 2, clock=2)) == []
    assert arrive(core, push(2, 2, clock=1)) == ["End"]
    assert arrive(core, push(2, 3, clock=2)) == ["End"]
    assert arrive(core, push(2, 4, clock=3)) == []
    assert die(core, 7) == ["End"]


@pytest.mark.parametrize("why", ["a round is over", "the worker beside it is dead"])
def test_a_newcomer_that_comes_too_late_for_a_round_counts_in_none(why):
    core = core_of(SYNC, (1, 2, 3))
    die(core, 1)
    if why == "a round is over":
        arrive(core, push(2, 1))
        arrive(core, push(3, 1))
    else:
        die(core, 2)
    assert [each.is_late for each in take(core, {1: 0})] == [True]
    if why == "a round is over":
        arrive(core, push(2, 2, clock=1))
    assert arrive(core, push(3, 2, clock=core.unit_of(KEY).rounds.current)) == ["End"]


def test_a_newcomer_that_gives_its_place_back_is_not_waited_for():
    core = core_of(SYNC)
    die(core, 1)
    take(core, {1: 0})
    assert arrive(core, push(2, 1)) == []
    retract = on.Retracted(Request(7, Header(Kind.JOIN, origin=7, sequence=2)))
    assert names(core.handle(retract, 0.0)) == ["End", "Reply"]
    assert core.clients() == [2, 9]


def test_rounds_go_by_if_all_who_were_in_them_have_gone():
    """The newcomer begins with round 3; who was to make the one before has left."""
    core = core_of(SYNC)
    die(core, 1)
    take(core, {1: 3})
    assert leave(core, 2) == ["End", "End", "End"]
    assert arrive(core, push(7, 2, clock=3)) == ["End"]


def test_bounded_reads_wait_for_the_steps_of_a_newcomer():
    core = core_of(Mode("ssp", 1))
    die(core, 1)
    tick = Request(2, Header(Kind.TICK, origin=2, sequence=1, clock=5))
    core.handle(on.Ticked(tick), 0.0)
    take(core, {}, clock=5)
    assert core.clocks.all() == {2: 5, 7: 5}
    tick = Request(2, Header(Kind.TICK, origin=2, sequence=2, clock=7))
    core.handle(on.Ticked(tick), 0.0)
    assert core.clocks.slowest == 5


def test_a_place_in_rounds_of_first_of_waits_for_a_newcomer():
    core = core_of(FirstOf(2))
    die(core, 1)
    ask = lambda rank, n: on.Entered(  # noqa: E731
        Request(rank, Header(Kind.ENTER, origin=rank, sequence=n + 1, table=1, clock=n))
    )
    (reply,) = core.handle(ask(2, 0), 0.0)
    assert (reply.clock, reply.is_late) == (1, False)
    take(core, {1: 1})
    (reply,) = core.handle(ask(2, 1), 0.0)
    assert reply.clock == 1  # it is not over yet
    (reply,) = core.handle(ask(7, 1), 0.0)
    assert (reply.clock, reply.is_late) == (2, False)


# --- several servers, in any order of messages --------------------------------------------------
class Chance(random.Random):
    """Chooses what happens next."""

    def below(self, n):
        return self.randrange(n)

    def one_of(self, things):
        return things[self.randrange(len(things))]


class Server:
    """A core with one block, and what the rounds of the block were made of."""

    def __init__(self, index):
        self.core = Core(index, lambda: Members((1, 2, 3), (), (0, 1), 0))
        self.key = 1, index
        self.core.add_table(Table(1, "w", SYNC, True, [0, 1]))
        self.core.add_unit(Unit(self.key, SYNC, AppliedHere(), (1, 2, 3), is_ready=True))
        self.core.handle(on.Died(1), 0.0)
        self.rounds, self.late = [], []

    def hear(self, event, reply):
        """Take an event; pass to reply() who is answered, and whether that is late."""
        for action in self.core.handle(event, 0.0):
            if isinstance(action, End):
                self.rounds.append({each.worker for each in action.contributions})
                for each in action.contributions:
                    reply(each.worker, False)
            elif isinstance(action, Late):
                self.late.append(action.contribution.worker)
                reply(action.contribution.worker, True)
            elif isinstance(action, Reply):
                reply(action.request.source, action.is_late)


class World:
    """Two servers, workers 2 and 3, and rank 7, which comes in the place of worker 1.

    What a rank sends to a server arrives in this order, some time; a death behind all of it that
    arrives at all. `choices` says what happens next.
    """

    def __init__(self, choices):
        self.choices, self.servers = choices, [Server(0), Server(1)]
        self.channels = {(rank, to): deque() for rank in (2, 3, 7) for to in (0, 1)}
        self.made = {2: 0, 3: 0}  # rounds of each worker
        self.open = {}  # by rank: answers that it awaits, and whether one was late
        self.sequence = itertools.count(1)
        self.beside = self.stands_still = None
        self.dead, self.is_in, self.n_retracted = set(), False, 0

    def send(self, rank, event_of):
        self.open[rank] = [2, False]
        for to in (0, 1):
            self.channels[rank, to].append(event_of(to))

    def push(self, rank):
        n = self.made[rank]

        def event_of(to):
            kinds = {"sequence": next(self.sequence), "table": 1, "partition": to, "clock": n}
            return on.Pushed((1, to), Request(rank, Header(Kind.PUSH, origin=rank, **kinds)), None)

        self.send(rank, event_of)

    def take(self):
        live = [rank for rank in (2, 3) if rank not in self.dead]
        self.beside = self.choices.one_of(live)

    def answered(self, rank, is_late):
        if rank in self.dead:
            return
        self.open[rank][0] -= 1
        self.open[rank][1] |= is_late
        if self.open[rank][0]:
            return
        _, was_late = self.open.pop(rank)
        if rank == 7 and not self.is_in:
            self.go_on(was_late=was_late)
            return
        assert not was_late, (rank, self.made)
        self.made[rank] += 1

    def go_on(self, *, was_late):
        """The newcomer has its answers: to TAKE, or to RETRACT."""
        header = Header(Kind.JOIN, origin=7, sequence=next(self.sequence))
        if self.beside is None:
            self.take()
        elif was_late:
            self.beside = self.stands_still = None
            self.n_retracted += 1
            self.send(7, lambda _: on.Retracted(Request(7, header)))
        else:
            self.is_in, self.made[7] = True, self.made[self.stands_still]
            self.stands_still = None

    def stand_still(self, rank):
        """A worker says where the newcomer begins, which tells the servers."""
        self.stands_still = rank
        newcomer, begins = Newcomer(7, "worker", 1, 1), Beginning(0, {1: self.made[rank]})
        header = Header(Kind.JOIN, origin=7, sequence=next(self.sequence))
        self.send(7, lambda _: on.TookPlace(Request(7, header), newcomer, begins, rank, (0, 1)))

    def steps(self):
        """Return what may happen now."""
        steps = [partial(self.deliver, key) for key, queue in self.channels.items() if queue]
        for rank in self.made:
            if rank in self.dead or rank in self.open or self.made[rank] >= ROUNDS:
                continue
            if rank == self.beside and not self.is_in:
                if self.stands_still is None and 7 not in self.open:
                    steps.append(partial(self.stand_still, rank))
                continue  # the others may go on
            steps.append(partial(self.push, rank))
        if self.beside in self.dead and self.stands_still is None and 7 not in self.open:
            steps.append(self.take)
        return steps

    def deliver(self, key):
        self.servers[key[1]].hear(self.channels[key].popleft(), self.answered)

    def die(self, rank):
        """A worker is killed: of what it has sent, some arrives."""
        self.dead.add(rank)
        for to in (0, 1):
            queue = self.channels[rank, to]
            for _ in range(self.choices.below(len(queue) + 1)):
                queue.pop() if queue else None
            queue.append(on.Died(rank))


ROUNDS = 6


@pytest.mark.parametrize("seeds", at_length([range(20_000)], [range(200)]), ids=len)
def test_a_newcomer_is_in_the_same_rounds_on_all_servers_whoever_dies(seeds):
    """Servers hear of the chief's death at any time, also while the newcomer comes in."""
    n_retracted = 0
    for seed in seeds:
        world = World(rng := Chance(seed))
        world.take()
        dies_at = rng.below(60)
        for at in itertools.count():
            if at == dies_at and seed % 3:
                world.die(2)
            steps = world.steps()
            if not steps:
                break
            rng.one_of(steps)()
        live = {2, 3, 7} - world.dead
        assert all(world.made.get(rank) == ROUNDS for rank in live), (seed, world.made)
        first, second = (server.rounds for server in world.servers)
        assert len(first) == len(second) == ROUNDS, seed
        for one, other in zip(first, second, strict=True):
            assert one ^ other <= {2}, (seed, first, second)
        assert not any(rank in live for server in world.servers for rank in server.late), seed
        n_retracted += world.n_retracted
    assert n_retracted  # else nothing has come too late
