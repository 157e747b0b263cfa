"""Cores of several servers beside a model: in whatever order messages come, and come again.

No push is lost, doubled or torn; no partition has two owners; every request is answered once; a
round has the gradients of its workers; a snapshot is between the same two rounds everywhere; reads
have what they must; and nothing is kept once all have left.
"""

import random

import pytest
from harness import at_length
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_for_event_orders import hypothesis_settings
from ps_core_steps import KEY, arrive, ask_for_move, core_of, freeze, give, leave, names, push
from ps_simulation import Choices, World
from ps_simulation_message_types import Request, Shape

from ringcomm.ps.control import commands
from ringcomm.ps.control.commands import LET, STOP, Snapshot
from ringcomm.ps.protocol.frames import FrameHeader, FrameKind
from ringcomm.ps.server.core import events as on
from ringcomm.ps.server.core.core_table import ServedTable
from ringcomm.ps.server.core.unit import AppliedHere, Unit
from ringcomm.ps.update_modes import SSP, FirstOf, Mode

ANY_ORDER = hypothesis_settings(20_000, 20)
MODES = {"async": Mode("async"), "sync": Mode("sync"), "first_of": FirstOf(2), "ssp": SSP(1)}
WITHOUT_ENTRIES = ("async", "sync", "ssp")
HELD = ("sync", "first_of")
KINDS = {"dense": True, "rows": False}


def runs(test):
    """Call a test with the choices of many runs, and how many take part in them."""
    few, some = st.integers(2, 3), st.integers(2, 4)
    numbers = st.binary(min_size=100, max_size=800)
    given_all = given(
        numbers=numbers, n_servers=few, n_workers=some, n_ops=st.integers(2, 10),
        may_fail=st.booleans(),
    )  # fmt: skip
    return ANY_ORDER(given_all(test))


def run(shapes, numbers, n_servers, n_workers, n_ops, **faults):
    world = World(shapes, Choices(numbers), n_servers, n_workers, n_ops, **faults)
    world.run()
    world.require_all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
@runs
def test_no_push_is_lost_doubled_or_torn(mode, kind, may_fail, **sizes):
    run([Shape(MODES[mode], KINDS[kind])], may_fail=may_fail, **sizes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["sync", "first_of"])
@runs
def test_a_mean_that_is_held_is_of_all_its_workers_and_released_once(mode, kind, may_fail, **sizes):
    run([Shape(MODES[mode], KINDS[kind], is_held=True)], may_fail=may_fail, **sizes)


@pytest.mark.parametrize("mode", MODES)
@runs
def test_what_comes_before_the_values_of_the_chief_waits_for_them(mode, may_fail, **sizes):
    run([Shape(MODES[mode], True, is_of_chief=True)], may_fail=may_fail, **sizes)


@runs
def test_tables_of_all_kinds_go_on_while_others_are_opened(may_fail, **sizes):
    kinds = [(mode, is_dense) for mode in MODES.values() for is_dense in KINDS.values()]
    shapes = [Shape(m, is_dense, 2, is_late=k % 2 == 1) for k, (m, is_dense) in enumerate(kinds)]
    run(shapes, may_fail=may_fail, **sizes)


@pytest.mark.parametrize("mode", WITHOUT_ENTRIES)
@runs
def test_rows_move_in_several_views(mode, may_fail, **sizes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands, "AT_ONCE", 1)
        run([Shape(MODES[mode], False)], may_fail=may_fail, **sizes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
@runs
def test_who_lives_loses_nothing_by_deaths_and_nothing_is_kept_for_the_dead(
    mode, kind, may_fail, **sizes
):
    run([Shape(MODES[mode], KINDS[kind])], may_fail=may_fail, may_die=True, **sizes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", HELD)
@runs
def test_a_mean_that_is_held_ends_though_some_of_its_workers_die(mode, kind, may_fail, **sizes):
    run([Shape(MODES[mode], KINDS[kind], is_held=True)], may_fail=may_fail, may_die=True, **sizes)


@pytest.mark.parametrize("mode", MODES)
@runs
def test_a_chief_that_dies_between_first_values_is_followed_by_another(mode, may_fail, **sizes):
    shapes = [Shape(MODES[mode], True, is_of_chief=True)]
    run(shapes, may_fail=may_fail, may_die=True, **sizes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["sync", "first_of", "ssp"])
@runs
def test_a_worker_that_rests_tears_no_step_and_nobody_waits_for_it(mode, kind, may_fail, **sizes):
    run([Shape(MODES[mode], KINDS[kind])], may_fail=may_fail, may_die=True, may_rest=True, **sizes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", HELD)
@runs
def test_a_mean_that_is_held_ends_though_workers_rest(mode, kind, may_fail, **sizes):
    shapes = [Shape(MODES[mode], KINDS[kind], is_held=True)]
    run(shapes, may_fail=may_fail, may_die=True, may_rest=True, **sizes)


@pytest.mark.parametrize("seeds", at_length([range(20_000)], [range(60)]), ids=len)
def test_who_stood_by_trains_in_the_places_of_the_dead(seeds):
    """Beside moves, snapshots, and deaths of those that stand still, or that come in."""
    n_joined = n_returned = 0
    for seed in seeds:
        rng = random.Random(seed)
        mode, is_dense = rng.choice([*MODES]), rng.random() < 0.5
        shape = Shape(MODES[mode], is_dense, is_held=mode in HELD and rng.random() < 0.3)
        numbers = Choices(rng.randbytes(rng.randint(100, 1200)))
        n_servers, n_workers, n_ops = rng.randint(2, 3), rng.randint(2, 4), rng.randint(2, 25)
        may_fail, may_rest = rng.random() < 0.5, rng.random() < 0.2
        faults = {"may_fail": may_fail, "may_die": True, "may_rest": may_rest, "n_spares": 3}
        world = World([shape], numbers, n_servers, n_workers, n_ops, **faults)
        try:
            world.run()
            world.require_all()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        n_joined += world.n_joined
        n_returned += world.n_returned
    assert n_joined > len(seeds) // 2
    assert n_returned


# --- one core, step by step ---------------------------------------------------------------------
def commit(core):
    core.handle(on.Taken(KEY, 0, ""), 0.0)
    return give(core, "commit", epoch=1, moved=[(0, 1)], clocks=[(1, 0), (2, 0)])


def test_a_push_that_comes_again_while_it_waits_is_answered_with_the_first():
    core = core_of(Mode("sync"))
    assert arrive(core, push(1, 5)) == []
    assert arrive(core, push(1, 5)) == []
    assert arrive(core, push(2, 3)) == ["End"]
    assert arrive(core, push(1, 5)) == ["Acknowledge"]


def test_a_push_that_came_twice_during_a_move_comes_back_and_is_not_said_to_be_applied():
    core = core_of(Mode("sync"))
    assert arrive(core, push(1, 5)) == []
    freeze(core)
    assert arrive(core, push(1, 5)) == []
    done = commit(core)
    assert done.count("Redirect") == 1
    assert "Acknowledge" not in done
    assert arrive(core, push(1, 5)) == ["Redirect"]


def test_a_request_of_an_older_view_is_not_kept_before_those_of_this_one():
    core = core_of(Mode("sync"), index=1)
    give(core, "freeze")
    core.add_unit(Unit(KEY, Mode("sync"), AppliedHere(), (1, 2), is_ready=True))
    assert commit_at_destination(core) == ["Moved", "Settled", "Reply", "Open"]
    assert give(core, "freeze") == ["Close"]  # until clients have sent again what came back
    for worker in (1, 2, 9):
        core.handle(on.Noted(worker, KEY, 1), 0.0)
    assert arrive(core, push(1, 7, clock=2)) == ["Redirect"]
    assert arrive(core, push(1, 8, view=1)) == []
    assert give(core, "drain", at=(1, False)) == ["Retry", "Settled"]


def commit_at_destination(core):
    return give(core, "commit", epoch=1, moved=[(0, 1)], clocks=[(1, 0), (2, 0)])


def test_a_leave_lets_no_mean_be_held_of_a_partition_that_is_on_its_way():
    core = core_of(Mode("sync"))
    assert arrive(core, push(1, 5), is_held=True) == []
    freeze(core)
    assert leave(core, 2) == []
    assert commit(core) == ["Moved", "Redirect", "Retire", "Reply"]
    assert arrive(core, push(1, 5), is_held=True) == ["Redirect"]


def test_a_leave_during_a_held_mean_drops_it_once_nobody_can_release_it():
    core = core_of(FirstOf(1))
    request = push(1, 5)
    core.handle(on.Arrived(request, KEY, 0), 0.0)
    event = on.Contributed(KEY, request, "g", is_held=True, lets_in=True)
    assert names(core.handle(event, 0.0)) == ["Hold"]
    (ended,) = core.handle(on.Left(1), 0.0)
    assert (ended.number, ended.drops) == (1, True)


def test_a_mean_that_was_held_at_the_source_may_not_end_at_the_destination_before_the_commit():
    core = core_of(Mode("sync"), index=1)
    give(core, "freeze")
    unit = Unit(KEY, Mode("sync"), AppliedHere(), (1, 2), is_ready=True)
    assert core.add_unit(unit) == []  # neither C++ nor mapped memory answers for it
    unit.rounds.resume(3, [], [1])
    assert leave(core, 1) == []
    assert commit_at_destination(core) == ["Moved", "Settled", "Reply", "Open"]
    assert names(core.handle(on.Finished(KEY), 0.0)) == ["End"]


def test_a_release_that_waits_while_its_partition_moves_is_carried_out_when_it_comes_again():
    core = core_of(Mode("sync"))
    arrive(core, push(1, 5), is_held=True)
    event = on.Released(KEY, push(1, 6), 1.0, drops=False)
    assert names(core.handle(event, 0.0)) == []  # the mean is not there yet
    assert core.unit_of(KEY).applied_without_pending() == {1: 4}


def test_what_a_worker_has_pushed_before_the_values_counts_though_it_has_left():
    core = core_of(Mode("async"), is_ready=False)
    assert arrive(core, push(2, 5)) == []
    assert leave(core, 2) == []
    first = push(1, 1)
    event = on.Initialized(KEY, first, "values")
    assert names(core.handle(event, 0.0)) == ["Write", "Retry"]


def test_a_push_that_waits_for_the_values_is_carried_out_before_those_behind_it_after_a_thaw():
    """Else it would count as one that came before, and be lost."""
    core = core_of(SSP(1), is_ready=False)
    assert arrive(core, push(1, 5)) == []
    freeze(core)
    assert arrive(core, push(2, 3)) == []  # the first values, let us say: kept, as is the next
    assert arrive(core, push(1, 6)) == []
    core.handle(on.Taken(KEY, 0, "no memory"), 0.0)
    assert give(core, "thaw")[:2] == ["Retry", "Retry"]
    assert names(core.handle(on.Initialized(KEY, push(2, 3), None), 0.0)) == ["Write", "Retry"]


def test_a_drain_ends_rounds_as_far_as_it_says_and_keeps_what_is_further():
    core = core_of(Mode("sync"))
    core.handle(on.Stopped(push(9, 1), 9 << 32), 0.0)
    for sequence, worker, clock in [(5, 1, 0), (6, 1, 1), (5, 2, 0), (6, 2, 1)]:
        assert arrive(core, push(worker, sequence, clock=clock)) == []
    assert give(core, "freeze") == ["Close", "Reply"]
    core.handle(on.MomentEnded(push(9, 2), 9 << 32), 0.0)
    assert give(core, "drain", at=(1, False)) == ["End", "Reply"]
    assert core.unit_of(KEY).rounds.at == (1, False)


def test_a_request_behind_one_that_is_kept_is_kept_too():
    core = core_of(Mode("sync"))
    give(core, "freeze")
    assert give(core, "drain", at=(1, False)) == []
    assert arrive(core, push(1, 5, clock=1)) == []
    assert core.handle(on.Arrived(push(1, 6), KEY, None), 0.0) == []  # an assignment
    assert names(core.handle(on.Arrived(push(2, 6), KEY, None), 0.0)) == ["Carry"]


def read(worker, clock):
    return Request(worker, FrameHeader(FrameKind.PULL, origin=worker, table=1, clock=clock))


def test_a_clock_is_believed_once_all_that_came_back_was_sent_again():
    core = core_of(SSP(0), index=1)
    give(core, "freeze")
    core.add_unit(Unit(KEY, SSP(0), AppliedHere(), (1, 2), is_ready=True))
    commit_at_destination(core)
    core.handle(on.Finished(KEY), 0.0)
    for worker in (1, 2):
        core.handle(
            on.Ticked(Request(worker, FrameHeader(FrameKind.TICK, origin=worker, clock=1))), 0.0
        )
    assert names(core.handle(on.Read(KEY, read(1, 1)), 0.0)) == []
    core.handle(on.Noted(1, KEY, 1), 0.0)
    assert names(core.handle(on.Noted(2, KEY, 1), 0.0)) == ["Serve"]


def test_no_round_of_a_table_that_is_new_ends_while_rounds_are_stopped():
    core = core_of(Mode("sync"))
    core.handle(on.Stopped(push(9, 1), 9 << 32), 0.0)
    core.add_table(ServedTable(2, "new", Mode("sync"), True, [0]))
    core.add_unit(Unit((2, 0), Mode("sync"), AppliedHere(), (1, 2), is_ready=True))
    for worker in (1, 2):
        assert core.handle(on.Contributed((2, 0), push(worker, 1), "g"), 0.0) == []
    assert names(core.handle(on.MomentEnded(push(9, 2), 9 << 32), 0.0)) == ["Drop", "End", "Reply"]


def test_a_moment_that_a_round_has_gone_past_is_not_whole():
    core = core_of(Mode("sync"))
    for worker in (1, 2):
        arrive(core, push(worker, 5))
    (reply,) = core.handle(on.Held(push(9, 1), 9 << 32, {1: 0}), 0.0)
    assert reply.content == {"is_whole": False}


def test_a_table_that_has_values_does_not_begin_again():
    core = core_of(Mode("async"))
    (again,) = core.handle(on.Initialized(KEY, push(1, 1), "values"), 0.0)
    assert again.payload is None


def test_the_memory_of_what_moved_is_free_at_once_if_nobody_is_left():
    core = core_of(Mode("async"))
    ask_for_move(core)
    freeze(core)
    for rank in (1, 2, 9):
        leave(core, rank)
    assert commit(core)[-1] == "Free"


def test_a_leave_confirms_what_has_moved():
    core = core_of(Mode("async"))
    ask_for_move(core)
    freeze(core)
    assert "Free" not in commit(core)
    leave(core, 9)
    core.handle(on.Noted(1, KEY, 1), 0.0)
    assert leave(core, 2) == ["Free"]


def test_rounds_go_on_once_who_has_stopped_them_has_left():
    core, number = core_of(Mode("sync")), 9 << 32
    stop = core.handle(on.Asked(push(9, 1), Snapshot(number, 0.0, None)), 0.0)
    assert [(each.dest, each.do, each.content) for each in stop] == [
        (0, STOP, number), (1, STOP, number)
    ]  # fmt: skip
    core.handle(on.Stopped(push(0, 1), number), 0.0)
    for worker in (1, 2):
        assert arrive(core, push(worker, 5)) == []
    let = core.handle(on.Left(9), 0.0)
    assert [(each.dest, each.do, each.content) for each in let] == [
        (0, LET, [number, False]), (1, LET, [number, False])
    ]  # fmt: skip
    assert names(core.handle(on.MomentEnded(push(0, 2), number), 0.0)) == ["Drop", "End", "Reply"]
