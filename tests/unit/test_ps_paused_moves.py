"""Pauses of moves: each begins in time, whatever waits, and ends when its owner leaves."""

import math
import threading

import numpy as np
import pytest
from harness import wait_until
from ps_core_steps import ask_for_move, core_of, names, push
from ps_ranks_as_threads import run_all, run_workers

import ringcomm as rc
from ringcomm import ps
from ringcomm.ps.client import pauses, request_order
from ringcomm.ps.client.client import Client
from ringcomm.ps.control.commands import FREEZE, End, Pause
from ringcomm.ps.control.move_lock import MoveLock
from ringcomm.ps.job import session
from ringcomm.ps.moment_numbers import moment_number, owner_of
from ringcomm.ps.placement.partitions import Move
from ringcomm.ps.placement.rebalance import move_all
from ringcomm.ps.server.core import events as on
from ringcomm.ps.server.server import Server
from ringcomm.ps.update_modes import Mode

pytestmark = pytest.mark.one_wire


# --- decisions ----------------------------------------------------------------------------------
class Lock(MoveLock):
    """A lock with a time that is set, and these pauses, which have begun."""

    def __init__(self, *paused):
        self.time_s = 0.0
        super().__init__(lambda: self.time_s)
        for number in paused:
            assert self.pause(number, 10.0)

    def at(self, time_s):
        self.time_s = time_s
        self.look()
        return self


def test_a_pause_lets_a_waiting_move_go_first_for_so_long_as_its_owner_says():
    lock = Lock(9)
    lock.wait("mover")
    assert not lock.at(9.0).pause(5, 1.0)
    assert lock.awaits_time
    assert not lock.at(9.9).pause(5, 10.0)
    assert lock.at(10.0).pause(5, 10.0)
    assert not lock.awaits_time


def test_moves_begin_once_the_last_pause_has_ended_and_one_by_one():
    lock = Lock(9)
    lock.wait("first")
    lock.wait("second")
    assert lock.pause(5, 0.0)
    lock.unpause(9)
    assert not lock.may_move("first")
    lock.unpause(5)
    assert not lock.may_move("second")
    assert lock.may_move("first")
    lock.begin((1, 0))
    assert not lock.pause(6, 0.0)
    assert not lock.may_move("second")
    lock.end()
    assert lock.pauses == {6}  # it was patient for a move
    lock.leave("first")
    lock.unpause(6)
    assert lock.may_move("second")


def test_a_patient_pause_begins_once_no_move_waits_any_more():
    lock = Lock(9)
    lock.wait("mover")
    assert not lock.pause(5, 10.0)
    lock.leave("mover")
    assert lock.pauses == {9, 5}


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("way", ["gives up", "leaves"])
def test_a_pause_ends_when_its_owner_gives_up_or_leaves(way, has_begun):
    core, number = core_of(Mode("async")), moment_number(2, 1)
    core.handle(on.Asked(push(9, 1), Pause(moment_number(9, 1), 0.0)), 0.0)
    assert ask_for_move(core) == []
    asked = on.Asked(push(2, 1), Pause(number, 0.0 if has_begun else math.inf))
    assert names(core.handle(asked, 1.0)) == ["Reply"] * has_begun
    if way == "gives up":
        n_asked = 1 if has_begun else 2  # a pause that has not begun is replied when it ends
        ended = core.handle(on.Asked(push(2, 2), End(number, is_taken=False)), 1.0)
        assert names(ended) == ["Reply"] * n_asked
    else:
        assert core.handle(on.Left(2), 1.0) == []
    end = on.Asked(push(9, 2), End(moment_number(9, 1), is_taken=False))
    reply, *orders = core.handle(end, 1.0)
    assert names([reply]) == ["Reply"]
    assert [(each.dest, each.do) for each in orders] == [(0, FREEZE), (1, FREEZE)]


def test_a_read_begins_no_pause_though_its_time_has_come():
    """The copy of a server does not hear of it, and would begin the pause later."""
    core = core_of(Mode("async"))
    core.handle(on.Asked(push(9, 1), Pause(moment_number(9, 1), 0.0)), 0.0)
    assert ask_for_move(core) == []
    assert core.handle(on.Asked(push(2, 1), Pause(moment_number(2, 1), 5.0)), 0.0) == []
    assert names(core.handle(on.Read((1, 0), push(2, 2)), 6.0)) == ["Serve"]
    assert names(core.handle(on.TimePassed(), 6.0)) == ["Reply"]


def test_a_move_of_before_a_recovery_is_forgotten():
    """Its table has another number; and nobody knows any more that it waits for its turn."""
    core = core_of(Mode("async"))
    core.handle(on.Asked(push(9, 1), Pause(moment_number(9, 1), 0.0)), 0.0)
    assert ask_for_move(core) == []
    core.restart()
    assert [type(each) for each in core.agreement.commands()] == [Pause]
    assert core.handle(on.TimePassed(), 1.0) == []


def test_the_number_of_a_pause_says_whose_it_is():
    assert [owner_of(moment_number(rank, 7)) for rank in (0, 1, 300)] == [0, 1, 300]


# --- in a job -----------------------------------------------------------------------------------
def swap(t):
    """Let the two partitions of a table change places."""
    return move_all(session(), [Move((t.number, 0), 0, 1), Move((t.number, 1), 1, 0)])


def opened():
    return ps.table("w", 8, updater=ps.optim.SGD(1.0), block_nbytes=16)


@pytest.mark.long
@pytest.mark.usefixtures("wire")
def test_a_snapshot_that_lasts_keeps_nobody_from_saving_and_leaving_though_moves_wait(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(pauses, "_PATIENCE", 0.005)  # 0.3 s of the deadline
    is_inside, is_over = threading.Event(), threading.Event()

    def body(rank):
        t = opened()
        rc.barrier()
        if rank == 1:
            with ps.snapshot():
                is_inside.set()
                assert is_over.wait(30)
            return None
        assert is_inside.wait(30)
        moves = swap(t)
        ps.save(tmp_path).wait()
        with ps.snapshot():
            pass
        assert not moves.done()
        session().leave()
        is_over.set()
        return None

    assert run_workers(2, body, 2) == [None, None]


def test_moves_have_their_turn_between_snapshots_that_overlap():
    has_moved = threading.Event()
    begun = [threading.Event(), threading.Event()]

    def body(rank):
        t = opened()
        rc.barrier()
        if rank == 2:
            for each in begun:
                assert each.wait(30)
            assert swap(t).wait().moved == 2
            has_moved.set()
            return
        while not has_moved.is_set():
            other = begun[1 - rank]
            with ps.snapshot():
                begun[rank].set()
                other.wait(0.05)  # so that at most times one of the two is within one

    run_workers(3, body, 2)


def test_a_rank_that_fails_to_leave_in_time_tells_the_servers_all_the_same(monkeypatch):
    def never(client, label):
        client.wait_until(lambda: False, label, lambda: {1}, 0.05)

    monkeypatch.setattr(Client, "wait_until_settled", never)

    def body(rank):
        opened()
        with pytest.raises(rc.CommTimeoutError, match=r"leave: .* server 1 \(rank 3\)"):
            session().leave()
        return True

    assert run_workers(2, body, 2) == [True, True]


def test_a_rank_without_credit_leaves_all_the_same(monkeypatch):
    may_push = threading.Event()

    def body(rank):
        t = ps.table("w", 8, updater=ps.optim.SGD(1.0), mode="sync")
        if rank == 1:
            assert may_push.wait(30)
            return t.push(np.ones(8, np.float32)).wait().applied
        push = t.push(np.ones(8, np.float32))  # waits for the other worker
        with monkeypatch.context() as patch:
            patch.setattr(request_order, "CREDIT_REQUESTS", 1)
            session().leave()
        may_push.set()
        return push.wait().applied

    assert run_workers(2, body) == [True, True]


def test_what_a_rank_holds_is_let_go_when_it_leaves():
    servers, has_looked = [], threading.Event()

    def body(rank):
        opened()
        if rank == 1:
            with ps.snapshot():
                session().leave()
                has_looked.wait(30)
            return None
        wait_until(lambda: any(1 in each.core.left for each in servers), "rank 1 has not left")
        n_held = [len(each._performer.snapshots._copies) for each in servers]
        has_looked.set()
        return n_held

    init = Server.__init__

    def noted(self, *args):
        init(self, *args)
        servers.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, "__init__", noted)
        assert run_workers(2, body)[0] == [0]


def test_a_rank_that_has_left_and_serves_on_hears_of_a_death(caplog):
    def body(rank):
        t = opened()
        rc.barrier()
        if rank == 1:
            server = session().dispatcher.server
            wait_until(lambda: 0 in server.core.left, "rank 0 has not left")
            raise ValueError("lost its way")
        t.push(np.ones(8, np.float32)).wait()
        session().leave()

    results = run_all(2, body, 2, colocated=True)
    assert isinstance(results[0], rc.PeerFailedError)
    assert "leave" in str(results[0])
    assert "lost its way" in str(results[0])
