"""A rank dies without which the job goes on: its groups end, all else of the engine goes on."""

import contextlib
import threading

import numpy as np
import pytest
from faulty_transport import Faults
from harness import DEADLINE_S, listen, outcomes, run_ranks
from loopback import LoopbackHub
from ps_ranks_as_threads import Boom, ended, run_all

import ringcomm as rc
from ringcomm import ps
from ringcomm.config import Settings
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.current_engine import serve_thread
from ringcomm.engine.core.meet_and_leave import leave
from ringcomm.transport.base import PeerDied
from ringcomm.transport.node.shared_memory import SharedNode, make_memory
from ringcomm.transport.node.steps import MEET, Meeting

ELASTIC = Settings(timeout_s=DEADLINE_S, elastic=1)
VICTIM = 1
MINE = 777  # what a rank writes once an operation of its own has failed
COUNT = 70_001  # several pieces, whose number nothing divides


def values(rank, count=COUNT):
    return np.random.default_rng(rank).integers(-1000, 1000, count).astype(np.float32)


def total(*ranks):
    return sum(values(rank) for rank in ranks)


def say_when_a_group_is_made(has_begun):
    """Set the event once this rank has begun to make a group."""
    current = engine()
    begin = current.conversations.begin

    def begin_and_say(*args, **options):
        task = begin(*args, **options)
        has_begun.set()
        return task

    current.conversations.begin = begin_and_say


def make_a_group():
    """Begin to make a group, and return while that is under way."""
    current, has_begun = engine(), threading.Event()
    say_when_a_group_is_made(has_begun)

    def make():
        with serve_thread(current), contextlib.suppress(rc.RingcommError):
            rc.Group([0, 1, 2])

    threading.Thread(target=make, daemon=True).start()
    assert has_begun.wait(DEADLINE_S)


# --- tables -------------------------------------------------------------------------------------
MOMENTS = {
    "before": lambda: None,
    "inside": lambda: rc.allreduce_async_(values(VICTIM)),
    "named": lambda: rc.allreduce_async(values(VICTIM), name="g"),
    "making a group": make_a_group,
}


def fail_in(reduce, moment):
    if moment == "making a group":
        rc.Group([0, 1, 2])
        rc.barrier()
    while True:  # who had all that it needs completes the first one
        reduce()


@pytest.mark.parametrize("moment", MOMENTS)
def test_tables_and_a_new_group_go_on_after_a_collective_has_failed(wire, moment, tmp_path):
    def body(rank):
        table = ps.table("w", 3, "float64", updater=ps.optim.Add(), mode="sync")
        x = values(rank)
        rc.allreduce_(x)
        rc.allreduce(x, name="g")
        table.push(np.full(3, 3.0)).wait()
        if rank == VICTIM:
            MOMENTS[moment]()
            raise Boom
        name = "g" if moment == "named" else None
        with pytest.raises(rc.PeerFailedError, match="goes on without it, but no group") as caught:
            fail_in(lambda: rc.allreduce(values(rank), name=name), moment)
        assert caught.value.rank == VICTIM
        with pytest.raises(rc.PeerFailedError, match="goes on without it, but no group"):
            rc.barrier()
        table.push(np.full(3, 5.0)).wait()
        ps.complete_step()
        group = ps.live_workers()
        for name in (None, "g", "g"):
            assert np.array_equal(rc.allreduce(values(rank), name=name, group=group), total(0, 2))
        if ps.is_chief():
            ps.save(tmp_path / "saved").wait()
            ps.stop()
        while not ps.should_stop():
            table.push(np.full(3, 7.0)).wait()
        rc.barrier(group=group)
        return table.pull().wait().tolist()

    first, second, _ = ended(run_all(3, body, settings=ELASTIC), 1)
    assert first == second
    assert first[0] in {8.0, 15.0}  # should_stop() is True in its first or second call
    assert [*tmp_path.glob("saved/*")]


def test_live_workers_are_all_without_a_death():
    results = run_all(2, lambda _: [*ps.live_workers().ranks])
    assert results[:2] == [[0, 1]] * 2


def test_two_deaths_one_in_the_midst_of_the_new_group():
    has_begun = {0: threading.Event(), 3: threading.Event()}
    all_are_there = threading.Barrier(4)  # a death within ps.init() ends the job

    def body(rank):
        all_are_there.wait(DEADLINE_S)
        if rank == 1:
            raise Boom
        with pytest.raises(rc.PeerFailedError):
            rc.barrier()
        if rank == 2:
            assert all(each.wait(DEADLINE_S) for each in has_begun.values())
            raise Boom
        say_when_a_group_is_made(has_begun[rank])
        return rc.allreduce(values(rank), group=ps.live_workers())

    results = ended(run_all(4, body, settings=ELASTIC), 2)
    for each in results[:2]:
        assert np.array_equal(each, total(0, 3))


def test_a_worker_that_leaves_meanwhile_holds_nobody_up(wire):
    has_begun = threading.Event()

    def body(rank):
        table = ps.table("w", 3, updater=ps.optim.Add())
        if rank == 2:
            assert has_begun.wait(DEADLINE_S)
            return None  # and leaves
        say_when_a_group_is_made(has_begun)
        group = ps.live_workers()
        table.push(rc.allreduce(np.ones(3, np.float32), group=group)).wait()
        rc.barrier(group=group)
        return [*group.ranks], table.pull().wait().tolist()

    results = run_all(3, body, settings=ELASTIC)
    assert results[:2] == [([0, 1], [4.0] * 3)] * 2


# --- the engine ---------------------------------------------------------------------------------
def parted(size, body, **options):
    """Run body(rank, die) on ranks of which one dies when it calls die(); it must not raise."""
    hub = LoopbackHub(size, (0,) * size if options.pop("one_node", False) else None)
    n_left = threading.Semaphore(0)

    def main(rank):
        engine().watch.peers.survivable = frozenset({VICTIM})
        if rank != VICTIM:
            try:
                return body(rank, None)
            finally:
                n_left.release()

        def die():
            hub.kill(VICTIM)

        result = body(rank, die)
        for _ in range(size - 1):  # its memory stays as it is, which an end would give up
            assert n_left.acquire(timeout=DEADLINE_S)
        return result

    return run_ranks(size, main, hub=hub, settings=ELASTIC, **options)


@pytest.mark.parametrize("is_registered", [False, True])
def test_what_is_under_way_in_other_groups_goes_on(wire, is_registered):
    def array(rank):
        x = rc.empty(COUNT, np.float32) if is_registered else np.empty(COUNT, np.float32)
        x[:] = values(rank)
        return x

    has_failed, all_are_there = threading.Event(), threading.Barrier(3)

    def body(rank, die):
        everybody = rc.Group([2, 1, 0])
        both = rc.Group([0, 2]) if rank != VICTIM else None
        for _ in range(2):
            if rank != VICTIM:
                rc.allreduce(array(rank), name="g", group=both)
        rc.barrier()
        all_are_there.wait(DEADLINE_S)
        if rank == VICTIM:
            handle = rc.allreduce_async_(array(rank), group=everybody)
            die()
            return handle
        begun = []
        if rank == 0:  # before the other one, which waits until this rank's group has ended
            begun = [rc.allreduce_async_(array(rank), name="g", group=both)]
            begun += [rc.allreduce_async_(array(rank), group=both) for _ in range(3)]
        else:
            assert has_failed.wait(DEADLINE_S)
        with pytest.raises(rc.PeerFailedError, match="no group that it belongs to"):
            rc.allreduce_(array(rank), group=everybody)
        has_failed.set()
        assert everybody.ledger.is_spoiled  # no other group gets its context
        for source in (VICTIM, rc.ANY_SOURCE):
            with pytest.raises(rc.PeerFailedError, match="no group that it belongs to"):
                rc.recv(values(0), source)
        if rank == 2:
            begun = [rc.allreduce_async_(array(rank), group=both) for _ in range(3)]
            begun += [rc.allreduce_async_(array(rank), name="g", group=both)]
        for handle in begun:
            assert np.array_equal(handle.wait(), total(0, 2))
        sent = np.full(5, rank, np.float32)
        rc.sendrecv(values(rank), 1 - both.rank, out := np.empty_like(values(0)), 1 - both.rank,
                    group=both)  # fmt: skip
        assert np.array_equal(out, values(2 - rank))
        return rc.allreduce(sent, group=rc.Group([2, 0])).tolist()

    results = parted(3, body, one_node=wire == "node")
    assert results[0] == results[2] == [2.0] * 5


@pytest.mark.long
@pytest.mark.parametrize("is_late", [False, True], ids=["followed", "nobody follows it"])
def test_nobody_touches_what_a_rank_had_in_a_group_that_ended(is_late):
    """It learns of the death before a coroutine follows the step, or after; another one later."""
    has_given_up = threading.Event()
    arrays = []

    def body(rank, die):
        for _ in range(3):  # the short way
            rc.allreduce_(rc.zeros(COUNT, np.float32))
        rc.barrier()
        x = rc.empty(COUNT, np.float32)
        x[:] = values(rank)
        current = engine()
        peers = current.watch.peers
        if rank == VICTIM:
            handle = rc.allreduce_async_(x)
            current.transport._hub.post_event(0, PeerDied(VICTIM, "was killed", VICTIM))
            return handle
        if rank == 0:
            adopt = current.adopt

            def adopt_late(*args, **options):
                if is_late:
                    listen(lambda: peers.has_lost)
                return adopt(*args, **options)

            current.adopt = adopt_late
        else:
            assert has_given_up.wait(DEADLINE_S)
            assert not peers.has_lost
        with pytest.raises(rc.PeerFailedError if rank == 0 else rc.RingcommError) as caught:
            rc.allreduce_(x)
        x[:] = MINE
        arrays.append((x, caught.value))
        has_given_up.set()
        return None

    parted(3, body, one_node=True, faults={0: Faults(drop_control=True)})
    for x, error in arrays:
        assert (x == MINE).all(), error


def test_who_has_a_group_that_others_could_not_make_does_not_take_their_steps_for_its_own():
    memories = [make_memory(nonce, 3) for nonce in range(3)]

    def node(rank):
        made = SharedNode(memories[rank], rank, 3)
        for other in range(3):
            if other != rank:
                made.adopt(other, memories[other])
        return made

    old, new = (0, 1, 2), (1, 2)
    steps = [
        MEET.begin(Meeting(node(rank).team_or_none(5, members), 3, 42))
        for rank, members in ((1, new), (2, new), (0, old))
    ]
    assert [step.drive(1) for step in steps] == [True] * 3
    assert [step.agrees for step in steps] == [True, True, False]


def test_what_else_breaks_an_engine_does_so_as_ever():
    def body(rank, die):
        both = rc.Group([0, 2]) if rank != VICTIM else None
        if rank == VICTIM:
            return die()
        listen(lambda: engine().watch.peers.has_lost)
        if rank == 2:
            with pytest.raises(rc.PeerFailedError, match="Fix that rank's failure first"):
                rc.join()  # others may have sent invitations
        with pytest.raises(rc.PeerFailedError, match="Fix that rank's failure first"):
            rc.barrier(group=both)  # which lacks a rank that lives
        assert engine().state.is_broken
        return None

    parted(3, body)


def test_who_leaves_learns_that_an_operation_under_way_has_failed():
    def body(rank, die):
        if rank == VICTIM:
            return die()
        handle = rc.allreduce_async(values(rank))
        leave(engine(), "done")
        error = engine().state.broke_while_leaving
        assert isinstance(error, rc.PeerFailedError), error
        return handle

    parted(2, body)


def test_a_death_that_the_job_does_not_survive_breaks_the_engine():
    def body(rank):
        engine().watch.peers.survivable = frozenset({VICTIM})
        if rank:
            raise Boom
        listen(lambda: len(engine().watch.peers.dead) == 2)
        with pytest.raises(rc.PeerFailedError):
            rc.barrier()
        assert engine().state.is_broken

    results = outcomes(3, body, settings=ELASTIC)
    assert results[0] is None, results[0]
