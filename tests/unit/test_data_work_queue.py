"""WorkQueue: each part of an epoch is done once; what a death left open is given out again."""

import itertools
import time
from collections import Counter

import numpy as np
import pytest
from harness import DEADLINE_S, run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from ps_ranks_as_threads import Boom, ended, kill_server, run_all, run_workers

import ringcomm as rc
from ringcomm import ps
from ringcomm.config import Settings
from ringcomm.data.leases import OVER, WAIT, Leases
from ringcomm.data.work_queue import QUEUES
from ringcomm.engine.core.current_engine import engine
from ringcomm.ps.session import session
from ringcomm.transport.control_header import ControlKind


@settings(deadline=None, derandomize=True, database=None)
@given(
    n=st.integers(1, 12),
    events=st.lists(
        st.tuples(st.sampled_from(("take", "done", "again", "die", "resume")), st.integers(0, 3))
    ),
)
def test_what_is_reported_done_is_done_once_and_the_rest_is_given_out(n, events):
    leases, done, held, last = Leases(n), Counter(), {}, {}
    for what, rank in events:
        if what == "take":
            part = leases.take(rank, 0)
            if part >= 0:
                assert held.setdefault(rank, part) == part
                assert done[part] == 0
            else:
                assert part == (WAIT if held else OVER)
        elif what == "done" and rank in held:
            last[rank] = held.pop(rank)
            assert leases.done(rank, 0, last[rank])
            done[last[rank]] += 1
        elif what == "again" and rank in last:
            assert not leases.done(rank, 0, last[rank])
        elif what == "die":
            held.pop(rank, None)
            leases.leave(rank)
        elif what == "resume":
            leases, held = Leases(n, leases.state()), {}
        assert len({*held.values()}) == len(held)
    for rank in [*held]:
        leases.leave(rank)
    while (part := leases.take(9, 0)) >= 0:
        assert leases.done(9, 0, part)
        done[part] += 1
    assert part == OVER
    assert done == dict.fromkeys(range(n), 1)
    assert leases.take(9, 1) == 0


def test_fast_ranks_take_more_and_each_sample_is_seen_once_per_epoch():
    def body(rank):
        queue = rc.data.WorkQueue(100, 4, seed=3)
        seen = []
        for _ in range(2):
            for indices in queue:
                time.sleep(0.1 if rank == 2 else 0.005)  # rank 2 is slow
                seen.append(indices)
        rc.barrier()
        return seen

    seen = run_ranks(3, body)
    counts = np.bincount(np.concatenate([*itertools.chain(*seen)]), minlength=100)
    assert (counts == 2).all()
    assert len(seen[2]) < min(len(seen[0]), len(seen[1]))


def test_it_goes_on_from_a_state_on_another_number_of_ranks():
    def begin(rank):
        queue, found = rc.data.WorkQueue(40, 5), None
        if rank == 1:
            indices = next(parts := iter(queue))
            queue.done()
            next(parts)
            found = indices.tolist(), queue.state_dict()
        rc.barrier()
        return found

    def go_on(_rank):
        queue = rc.data.WorkQueue(40, 5, state=state)
        seen = [int(each) for indices in queue for each in indices]
        rc.barrier()
        return seen

    done, state = run_ranks(2, begin)[1]
    order = {"n": 40, "size": 5, "shuffle": True, "seed": 0}
    assert state == {"epoch": 0, "next": 2, "undone": [1], **order}
    rest = itertools.chain(*run_ranks(3, go_on))
    assert sorted([*done, *rest]) == [*range(40)]


@pytest.mark.parametrize(
    "other", [{"n": 41}, {"size": 10}, {"shuffle": False}, {"seed": 1}], ids=str
)
def test_a_state_of_other_parts_is_refused_for_samples_would_be_lost_or_come_twice(other):
    def body(_rank):
        made = {"n": 40, "size": 5, "shuffle": True, "seed": 0}
        state = rc.data.WorkQueue(**made).state_dict()
        (what,) = other
        with pytest.raises(ValueError, match=f"the state has {what}={made[what]}, this queue "):
            rc.data.WorkQueue(**{**made, **other}, name="again", state=state)
        with pytest.raises(TypeError, match="must be of state_dict"):
            rc.data.WorkQueue(**made, name="again", state={"epoch": 0})

    run_ranks(1, body)


DAMAGED = [
    ({"next": "x"}, TypeError),
    ({"undone": 5}, TypeError),
    ({"undone": [None]}, TypeError),
    ({"epoch": -1}, ValueError),
    ({"next": 9}, ValueError),
    ({"next": 2, "undone": [2]}, ValueError),
    ({"next": 2, "undone": [1, 1]}, ValueError),
]


@pytest.mark.parametrize(("damage", "kind"), DAMAGED, ids=str)
def test_a_damaged_state_is_refused_where_it_is_passed_and_not_by_who_keeps_the_queue(damage, kind):
    def body(rank):
        queue = rc.data.WorkQueue(40, 5, name="good")
        state = rc.data.WorkQueue(40, 5).state_dict()
        rc.barrier()
        if rank == 1:
            with pytest.raises(kind, match="WorkQueue: the state has epoch="):
                rc.data.WorkQueue(40, 5, name="again", state=state | damage)
        seen = [int(each) for indices in queue for each in indices]
        rc.barrier()
        return seen

    assert sorted(itertools.chain(*run_ranks(2, body))) == [*range(40)]


def test_a_loop_that_is_broken_off_gives_its_part_back():
    def body(_rank):
        queue = rc.data.WorkQueue(6, 2, shuffle=False)
        for _ in queue:
            break
        return [indices.tolist() for indices in queue]

    assert run_ranks(1, body) == [[[0, 1], [2, 3], [4, 5]]]


def test_a_loop_that_is_dropped_waits_for_nobody():
    def body(rank):
        queue = rc.data.WorkQueue(4, 2)
        if rank == 1:
            parts = iter(queue)
            next(parts)
            engine().watch.listeners[ControlKind.WORK] = lambda *_: None  # rank 1 hears no answer
            parts.close()
        rc.barrier()

    run_ranks(2, body)


def test_all_ranks_are_told_both_of_other_arguments():
    def body(rank):
        parts = iter(rc.data.WorkQueue(6, 2 + rank))
        if rank == 1:
            next(parts)
        rc.barrier()
        if rank == 0:
            with pytest.raises(rc.MismatchError) as raised:
                next(parts)
            text = str(raised.value)
        rc.barrier()
        if rank == 1:
            with pytest.raises(rc.MismatchError) as raised:
                next(parts)
            text = str(raised.value)
        rc.barrier()
        return text

    one, other = run_ranks(2, body)
    assert one == other
    assert "rank 0 passes size=2, and rank 1, which asked first, size=3. Pass" in one
    assert "name=" in one


# --- a second queue -----------------------------------------------------------------------------
def sum_of(queue):
    """Return the sum of the samples that this rank takes in an epoch."""
    return sum(int(indices.sum()) for indices in queue)


def take_three_parts(queue):
    """Return what rank 0 takes, and the state behind that, which all know; others take nothing."""
    taken = []
    if rc.rank() == 0:
        for indices in queue:
            taken += indices.tolist()
            queue.done()
            if len(taken) == 15:
                break
    return taken, rc.broadcast_object(queue.state_dict() if rc.rank() == 0 else None)


@pytest.mark.parametrize("n_servers", [0, 1])
def test_a_second_queue_of_a_name_is_refused_on_all_ranks_and_one_of_another_name_is_whole(
    n_servers,
):
    def body(_rank):
        totals = [sum_of(rc.data.WorkQueue(100, 5, seed=1))]
        with pytest.raises(rc.RingcommError, match=r"queue\[work\].*pass a name="):
            rc.data.WorkQueue(100, 5, seed=1)
        totals.append(sum_of(rc.data.WorkQueue(60, 5, name="validation")))
        rc.barrier()
        return totals

    results = run_workers(2, body, 1) if n_servers else run_ranks(2, body)
    assert [sum(each) for each in zip(*results, strict=True)] == [sum(range(100)), sum(range(60))]


@pytest.mark.parametrize("n_servers", [0, 1])
def test_a_half_used_queue_goes_on_from_a_state_under_another_name(n_servers):
    def body(_rank):
        queue = rc.data.WorkQueue(40, 5)
        taken, state = take_three_parts(queue)
        queue.state_dict()  # all have used it
        with pytest.raises(rc.RingcommError, match=r"state_dict\(\), pass a name="):
            rc.data.WorkQueue(40, 5, state=state)
        for indices in rc.data.WorkQueue(40, 5, name="again", state=state):
            taken += indices.tolist()
        rc.barrier()
        return taken

    results = run_workers(2, body, 1) if n_servers else run_ranks(2, body)
    assert sorted(itertools.chain(*results)) == [*range(40)]


def test_a_queue_that_nobody_has_used_may_be_made_otherwise():
    def body(_rank):
        rc.data.WorkQueue(40, 5)
        unused = rc.data.WorkQueue(100, 5)
        total = sum_of(rc.data.WorkQueue(60, 5))
        with pytest.raises(rc.RingcommError, match="another WorkQueue with this name"):
            next(iter(unused))
        rc.barrier()
        return total

    assert sum(run_ranks(2, body)) == sum(range(60))


def test_a_loop_of_an_earlier_view_gives_back_nothing_in_the_next():
    def body(_rank):
        before = rc.data.WorkQueue(40, 5)
        parts = iter(before)
        next(parts)
        rc.barrier()
        engine().extensions.drop(QUEUES)  # as in another view, which has an engine of its own
        queue = rc.data.WorkQueue(30, 5)
        parts.close()
        rc.barrier()
        with pytest.raises(rc.RingcommError, match="before ranks were lost"):
            before.state_dict()
        total = sum_of(queue)
        rc.barrier()
        return total

    assert sum(run_ranks(2, body)) == sum(range(30))


def test_a_question_that_is_repeated_goes_to_the_rank_that_kept_the_queue_when_it_was_made():
    queues = {}

    def body(rank):
        parts = iter(rc.data.WorkQueue(3, 1, shuffle=False))
        queues[rank], listeners = engine().extensions.get(QUEUES), engine().watch.listeners
        taken = next(parts).tolist() if rank == 0 else None
        hear = listeners[ControlKind.WORK]

        def lose_the_first(*_message):
            listeners[ControlKind.WORK] = hear
            queues[1].home = 2

        if rank == 0:
            listeners[ControlKind.WORK] = lose_the_first
        rc.barrier()
        if rank == 1:
            taken = next(parts).tolist()
        rc.barrier()
        return taken

    assert run_ranks(3, body) == [[0], [1], None]


def push_on(table):
    """Push until that raises."""
    while True:
        table.push(np.ones(3)).wait()


def test_after_its_keeper_has_died_a_queue_is_made_again_on_all_ranks_once_they_have_recovered(
    tmp_path,
):
    def body(rank):
        table = ps.table("w", 3, "float64", updater=ps.optim.Add())
        if rank == 0:
            ps.save(tmp_path, background=False)
        queue = rc.data.WorkQueue(40, 5)
        taken, state = take_three_parts(queue)
        parts = iter(queue)
        if rank == 0:
            next(parts)
            kill_server(0)
        with pytest.raises(rc.ServerLostError):
            push_on(table)
        # rank 1 has not used its first one yet
        early = rc.data.WorkQueue(40, 5)
        with pytest.raises(rc.PeerFailedError, match=r"After ps\.recover\(\) make the queue"):
            next(iter(early))
        ps.recover(tmp_path)
        parts.close()  # often the error is what keeps it up to here
        rc.barrier()
        for indices in rc.data.WorkQueue(40, 5, state=state):
            taken += indices.tolist()
        rc.barrier()
        return taken

    results = ended(run_all(2, body, 2, settings=Settings(timeout_s=DEADLINE_S, elastic=1)), 1)
    taken = [each for each in results if isinstance(each, list)]
    assert sorted(itertools.chain(*taken)) == [*range(40)]


def test_a_queue_that_a_rank_has_yet_to_use_is_lost_with_its_keeper_too():
    """Else this rank would begin it anew, and do again what others have done."""

    def body(rank):
        table = ps.table("w", 3, "float64", updater=ps.optim.Add())
        queue = rc.data.WorkQueue(40, 5)
        if rank == 0:
            take_three_parts(queue)
            kill_server(0)
        else:
            rc.broadcast_object(None)  # of take_three_parts()
        keeper = session().layout.servers[0]
        while keeper not in session().layout.dead:
            table.push(np.ones(3)).wait()
        table.push(np.ones(3)).wait()  # another server goes on by now
        with pytest.raises(rc.PeerFailedError, match="which kept the queue"):
            next(iter(queue))
        rc.barrier()
        return rank

    elastic = Settings(timeout_s=DEADLINE_S, elastic=1)
    assert ended(run_all(2, body, 2, settings=elastic, replication=2), 1)[:2] == [0, 1]


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_lease_of_a_worker_that_died_comes_back(victim):
    def body(rank):
        seen = []
        for indices in rc.data.WorkQueue(60, 3):
            if rank == victim:
                raise Boom
            seen += indices.tolist()
        return seen

    elastic = Settings(timeout_s=DEADLINE_S, elastic=1)
    results = run_all(3, body, settings=elastic)
    lived = [each for each in results if isinstance(each, list)]
    assert sorted(itertools.chain(*lived)) == [*range(60)]
