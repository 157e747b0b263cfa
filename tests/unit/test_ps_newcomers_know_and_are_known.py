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
from ringcomm.ps.members import let_in
from ringcomm.ps.members.stand_by import _Spare
from ringcomm.ps.placement.replacement_workers import Beginning, Newcomer, Newcomers
from ringcomm.ps.protocol.frames import Coming, FrameHeader, FrameKind
from ringcomm.ps.server.core import events as on
from ringcomm.ps.server.core.actions import Reply
from ringcomm.ps.server.core.unit import AppliedHere, Unit
from ringcomm.ps.session import session
from ringcomm.ps.update_modes import FirstOf, Mode

ELASTIC = Settings(timeout_s=DEADLINE_S, elastic=1)
SYNC = Mode("sync")
LOOKS_S = 0.3  # a newcomer that waits for nobody has begun by then


def take(core, rounds, *, clock=0):
    """Let rank 7 take the place of worker 1, which has died, beside worker 2."""
    core.handle(on.Died(1), 0.0)
    request = Request(7, FrameHeader(FrameKind.JOIN, origin=7, sequence=1))
    begins = Beginning(clock, rounds)
    return core.handle(on.TookPlace(request, Newcomer(7, "worker", 1, 1), begins, 2, (0, 1)), 0.0)


def test_a_newcomer_begins_once_all_workers_know_it(monkeypatch):
    has_begun, was_early = threading.Event(), []
    send = let_in.send

    def send_later(current, to, option, meta=b""):
        if option == Coming.SEEN and current.engine.job_rank == 2:
            was_early.append(has_begun.wait(LOOKS_S))
        send(current, to, option, meta)

    monkeypatch.setattr(let_in, "send", send_later)

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
            let_in.end_step(current)
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
    retract = on.Retracted(Request(7, FrameHeader(FrameKind.JOIN, origin=7, sequence=2)))
    assert names(core.handle(retract, 0.0)) == ["Reply"]
    assert core.clocks.all() == {2: 0}


def test_who_is_alone_begins_behind_the_rounds_of_all_servers():
    answers = [Beginning(5, {1: 4, 2: 9}), Beginning(6, {1: 5})]
    spare = SimpleNamespace(
        _ask=lambda *_: [{"begins": each.to_json()} for each in answers],
        _current=SimpleNamespace(client=SimpleNamespace(servers=(0, 1))),
    )
    assert _Spare._where_all_were(spare) == (Beginning(6, {1: 5, 2: 9}), -1)


def test_a_place_is_given_once_and_by_a_copy_too():
    members = SimpleNamespace(workers=(1, 2), evaluators=())
    first, copy = Newcomers(), Newcomers()
    first.fallen[1] = None
    ask = lambda rank: Request(rank, FrameHeader(FrameKind.JOIN, origin=rank, sequence=1))  # noqa: E731
    first.stand_by(ask(7), evaluates=False)
    _, given = first.give(members)
    assert given == Newcomer(7, "worker", 1, 1)
    first.stand_by(ask(8), evaluates=False)
    assert first.give(members) is None  # it is on its way
    copy.load(first.state())
    for each in (first, copy):
        each.stand_by(ask(8), evaluates=False)
        assert each.give(members) is None
        each.take(given, Beginning(0, {}))
        assert each.give(members) is None
        each.fallen[7] = None
        assert each.give(members)[1] == Newcomer(8, "worker", 7, 2)


def test_a_newcomer_beside_a_newcomer_is_in_the_rounds_of_tables_that_this_one_has_not_opened():
    """It says for them where it has begun itself."""
    said = []
    link = SimpleNamespace(send=lambda to, header, meta: said.append(json.loads(meta)))
    table = SimpleNamespace(number=1, n_rounds=9, mode=SYNC)
    current = SimpleNamespace(
        newcomers={5}, clock=9, begins={1: 4, 2: 3}, tables={"w": table},
        training=SimpleNamespace(n_calls=0), layout=SimpleNamespace(dead=set()),
        engine=SimpleNamespace(job_rank=3, watch=SimpleNamespace(peers=SimpleNamespace(gone=[]))),
        client=SimpleNamespace(
            link=link, loss=None, wait_until_sent=lambda _: None,
            drive_until=lambda *_: True,
        ), between_steps=None, take_back_refusal=lambda: None,
    )  # fmt: skip
    let_in.end_step(current)
    (here,) = said
    assert Beginning.of_json(here["begins"]) == Beginning(9, {1: 9, 2: 3})


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
    retract = on.Retracted(Request(7, FrameHeader(FrameKind.JOIN, origin=7, sequence=2)))
    assert "Free" in names(core.handle(retract, 0.0))


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
