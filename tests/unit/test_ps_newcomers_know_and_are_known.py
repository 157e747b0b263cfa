"""A newcomer trains once all know it, and knows what they do; who died counts no more."""

import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from harness import DEADLINE_S
from ps_core_steps import arrive, core_of, freeze, give, names, order, push
from ps_ranks_as_threads import Boom, ended, run_all
from ps_simulation_message_types import Request

from ringcomm import ps
from ringcomm.config import Settings
from ringcomm.data import WorkQueue
from ringcomm.engine.control.live_parameters_and_callbacks import PROGRAM
from ringcomm.ps.control.commands import MEET
from ringcomm.ps.members import let_in
from ringcomm.ps.placement.replacement_workers import Beginning, Coming, Newcomer, Newcomers
from ringcomm.ps.protocol.frames import FrameHeader, FrameKind
from ringcomm.ps.server.core import events as on
from ringcomm.ps.server.core.actions import Reply
from ringcomm.ps.server.core.unit import AppliedHere, Unit
from ringcomm.ps.session import Session, session
from ringcomm.ps.update_modes import FirstOf, Mode

ELASTIC = Settings(timeout_s=DEADLINE_S, elastic=1)
SYNC = Mode("sync")
ORDER = Request(100, FrameHeader(FrameKind.ORDER))  # of the server that leads
RETRACT = on.Retracted(ORDER, 7)
LOOKS_S = 0.3  # a newcomer that waits for nobody has begun by then


def take(core, rounds, *, clock=0):
    """Let rank 7 take the place of worker 1, which has died, beside worker 2."""
    core.handle(on.Died(1), 0.0)
    newcomer, begins = Newcomer(7, "worker", 1, 1), Beginning(clock, rounds)
    return core.handle(on.TookPlace(ORDER, newcomer, begins, 2), 0.0)


def test_a_newcomer_begins_once_all_workers_know_it(monkeypatch):
    has_begun, was_early = threading.Event(), []
    take_order = Session.take_order

    def take_later(current, frame):
        if json.loads(frame.meta)["do"] == MEET and current.engine.job_rank == 2:
            was_early.append(has_begun.wait(LOOKS_S))
        take_order(current, frame)

    monkeypatch.setattr(Session, "take_order", take_later)

    def body(rank):
        if session().is_newcomer:
            has_begun.set()
        table = ps.table("w", 4, updater=ps.optim.Add(), mode="async", init=np.zeros(4))
        if rank == 1:
            raise Boom
        current = session()
        while not current.layout.joined:
            asked = lambda: bool(current.newcomers or current.layout.joined)  # noqa: E731
            assert current.client.drive_until(asked, "test", DEADLINE_S)
            let_in.let_in(current)
        table.pull().wait()
        return len(current.layout.joined)

    results = run_all(3, body, 1, settings=ELASTIC, worker_spares=1)
    assert [each for each in ended(results, 1) if not isinstance(each, str)] == [1, 1, 1]
    assert was_early == [False]


def test_a_push_of_who_died_counts_no_more_once_its_place_is_taken():
    """It may come twice, or late: by another way than the news of the death."""
    core = core_of(SYNC)
    assert arrive(core, push(1, 1)) == []
    take(core, {1: 0})
    assert arrive(core, push(1, 1)) == []
    assert arrive(core, push(1, 2, clock=1)) == []
    assert arrive(core, push(2, 1)) == []
    (ended_round,) = core.handle(on.Contributed((1, 0), push(7, 2), "g"), 0.0)
    assert {each.worker for each in ended_round.contributions} == {2, 7}


def test_nobody_reads_later_for_who_gave_its_place_back():
    core = core_of(Mode("ssp", 1))
    take(core, {}, clock=5)
    assert core.clocks.all() == {2: 0, 7: 5}
    assert names(core.handle(RETRACT, 0.0)) == ["Reply"]
    assert core.clocks.all() == {2: 0}


def test_who_is_alone_begins_behind_the_rounds_of_all_servers():
    others = [Beginning(5, {1: 4, 2: 9}, 7, 8, ("set a=1",)), Beginning(6, {1: 5}, 3, 9)]
    assert Beginning.behind(others) == Beginning(6, {1: 5, 2: 9}, 7, 9, ("set a=1",))


def test_a_place_is_given_to_the_lowest_who_fits_and_a_copy_knows_who_is_on_its_way():
    members = SimpleNamespace(workers=(1, 2), evaluators=(3,))
    first, copy = Newcomers(), Newcomers()
    assert first.next({7: True}, members) is None
    first.fallen |= {3: None, 1: None}
    assert first.next({8: False, 7: False}, members) == Newcomer(7, "worker", 1, 1)
    assert first.next({8: True, 7: False}, members) == Newcomer(8, "evaluator", 3, 1)
    first.coming = Coming(first.next({7: False}, members), 2, 5)
    copy.load(json.loads(json.dumps(first.state())))
    assert copy.coming == first.coming
    for each in (first, copy):
        each.take(each.coming.newcomer, Beginning(0, {}))
        assert each.next({8: False}, members) is None
        each.fallen[7] = None
        assert each.next({8: False}, members) == Newcomer(8, "worker", 7, 2)
        each.is_ending = True
        assert each.next({8: False}, members) is None


def test_the_chief_is_the_lowest_of_those_that_were_there_first():
    newcomers = Newcomers()
    newcomers.take(Newcomer(4, "worker", 0, 2), Beginning(0, {}))
    newcomers.take(Newcomer(5, "worker", 1, 1), Beginning(0, {}))
    assert newcomers.first_of({2, 4, 5}) == 2
    assert newcomers.first_of({4, 5}) == 5


def test_a_newcomer_beside_a_newcomer_is_in_the_rounds_of_tables_that_this_one_has_not_opened(
    monkeypatch,
):
    """It says for them where it has begun itself."""
    monkeypatch.setattr(PROGRAM, "taken", ["set lr=0.1", "pause", "resume"])
    monkeypatch.setattr(PROGRAM, "n_steps", 250)  # 240 of an earlier start
    table = SimpleNamespace(number=1, n_rounds=9, mode=SYNC)
    current = SimpleNamespace(
        clock=9, begins={1: 4, 2: 3}, tables={"w": table}, training=SimpleNamespace(n_calls=6),
        engine=SimpleNamespace(control=SimpleNamespace(n_steps=10)),
        client=SimpleNamespace(
            leader=0, n_losses=0, call_one=lambda _label, request, _read: request
        ),
    )  # fmt: skip
    said = json.loads(let_in._here(current, 5).meta)
    assert Beginning.of_json(said["begins"]) == Beginning(
        9, {1: 9, 2: 3}, 10, 250, (*PROGRAM.taken,)
    )
    assert (said["newcomer"], said["calls"]) == (5, 6)


def test_a_copy_that_was_made_later_says_the_same_of_clocks():
    """It knows the workers by place, in another order."""
    first, copy = core_of(SYNC), core_of(SYNC, (7, 2))
    take(first, {1: 0})
    copy.departures.lose([1], [1], [])
    copy.departures.load_newcomers(first.newcomers.state())
    copy.progress.load(first.progress.state())
    said = [
        [each.content for each in core.handle(order("freeze"), 0.0) if isinstance(each, Reply)]
        for core in (first, copy)
    ]
    assert json.dumps(said[0]) == json.dumps(said[1])
    assert said[0]


def test_what_moves_waits_for_nobody_who_gave_its_place_back():
    core = core_of(Mode("async"))
    take(core, {})
    freeze(core)
    give(core, "commit", epoch=1, moved=[(0, 1)], clocks=[(2, 0), (7, 0)])
    for rank in (2, 9):
        core.handle(on.Noted(rank, (1, 0), 1), 0.0)
    assert "Free" in names(core.handle(RETRACT, 0.0))


def test_rounds_of_first_of_go_by_if_who_was_let_into_them_has_died():
    """Round 0 has a place of a dead worker, and nobody is left for the other one."""
    core = core_of(FirstOf(2))
    core.handle(on.Without(1, 1, [0]), 0.0)
    take(core, {1: 1})
    core.handle(on.Died(2), 0.0)
    assert core.unit_of((1, 0)).rounds.current == 1
    request = push(7, 2, clock=1)
    actions = core.handle(on.Contributed((1, 0), request, "g", lets_in=True), 0.0)
    assert names(actions) == ["End"]


@pytest.mark.parametrize("mode", [SYNC, FirstOf(2)], ids=str)
def test_a_partition_that_comes_to_a_server_awaits_a_newcomer_in_its_own_rounds(mode):
    """All others have died; the rounds until its first one go by."""
    core = core_of(mode, index=1)
    take(core, {1: 5})
    core.handle(on.Died(2), 0.0)
    unit = Unit((1, 0), mode, AppliedHere(), core.live_workers, is_ready=True)
    core.add_unit(unit)
    unit.rounds.resume(3, [], None)
    assert unit.rounds.at == (3, False)
    assert names(unit.rounds.advance()) == ["End", "End"]
    assert unit.rounds.at == (5, False)


@pytest.mark.long
def test_a_part_that_a_dead_worker_had_is_given_to_another():
    """It had no time to break off its loop, which would give the part back."""
    kept = []

    def body(rank):
        parts = iter(WorkQueue(6, 1))
        if rank == 1:
            kept.append(parts)
            next(parts)
            raise Boom
        current = session()
        while 1 not in current.engine.watch.peers.gone:
            current.client.drive_until(lambda: False, "test", 0.01)
        return [int(part[0]) for part in parts]

    results = run_all(2, body, 1, settings=Settings(timeout_s=20, elastic=1))
    (taken,) = (each for each in ended(results, 1) if not isinstance(each, str))
    assert sorted(taken) == [*range(6)]
