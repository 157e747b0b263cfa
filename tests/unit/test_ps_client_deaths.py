"""Clients of a parameter server die: the others go on, and what was acknowledged counts once."""

import itertools
import threading
from dataclasses import replace

import numpy as np
import pytest
from harness import DEADLINE_S, wait_until
from ps_core_steps import (
    KEY,
    answer,
    arrive,
    ask_for_move,
    core_of,
    freeze,
    give,
    leave,
    names,
    order,
    push,
)
from ps_ranks_as_threads import Boom, ended, run_all

import ringcomm as rc
from ringcomm import ps
from ringcomm.config import Settings
from ringcomm.ps.client.dense.table import Table
from ringcomm.ps.control.commands import THAW
from ringcomm.ps.protocol.deaths import Deaths
from ringcomm.ps.protocol.frames import EntryOption, FrameHeader, FrameKind
from ringcomm.ps.roles import Layout
from ringcomm.ps.server.core import events as on
from ringcomm.ps.server.core.rounds import Entries
from ringcomm.ps.update_modes import FirstOf, Mode
from ringcomm.transport.peer_state import PeerTable

ELASTIC = Settings(timeout_s=DEADLINE_S, elastic=1)
MODES = ["sync", "async", ps.SSP(1), ps.FirstOf(2)]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_worker_that_dies_holds_nobody_up_and_the_lowest_that_lives_is_the_chief(mode, victim):
    def body(rank):
        table = ps.table("w", 600, "float64", updater=ps.optim.Add(), mode=mode, block_nbytes=1600)
        for step in range(12):
            if rank == victim and step == 5:
                table.push(np.full(600, 12.0))  # nobody may be let in for it, nor wait for it
                raise Boom
            table.push(np.full(600, 12.0)).wait()
            ps.complete_step()
            values = table.pull().wait()
        if rank == heir:  # which may be faster than the one that dies
            wait_until(ps.is_chief, "the chief has not changed", DEADLINE_S)
        return ps.is_chief(), values.tolist()

    heir = 1 if victim == 0 else 0
    results = ended(run_all(3, body, 2, settings=ELASTIC), 1)
    lived = [each for each in results if each != "ended with 0"]
    assert [is_chief for is_chief, _ in lived] == [True, False]
    if mode == "sync":
        assert all(values == [12.0 * 12] * 600 for _, values in lived)


def test_the_mean_is_over_those_that_live():
    def body(rank):
        table = ps.table("w", 1, "float64", updater=ps.optim.Add(), mode="sync")
        table.push(np.array([3.0 ** (rank + 1)])).wait()
        if rank == 1:
            raise Boom
        table.push(np.array([100.0 * (1 + rank)])).wait()
        return table.pull().wait().item()

    results = ended(run_all(3, body, settings=ELASTIC), 1)
    assert results[:2] == [13.0 + 200.0] * 2


def test_a_chief_that_dies_before_the_first_values_is_followed_by_the_next():
    all_are_there = threading.Barrier(3)  # a death within ps.init() ends the job

    def body(rank):
        all_are_there.wait(DEADLINE_S)
        if rank == 0:
            raise Boom
        table = ps.table("w", 5, "float64", init=np.arange(5) * float(rank))
        return table.pull().wait().tolist()

    results = ended(run_all(3, body, settings=ELASTIC), 1)
    assert results[:2] == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 2


def test_who_leaves_as_it_becomes_the_chief_has_no_first_values_to_send(monkeypatch):
    """Its thread would have failed, where nobody catches it."""
    has_begun, has_left, beginners = threading.Event(), threading.Event(), []

    def begin(table, begin_on=Table.begin):
        if threading.current_thread().name == "ringcomm-ps-chief":
            beginners.append(threading.current_thread())
            has_begun.set()
            assert has_left.wait(DEADLINE_S)
        begin_on(table)

    monkeypatch.setattr(Table, "begin", begin)

    def body(rank):
        ps.table("w", 5, init=np.zeros(5))
        rc.barrier()
        if rank == 0:
            raise Boom
        wait_until(lambda: ps.stats() and has_begun.is_set(), "a new chief")
        return rank

    results = ended(run_all(2, body, settings=ELASTIC), 1)
    has_left.set()
    (thread,) = beginners
    thread.join(DEADLINE_S)
    assert results == [1, "ended with 0"]
    assert not thread.is_alive()


def test_a_chief_whose_servers_are_late_with_the_first_values_sends_them_all_the_same(
    monkeypatch, caplog
):
    """Its thread has a deadline, as all waits; if it passes, no rank ends, and pulls go on."""
    is_open, pushes = threading.Barrier(3), []

    def push_initial(table, values, push_on=Table.push_initial):
        pushes.append(threading.current_thread().name)
        pushed = push_on(table, values)
        is_late, wait_on = len(pushes) == 2, pushed.wait
        waits = itertools.count()

        def wait(timeout_s=None):
            if is_late and next(waits) == 0:
                raise rc.CommTimeoutError("push[b]: no answer within 1 s from server 0")
            return wait_on(timeout_s)

        monkeypatch.setattr(pushed, "wait", wait, raising=False)
        return pushed

    monkeypatch.setattr(Table, "push_initial", push_initial)

    def body(rank):
        if rank == 0:
            is_open.wait(DEADLINE_S)
            raise Boom
        opened = [ps.table(name, 3, "float64", init=np.full(3, rank)) for name in "abc"]
        is_open.wait(DEADLINE_S)
        return [table.pull().wait().tolist() for table in opened]

    results = ended(run_all(3, body, settings=ELASTIC), 1)
    assert results[:2] == [[[1.0] * 3] * 3] * 2
    assert pushes == ["ringcomm-ps-chief"] * 3  # none was sent twice
    said = "rank 1, the chief now, goes on to send the first values of table[b] until servers have"
    assert said in caplog.text
    assert "push[b]: no answer within 1 s from server 0" in caplog.text


def test_who_waits_for_reports_hears_that_no_evaluator_is_left():
    def body(rank):
        if ps.is_chief():
            with pytest.raises(rc.PeerFailedError, match=r"an evaluator.*no other one is left"):
                ps.reports(until=1)
        return ps.table("w", 3).pull().wait().tolist() if rank < 2 else None

    def fail(_step):
        raise Boom

    ps.evaluator(every=1)(fail)
    try:
        results = run_all(2, with_a_step(body), settings=ELASTIC, evaluators=1)
    finally:
        ps.evaluation._evaluation = None
    assert ended(results, 1)[:2] == [[0.0] * 3] * 2


def with_a_step(body):
    def main(rank):
        ps.complete_step()
        return body(rank)

    return main


def test_without_the_elastic_mode_a_death_ends_the_job():
    def body(rank):
        if rank == 1:
            raise Boom
        table = ps.table("w", 1, mode="sync")
        table.push(np.ones(1, np.float32)).wait()

    results = run_all(3, body)
    assert sum(isinstance(each, rc.PeerFailedError) for each in results) == 3


# --- the core, step by step ---------------------------------------------------------------------
def die(core, worker):
    return names(core.handle(on.Died(worker), 0.0))


def test_a_contribution_of_the_dead_to_an_open_round_is_dropped():
    core = core_of(Mode("sync"), (1, 2, 3))
    assert arrive(core, push(1, 5)) == []
    assert arrive(core, push(2, 5)) == []
    assert die(core, 1) == []
    request = push(3, 5)
    core.handle(on.Arrived(request, KEY, 0), 0.0)
    (end,) = core.handle(on.Contributed(KEY, request, "g"), 0.0)
    assert [each.worker for each in end.contributions] == [2, 3]


def test_a_death_ends_the_round_that_waited_for_the_dead_alone():
    core = core_of(Mode("sync"))
    assert arrive(core, push(1, 5)) == []
    assert die(core, 2) == ["End"]
    assert die(core, 2) == []


def test_what_a_dead_worker_has_pushed_before_the_values_does_not_count():
    core = core_of(Mode("async"), is_ready=False)
    assert arrive(core, push(2, 5)) == []
    assert die(core, 2) == []
    assert names(core.handle(on.Initialized(KEY, push(1, 1), "values"), 0.0)) == ["Write"]


def test_own_pushes_before_the_values_count_though_their_worker_is_the_chief_by_now():
    core = core_of(Mode("async"), is_ready=False)
    assert arrive(core, push(2, 5)) == []
    assert names(core.handle(on.Initialized(KEY, push(2, 6), "values"), 0.0)) == ["Write", "Retry"]
    assert arrive(core, push(2, 5)) == ["Apply"]


def test_a_request_of_the_dead_that_was_kept_is_not_carried_out_after_the_move():
    core = core_of(Mode("async"))
    freeze(core)
    assert arrive(core, push(1, 5)) == []
    die(core, 1)
    assert "Retry" not in give(core, "thaw")
    assert core.handle(on.Arrived(push(1, 6), KEY, None), 0.0) == []


def enter(core, worker, clock):
    header = FrameHeader(
        FrameKind.ENTER, origin=worker, table=1, clock=clock, option=EntryOption.ASK
    )
    (reply,) = core.handle(on.Entered(replace_header(worker, header)), 0.0)
    return not reply.is_late


def replace_header(worker, header):
    return push(worker, 0)._replace(header=header)


def test_a_round_whose_workers_are_all_dead_ends_without_an_update():
    core = core_of(FirstOf(1), (1, 2, 3))
    assert enter(core, 1, 0)
    assert not enter(core, 2, 0)
    sent = core.handle(on.Died(1), 0.0)
    assert names(sent) == ["Tell", "Tell"]  # to both servers
    assert sent[0].content == [1, 1, [0]]
    (end,) = core.handle(on.Without(*sent[0].content), 0.0)
    assert (end.number, [*end.contributions], end.drops) == (1, [], True)


def test_nobody_is_let_into_a_round_for_a_dead_worker():
    entries = Entries((1, 2, 3), 2)
    assert entries.ask(1, 0)
    assert entries.die(1) == [0]
    assert entries.ask(2, 0)
    assert not entries.ask(3, 0)


def test_a_round_of_which_a_dead_worker_was_ends_with_those_that_live_in_it():
    core = core_of(FirstOf(2), (1, 2, 3), index=0)
    core.handle(on.Without(1, 1, [0]), 0.0)
    request = push(2, 5)
    core.handle(on.Arrived(request, KEY, 0), 0.0)
    (end,) = core.handle(on.Contributed(KEY, request, "g", lets_in=True), 0.0)
    assert [each.worker for each in end.contributions] == [2]


ROUNDS = {"sync": Mode("sync"), "first_of": FirstOf(2)}


def bereft(mode, *, is_held=False):
    """Return a core of two workers that has dropped a gradient of worker 1, which died.

    Once worker 2 has left, who hears of the death last ends the round with it, or holds its mean.
    """
    core = core_of(mode)
    request = push(1, 5)
    core.handle(on.Arrived(request, KEY, 0), 0.0)
    event = on.Contributed(KEY, request, "g", is_held=is_held, lets_in=mode.name == "first_of")
    assert core.handle(event, 0.0) == []
    assert die(core, 1) == []
    return core


@pytest.mark.parametrize("leaves_first", [True, False])
@pytest.mark.parametrize("mode", ROUNDS)
def test_a_drain_goes_past_a_round_that_others_ended_before_they_heard_of_a_death(
    mode, leaves_first
):
    core = bereft(ROUNDS[mode])
    if leaves_first:
        leave(core, 2)
    assert give(core, "freeze") == ["Close", "Reply"]
    drained = give(core, "drain", at=(1, False))
    if not leaves_first:
        assert drained == []  # worker 2 may contribute
        drained = leave(core, 2)
    assert drained == ["End", "Reply"]
    assert core.unit_of(KEY).rounds.at == (1, False)


def test_a_drain_carries_out_what_was_kept_before_it_goes_past_a_round():
    core = bereft(Mode("sync"))
    assert give(core, "freeze") == ["Close", "Reply"]
    kept = push(2, 5)
    assert arrive(core, kept) == []
    core.handle(on.Left(2, still_asks=True), 0.0)
    assert give(core, "drain", at=(1, False)) == ["Retry", "Settled"]
    core.handle(on.Arrived(kept, KEY, 0), 0.0)
    end, _ = core.handle(on.Contributed(KEY, kept, "g"), 0.0)
    assert [each.worker for each in end.contributions] == [2]
    assert core.handle(on.Finished(KEY), 0.0) == []


@pytest.mark.parametrize("mode", ROUNDS)
def test_who_cannot_hold_the_mean_of_a_dead_worker_says_so_in_a_drain(mode):
    core = bereft(ROUNDS[mode], is_held=True)
    leave(core, 2)
    give(core, "freeze")
    (reply,) = core.handle(order("drain", at=(0, True)), 0.0)
    assert reply.content == {"held": []}


def test_a_read_does_not_wait_for_a_round_that_nobody_lives_to_end():
    core = bereft(Mode("sync"))
    pull = push(2, 6)._replace(header=FrameHeader(FrameKind.PULL, origin=2, table=1, clock=1))
    assert names(core.handle(on.Read(KEY, pull), 0.0)) == []
    assert names(core.handle(on.Left(2, still_asks=True), 0.0)) == ["Serve"]


def test_a_snapshot_takes_as_it_is_what_nobody_lives_to_end():
    core = bereft(Mode("sync"))
    core.handle(on.Held(push(9, 1), 9 << 32, {1: 1}), 0.0)
    assert names(core.handle(on.Left(2, still_asks=True), 0.0)) == ["Take", "Reply"]


def test_rows_do_not_move_while_servers_hold_means_of_other_workers():
    core = core_of(Mode("sync"))
    core.tables[1] = replace(core.tables[1], is_dense=False)
    first, second = ask_for_move(core, 9)
    frozen = {"at": (0, True), "pending": [], "clocks": []}
    assert answer(core, first, {**frozen, "held": [1, 2]}) == []
    thaws = answer(core, second, {**frozen, "held": [2]})
    assert [each.do for each in thaws] == [THAW, THAW]
    assert answer(core, thaws[0]) == []
    (reply,) = answer(core, thaws[1])
    assert reply.content["moved"] == 0
    assert "a worker died, and its part of a round" in reply.content["problems"][0]


# --- the chief, and who follows it --------------------------------------------------------------
def test_the_chief_is_the_lowest_worker_that_neither_died_nor_had_left_by_then():
    layout = Layout((0, 1, 2, 3), (4,), ())
    assert not layout.lose(2, [])
    assert layout.chief == 0
    assert layout.lose(0, [1])
    assert layout.chief == 3
    assert Layout((0, 1), (1, 2), (3,)).survivable == {0, 3}


def test_the_work_of_a_chief_that_has_left_is_done_by_the_lowest_worker_that_is_there():
    layout = Layout((0, 1, 2, 3), (4,), ())
    assert [layout.acting_chief(gone) for gone in ((), {1}, {0}, {0, 1}, {0, 2})] == [0, 0, 1, 2, 1]
    assert layout.chief == 0
    assert layout.acting_chief({0, 1, 2, 3}) == 0
    layout.lose(1, [])
    assert layout.acting_chief({0}) == 2


def test_servers_may_die_but_the_last_one_and_the_lowest_that_lives_leads():
    layout = Layout((0, 1), (3, 4, 5), (2,))
    assert layout.survivable == {0, 1, 2, 3, 4, 5}
    layout.lose(3, [])
    assert (layout.server_numbers, layout.leader, layout.rank_of(1)) == ((1, 2), 1, 4)
    layout.lose(5, [])
    assert (layout.server_numbers, layout.leader) == ((1,), 1)
    assert layout.survivable == {0, 1, 2, 3, 5}
    assert Layout((0,), (1,), ()).survivable == {0}


def test_deaths_are_told_once_and_only_those_that_the_job_survives():
    peers, told = PeerTable(0, 6, survivable=frozenset({1, 2, 4})), []
    deaths = Deaths(peers)
    deaths.listeners.append(lambda rank, how: told.append((rank, how)))
    for rank, blames in ((2, 2), (4, 3), (3, 3)):  # 4 stopped because of 3, which is needed
        peers.note_dead(rank, f"died as {rank}", blames=blames)
        deaths.look()
        deaths.look()
        assert peers.is_fatal == (rank != 2)
    assert told == [(2, "died as 2")]
