"""A server dies that had the only copy of its part: calls say so, and ps.recover() goes back."""

import threading
from itertools import product

import numpy as np
import ps_training_of_two_tables
import pytest
from harness import DEADLINE_S
from ps_core_steps import core_of, push
from ps_ranks_as_threads import Boom, Killed, ended, kill_server, run_all
from ps_simulation import Members
from ps_training_of_two_tables import KEYS

import ringcomm as rc
from ringcomm import ps
from ringcomm.codec import TopK
from ringcomm.config import Settings
from ringcomm.ps.checkpoint import files, recover
from ringcomm.ps.checkpoint.client import restore_tables
from ringcomm.ps.checkpoint.save_schedule import Periodic
from ringcomm.ps.client.rows.rows_ahead import Prefetched
from ringcomm.ps.control.agreement import Member
from ringcomm.ps.control.commands import MAKE_ALL, Follow, GoOn, Recover
from ringcomm.ps.job import session
from ringcomm.ps.placement.partitions import Move
from ringcomm.ps.placement.rebalance import move_all
from ringcomm.ps.protocol.frames import RECOVERING, FrameKind
from ringcomm.ps.server.core import events as on
from ringcomm.ps.server.core.actions import Reopen
from ringcomm.ps.server.core.core import Core
from ringcomm.ps.server.core.core_table import ServedTable
from ringcomm.ps.server.server import Server
from ringcomm.ps.update_modes import Mode

ELASTIC = Settings(timeout_s=DEADLINE_S, elastic=1)
MODES = ["sync", "async", ps.SSP(1), ps.FirstOf(2)]


def push_on(table):
    """Push until that raises."""
    while True:
        table.push(np.ones(table.shape)).wait()
        table.pull().wait()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_what_waits_for_a_server_that_dies_fails_and_says_what_to_do(mode, victim, tmp_path):
    def body(rank):
        table = ps.table("w", 600, "float64", updater=ps.optim.Add(), mode=mode, block_nbytes=1600)
        rows = ps.hashtable("emb", 2, updater=ps.optim.Add())
        for _ in range(2):
            table.push(np.ones(600)).wait()
            table.pull().wait()
        rows.push(np.arange(50), np.ones((50, 2), np.float32)).wait()
        rc.barrier()
        if rank == 0:
            kill_server(victim)
        with pytest.raises(rc.ServerLostError, match=r"ps\.recover\(path\) on every") as raised:
            push_on(table)
        assert raised.value.rank == 2 + victim
        assert f"server {victim} (rank {2 + victim}" in str(raised.value)
        assert "its part of w, emb is lost" in str(raised.value)
        moves = [Move((table.number, 0), victim, 1 - victim)]
        for call in (
            table.pull, lambda: rows.pull([1]), lambda: ps.table("new", 3),
            lambda: move_all(session(), moves),
        ):  # fmt: skip
            with pytest.raises(rc.ServerLostError):
                call()
        if ps.is_chief():
            with pytest.raises(rc.ServerLostError):
                ps.save(tmp_path)
        ps.stats()  # of those that live
        rc.barrier()  # workers are whole
        return "lived"

    results = ended(run_all(2, body, 3, settings=ELASTIC), 1)
    assert results == ["lived", "lived", "ended with 0", "ended with 0"]
    assert not any(tmp_path.iterdir())


def test_the_last_server_ends_the_job():
    def body(rank):
        table = ps.table("w", 3, "float64", updater=ps.optim.Add())
        table.push(np.ones(3)).wait()
        rc.barrier()
        if rank == 0:
            kill_server(0)
        with pytest.raises(rc.PeerFailedError) as raised:
            push_on(table)
        assert not isinstance(raised.value, rc.ServerLostError)
        raise raised.value

    results = run_all(2, body, 1, settings=ELASTIC)
    assert [type(each) for each in results] == [rc.PeerFailedError] * 2 + [Killed]


def test_a_joint_pull_fails_at_once_if_a_server_dies_before_it_has_answered(monkeypatch):
    on_request = Server.on_request

    def die(server, request):
        if request.header.kind == FrameKind.PULLS and server.index == 1:
            raise Killed
        on_request(server, request)

    monkeypatch.setattr(Server, "on_request", die)

    def body(rank):
        a, b = (ps.hashtable(name, 2, updater=ps.optim.Add()) for name in "ab")
        future = ps.pull_many([(a, KEYS), (b, KEYS)])
        with pytest.raises(rc.ServerLostError, match=r"pull_many\[2 tables\]: server 1"):
            future.wait(DEADLINE_S / 4)
        return "told"

    settings = Settings(timeout_s=DEADLINE_S, elastic=1, stall_warning_s=0)  # it would tell, too
    assert ended(run_all(1, body, 2, settings=settings), 1)[0] == "told"


# --- recover ------------------------------------------------------------------------------------
def train(table, rows, steps, path=None):
    """Train with both tables; save after steps 3 and 6."""
    for step in steps:
        ps_training_of_two_tables.train(table, rows, [step])
        if path is not None and step + 1 in (3, 6):
            rc.barrier()
            if ps.is_chief():
                ps.save(path, step=step + 1, background=False)
            rc.barrier()


def values(table, rows):
    rc.barrier()
    found = table.pull().wait(), rows.pull(KEYS).wait()
    rc.barrier()
    return found


def tables(mode, updater):
    table = ps.table("w", 600, "float64", updater=updater, mode=mode, block_nbytes=1600)
    return table, ps.hashtable("emb", 2, updater=updater, mode=mode, dtype="float64")


def run_with_a_death(mode, updater, path, victim):
    def body(rank):
        opened = tables(mode, updater)
        train(*opened, range(8), path)
        rc.barrier()
        if rank == 0:
            kill_server(victim)
        with pytest.raises(rc.ServerLostError):
            train(*opened, range(8, 1000))
        recovered = ps.recover(path)
        assert recovered.manifest["step"] == 6
        assert recovered.lost_steps >= 2
        assert len(ps.stats()) == 2
        after = values(*opened)
        train(*opened, range(6, 10))
        return *after, *values(*opened)

    return ended(run_all(2, body, 3, settings=ELASTIC), 1)[:2]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_all_go_back_to_the_newest_checkpoint_and_go_on(mode, victim, tmp_path):
    lived = run_with_a_death(mode, ps.optim.Add(), tmp_path, victim)
    factor = 1 if str(mode) in ("sync", "FirstOf(2)") else 2
    for each in lived:
        for (dense, rows), n in ((each[:2], 6), (each[2:], 10)):
            assert dense.tolist() == [factor * sum(range(1, n + 1))] * 600
            of_key = [sum(1 + step for step in range(n) if key >= step % 9) for key in range(60)]
            assert rows[:, 0].tolist() == [factor * x for x in of_key]


def test_the_state_of_updaters_goes_back_too(tmp_path):
    updater = ps.optim.Adam(0.1)
    lived = run_with_a_death("sync", updater, tmp_path / "lived", 0)

    def alone(_rank):
        opened = tables("sync", updater)
        train(*opened, range(10))
        return values(*opened)

    expected = run_all(2, alone, 3)[0]
    for mine, theirs in zip(lived[0][2:], expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_rows_that_were_fetched_ahead_are_not_used_after_a_recovery(tmp_path):
    def body(rank):
        table, rows = tables("async", ps.optim.Add())
        train(table, rows, range(3), tmp_path)
        before = rows.pull(KEYS).wait()
        rc.barrier()
        ahead = Prefetched()
        rows.push(KEYS, np.ones((60, 2))).wait()
        ahead.begin({"emb": (rows, KEYS)}, 0)
        assert ahead.rows({"emb": (rows, KEYS)})["emb"][0, 0] > before[0, 0]
        ahead.begin({"emb": (rows, KEYS)}, 0)
        rc.barrier()
        if rank == 0:
            kill_server(1)
        with pytest.raises(rc.ServerLostError):
            push_on(table)
        ps.recover(tmp_path)
        return (ahead.rows({"emb": (rows, KEYS)})["emb"] - before).any()

    assert ended(run_all(2, body, 3, settings=ELASTIC), 1)[:2] == [False, False]


def test_what_compression_has_kept_of_lost_steps_does_not_count(tmp_path):
    def body(rank):
        table = ps.table("w", 8, "float64", updater=ps.optim.SGD(1.0), compression=TopK(0.125))
        if rank == 0:
            ps.save(tmp_path, background=False)
        rc.barrier()
        table.push(np.arange(8.0)).wait()
        assert table.residual.any()
        rc.barrier()
        if rank == 0:
            kill_server(0)
        with pytest.raises(rc.ServerLostError):
            push_on(table)
        ps.recover(tmp_path)
        return table.residual.any()

    assert ended(run_all(2, body, 2, settings=ELASTIC), 1)[:2] == [False, False]


def trained_until_a_server_dies(rank, mode, victim, folder):
    """Return tables that were saved after 3 steps, and of which a server is lost then."""
    table, rows = tables(mode, ps.optim.Add())
    train(table, rows, range(3), folder)
    rc.barrier()
    if rank == 0:
        kill_server(victim)
    with pytest.raises(rc.ServerLostError):
        train(table, rows, range(8, 1000))
    return table, rows


def test_evaluators_go_on_after_a_recovery(tmp_path):
    def body(rank):
        table, rows = trained_until_a_server_dies(rank, "sync", 1, tmp_path)
        ps.recover(tmp_path)
        if rank == 0:
            ps.reports()
        rc.barrier()
        train(table, rows, range(3, 5))
        return [each.metrics["w"] for each in ps.reports(until=5)] if rank == 0 else None

    def evaluate(step):
        table, _ = tables("sync", ps.optim.Add())
        ps.report(step, {"w": float(table.pull().wait()[0])})

    ps.evaluator(every=1)(evaluate)
    try:
        results = run_all(2, body, 3, settings=ELASTIC, evaluators=1)
    finally:
        ps.evaluation._evaluation = None
    assert ended(results, 1)[0][-1] == 15.0


def test_no_snapshot_begins_between_a_loss_and_the_recovery(tmp_path):
    def body(rank):
        table, _ = trained_until_a_server_dies(rank, "async", 1, tmp_path)
        with pytest.raises(rc.ServerLostError, match="recover"), ps.snapshot():
            pass  # servers that begin anew would forget who asks
        ps.recover(tmp_path)
        with ps.snapshot():
            return table.pull().wait()[0]

    assert ended(run_all(2, body, 3, settings=ELASTIC), 1)[:2] == [12.0, 12.0]


def test_an_evaluator_that_computes_while_a_server_dies_follows_the_others(tmp_path):
    has_heard = threading.Event()

    def body(rank):
        table, rows = trained_until_a_server_dies(rank, "sync", 1, tmp_path)
        assert has_heard.wait(DEADLINE_S)
        ps.recover(tmp_path)
        train(table, rows, range(3, 5))

    def evaluate(step):
        client = session().client
        if not has_heard.is_set():
            assert client.drive_until(lambda: client.loss, "test", DEADLINE_S)
            try:
                with pytest.raises(rc.ServerLostError):  # servers that begin anew would forget it
                    ps.evaluation.wait_for_step(10**6, timeout_s=5)
            finally:
                has_heard.set()

    ps.evaluator(every=1)(evaluate)
    try:
        results = run_all(2, body, 3, settings=ELASTIC, evaluators=1)
    finally:
        ps.evaluation._evaluation = None
    assert ended(results, 1)[2] == "ended with 0"


class Dying(BaseException):
    """Ends a rank where errors are caught."""


@pytest.mark.parametrize("is_restored", [False, True])
def test_the_next_chief_restores_if_the_chief_dies_in_a_recovery(
    is_restored, tmp_path, monkeypatch
):
    def restore_and_die(current, *more):
        if rc.rank() > 0 or is_restored:
            manifest = restore_tables(current, *more)
        if rc.rank() == 0:
            raise Dying
        return manifest

    monkeypatch.setattr(recover, "restore_tables", restore_and_die)

    def body(rank):
        table, _ = trained_until_a_server_dies(rank, "async", 0, tmp_path)
        assert ps.recover(tmp_path).manifest["step"] == 3
        assert ps.is_chief() == (rank == 1)
        return table.pull().wait()[0]

    results = run_all(3, body, 3, settings=ELASTIC)
    assert isinstance(results[0], Dying)
    assert results[1:3] == [18.0, 18.0]


def test_another_worker_restores_if_the_chief_has_left(tmp_path):
    def body(rank):
        table, rows = tables("async", ps.optim.Add())
        train(table, rows, range(3), tmp_path)
        rc.barrier()
        if rank == 0:
            return "left"
        peers = session().engine.watch.peers
        session().client.drive_until(lambda: 0 in peers.left, "test", DEADLINE_S)
        kill_server(0)
        with pytest.raises(rc.ServerLostError):
            push_on(table)
        assert ps.recover(tmp_path).manifest["step"] == 3
        return table.pull().wait()[0]

    assert ended(run_all(2, body, 3, settings=ELASTIC), 1)[:2] == ["left", 12.0]


def test_workers_end_training_at_one_step_after_a_recovery(tmp_path):
    def body(rank):
        table, rows = tables("sync", ps.optim.Add())
        train(table, rows, range(3), tmp_path)
        has_died = False
        if rank == 0:
            ps.should_stop()  # once more than the other
        while not ps.should_stop():
            try:
                if ps.step_number() == 5 and not has_died:
                    has_died = True
                    rc.barrier()
                    if rank == 0:
                        kill_server(1)
                    train(table, rows, range(8, 1000))
                train(table, rows, [ps.step_number()])
            except rc.ServerLostError:
                ps.recover(tmp_path)
                continue
            if ps.is_chief() and ps.step_number() == 7:
                ps.stop()
        rc.barrier()
        return ps.step_number(), table.pull().wait()[0]

    lived = ended(run_all(2, body, 3, settings=ELASTIC), 1)[:2]
    assert lived[0] == lived[1]
    assert lived[0][0] in (7, 8)
    assert lived[0][1] == sum(range(1, lived[0][0] + 1))


# --- the core, step by step ---------------------------------------------------------------------
MINE = {"w": [1, {}]}


def come(core, rank, *, servers=(0, 1), has_checkpoint=True):
    return core.handle(on.Asked(push(rank, 1), Recover(servers, MINE, has_checkpoint)), 0.0)


def go_on(core, rank, said=None, *, servers=(0, 1)):
    return core.handle(on.Asked(push(rank, 1), GoOn(servers, said)), 0.0)


def follow(core, *, servers=(0, 1)):
    command = Follow(9, servers, ("w",), keeps_place=False)
    return core.handle(on.Asked(push(9, 1), command), 0.0)


def test_tables_are_opened_anew_once_all_workers_that_live_know_the_same_servers():
    core = core_of(Mode("sync"))
    assert come(core, 1) == []
    assert come(core, 2, servers=(0, 1, 2)) == []  # about to hear of it
    assert core.agreement.missing(1) == [(RECOVERING, "", [2])]
    assert follow(core) == []
    (step,) = come(core, 2)
    assert step.actions == [Reopen({1: MINE, 2: MINE})]
    core.restart()
    assert core.tables == {}
    (make,) = core.handle(on.StepDone(step.key, ""), 0.0)
    assert (make.dest, make.do, make.content) == (1, MAKE_ALL, [[], []])
    replies = core.handle(on.Answered(Member(1, is_server=True), make.step, ""), 0.0)
    assert [each.request.source for each in replies] == [1, 2, 2]
    assert {str(each.content) for each in replies} == {
        "{'servers': (0, 1), 'tables': [], 'taken': []}"
    }
    assert go_on(core, 2) == []
    (reply,) = core.handle(on.Died(1), 0.0)  # the chief: its heir restores
    assert reply.content == {"said": None, "restores": 2}
    said = {"manifest": {}}
    follows, reply = sorted(go_on(core, 2, said), key=lambda each: -each.request.source)
    assert reply.content == {"said": said, "restores": 2}
    assert (follows.request.source, follows.content["said"]) == (9, said)


def test_a_server_that_cannot_make_its_part_of_all_tables_lets_the_recovery_fail():
    core = core_of(Mode("sync"), (1,))
    (step,) = come(core, 1)
    (fail,) = core.handle(on.StepDone(step.key, "server 0: no room"), 0.0)
    assert fail.why == "ps.recover: tables cannot be made anew: server 0: no room"
    assert not core.agreement.is_running


def test_a_death_within_a_recovery_lets_all_come_again():
    members = [Members((1, 2), (9,), (0, 1), 0)]
    core = Core(0, lambda: members[0])
    come(core, 1)
    (step,) = come(core, 2)
    core.restart()
    core.handle(on.StepDone(step.key, ""), 0.0)
    members[0] = members[0]._replace(server_numbers=(0,), n_losses=1)
    assert core.handle(on.Died(7), 0.0) == []
    assert come(core, 1, servers=(0,)) == []
    (step,) = come(core, 2, servers=(0,))
    core.restart()
    replies = core.handle(on.StepDone(step.key, ""), 0.0)  # there is no other server to tell
    assert {each.content["servers"] for each in replies} == {(0,)}


def test_who_follows_hears_of_the_recovery_from_the_last_death_of_which_it_knows():
    """With the one before, it would wait for steps at a server that forgets it again."""
    members = [Members((1,), (9,), (0, 1), 0)]
    core = Core(0, lambda: members[0])
    said = {"manifest": {"step": 1}}
    go_on(core, 1, said)
    assert follow(core, servers=(0,)) == []  # the leader is about to hear of the last death
    members[0] = members[0]._replace(server_numbers=(0,), n_losses=1)
    assert core.handle(on.Died(7), 0.0) == []
    assert follow(core, servers=(0, 1)) == []  # the rank is
    (reply,) = go_on(core, 1, said, servers=(0,))
    assert reply.request.source == 1
    (first, *_) = replies = follow(core, servers=(0,))
    assert {each.request.source for each in replies} == {9}
    assert first.content["servers"] == (0,)


def test_who_follows_hears_that_no_worker_is_left():
    core = core_of(Mode("sync"))
    assert follow(core) == []
    assert core.handle(on.Left(1), 0.0) == []
    (reply,) = core.handle(on.Left(2), 0.0)
    assert reply.content == {"tables": None}


def test_who_follows_waits_for_a_recovery_that_has_begun_and_its_tables_stay():
    core = core_of(Mode("sync"), (1,))
    go_on(core, 1, {"manifest": {"step": 1}})
    (step,) = come(core, 1)
    assert follow(core) == []
    core.restart()
    for number, name in ((2, "w"), (3, "other")):
        core.add_table(ServedTable(number, name, Mode("sync"), True, [0]))
    (make,) = core.handle(on.StepDone(step.key, ""), 0.0)
    core.handle(on.Answered(Member(1, is_server=True), make.step, ""), 0.0)
    go_on(core, 1, {"manifest": {"step": 2}})
    assert core.tables[2].openers == {9}
    assert core.tables[3].openers == set()


def test_a_recovery_without_a_worker_is_over():
    core = core_of(Mode("sync"))
    come(core, 1)
    go_on(core, 2)
    core.handle(on.Died(1), 0.0)
    assert core.handle(on.Died(2), 0.0) == []
    assert not core.agreement.is_running


def test_without_a_checkpoint_nothing_is_opened_anew():
    core = core_of(Mode("sync"), (1,))
    (reply,) = come(core, 1, has_checkpoint=False)
    assert reply.content == {"tables": None}
    assert core.tables.keys() == {1}


def test_who_is_gone_is_still_gone_after_a_restart():
    core = core_of(Mode("sync"), (1, 2, 3))
    core.handle(on.Died(1), 0.0)
    core.handle(on.Left(2, still_asks=True), 0.0)
    core.restart()
    assert (core.dead, core.left, core.live_workers) == ({1}, {1}, {3})
    assert core.clocks.all() == {3: 0}


# --- checkpoints that the chief saves by itself -------------------------------------------------
def test_when_a_checkpoint_is_due():
    by_steps, by_time, by_both = Periodic(None, 3), Periodic(10.0, None), Periodic(10.0, 3)
    for periodic in (by_steps, by_time, by_both):
        assert periodic.is_due(0.0, 1)
        periodic.note(0.0, 1)
        assert not periodic.is_due(0.0, 1)
    assert [by_steps.is_due(99.0, clock) for clock in (2, 3, 4)] == [False, False, True]
    assert by_steps.is_due(99.0, 0)  # after ps.recover()
    assert [by_time.is_due(now, 99) for now in (9.0, 10.0)] == [False, True]
    for at in product((9.0, 10.0), (0, 3, 4)):  # by whichever comes first
        assert by_both.is_due(*at) == (by_steps.is_due(*at) or by_time.is_due(*at)), at


def test_the_chief_saves_every_so_many_steps_and_its_heir_goes_on(tmp_path):
    def body(rank):
        opened = tables("sync", ps.optim.Add())
        ps.save(tmp_path, every_steps=2, keep=None)
        for step in range(8):
            if step == 4 and rank == 0:
                raise Boom
            train(*opened, [step])
            current = session()
            if current.last_save is not None:
                current.last_save.wait()
        if rank == 1:
            ps.restore(tmp_path)
            return [values.wait() for values in (opened[0].pull(), opened[1].pull(KEYS))]

    dense, rows = ended(run_all(2, body, 2, settings=ELASTIC), 1)[0]
    steps = [files.read_manifest(each)["step"] for each in reversed(files.complete(tmp_path))]
    assert steps[:2] == [1, 3]
    assert steps[-1] in (7, 8)
    assert dense.tolist() == [sum(range(1, steps[-1] + 1))] * 600
    assert rows.shape == (60, 2)


def test_arguments_of_such_checkpoints_are_checked(tmp_path):
    def body(_rank):
        for options in ({"every_s": 0}, {"every_steps": -1}, {"every_s": 1, "step": 3}):
            with pytest.raises(ValueError, match=r"ps\.save"):
                ps.save(tmp_path, **options)

    run_all(1, body)
    with pytest.raises(rc.ConfigError, match="save_every_s"):
        ps.init(save_every_s=3.0)


def test_without_a_checkpoint_recover_says_so_on_all_workers(tmp_path):
    def body(rank):
        table, _ = tables("sync", ps.optim.Add())
        rc.barrier()
        if rank == 0:
            kill_server(0)
        with pytest.raises(rc.ServerLostError):
            push_on(table)
        with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
            ps.recover(tmp_path)
        with pytest.raises(rc.ServerLostError):
            table.pull()
        return "lived"

    assert ended(run_all(2, body, 3, settings=ELASTIC), 1)[:2] == ["lived"] * 2


def test_without_the_elastic_mode_the_death_of_a_server_ends_the_job():
    def body(rank):
        table = ps.table("w", 3, "float64", updater=ps.optim.Add(), mode="async")
        table.push(np.ones(3)).wait()
        rc.barrier()
        if rank == 0:
            kill_server(0)
        push_on(table)

    results = run_all(2, body, 2)
    assert [type(each) for each in results[:2]] == [rc.PeerFailedError] * 2


def test_two_servers_die_one_after_the_other(tmp_path):
    def body(rank):
        table, rows = tables("sync", ps.optim.Add())
        train(table, rows, range(3), tmp_path)
        for victim in (0, 3):
            rc.barrier()
            if rank == 0:
                kill_server(victim)
            with pytest.raises(rc.ServerLostError):
                train(table, rows, range(8, 1000))
            assert ps.recover(tmp_path).manifest["step"] == 3
            assert values(table, rows)[0].tolist() == [6.0] * 600
        return len(ps.stats())

    assert ended(run_all(2, body, 4, settings=ELASTIC), 2)[:2] == [2, 2]


def test_two_servers_die_at_once(tmp_path):
    def body(rank):
        table, rows = tables("async", ps.optim.Add())
        train(table, rows, range(3), tmp_path)
        rc.barrier()
        if rank == 0:
            kill_server(0)
            kill_server(1)
        with pytest.raises(rc.ServerLostError):
            train(table, rows, range(8, 1000))
        assert ps.recover(tmp_path).manifest["step"] == 3
        if len(ps.stats()) > 2:  # only one of the two had died by then
            with pytest.raises(rc.ServerLostError):
                train(table, rows, range(8, 1000))
            ps.recover(tmp_path)
        assert values(table, rows)[0].tolist() == [12.0] * 600
        return len(ps.stats())

    assert ended(run_all(2, body, 4, settings=ELASTIC), 2)[:2] == [2, 2]
