"""When pushes become updates, and how far workers may drift apart."""

import math

import pytest

from ringcomm.ps.server.core.actions import End, Hold, Late, ReleaseDone, RoundContribution
from ringcomm.ps.server.core.rounds import Clocks, Entries, Release, Rounds
from ringcomm.ps.server.core.worker_clocks import WorkerProgress
from ringcomm.ps.update_modes import SSP, FirstOf, mode_of

KEY = (1, 0)


def rounds(workers, first_of=None):
    return Rounds(KEY, workers, first_of)


def give(to, worker, number, request, *, is_held=False, lets_in=False):
    contribution = RoundContribution(worker, request, None, is_held)
    return told(to.contribute(number, contribution, lets_in=lets_in))


def release(to, number, request, *, drops=False):
    return told(to.release(Release(number, request, f"factor of {request}", drops)))


def told(actions):
    """Return actions as short texts."""
    texts = []
    for action in actions:
        if isinstance(action, Late):
            texts.append(f"late {action.contribution.request}")
        elif isinstance(action, ReleaseDone):
            texts.append(f"released {action.request}")
        else:
            assert isinstance(action, End | Hold)
            what = "end" if isinstance(action, End) else "hold"
            requests = "".join(each.request for each in action.contributions)
            how = " dropped" if getattr(action, "drops", False) else ""
            texts.append(f"{what} {action.number} {requests}{how}".replace("  ", " ").rstrip())
    return texts


def test_a_round_ends_with_the_last_and_is_in_worker_order():
    r = rounds([2, 0, 1])
    assert give(r, 2, 0, "c") == []
    assert give(r, 0, 0, "a") == []
    assert give(r, 1, 0, "b") == ["end 1 abc"]
    assert r.current == 1


def test_what_comes_early_waits_for_its_round():
    r = rounds([0, 1])
    give(r, 0, 0, "a")
    give(r, 0, 1, "b")
    assert give(r, 1, 0, "c") == ["end 1 ac"]
    assert give(r, 1, 1, "d") == ["end 2 bd"]


def test_a_worker_that_leaves_is_not_waited_for_and_what_it_gave_counts():
    r = rounds([0, 1, 2])
    give(r, 0, 0, "a")
    give(r, 2, 0, "c")
    assert r.leave(2) == []
    assert told(r.leave(1)) == ["end 1 ac"]


def test_the_first_k_that_ask_are_in_a_round_and_the_next_is_late():
    entries = Entries([0, 1, 2], 2)
    assert entries.ask(1, 0)
    assert entries.ask(1, 0)  # the answer was lost
    assert entries.current == 0
    assert entries.ask(2, 0)
    assert entries.current == 1
    assert not entries.ask(0, 0)
    assert entries.ask(1, 0)  # it was lost again, and the round is over meanwhile
    assert entries.current == 1


def test_a_round_that_is_full_before_its_turn_takes_no_more():
    entries = Entries([0, 1, 2], 2)
    assert entries.ask(0, 1)
    assert entries.ask(1, 1)
    assert not entries.ask(2, 1)
    assert entries.current == 0
    assert entries.ask(2, 0)
    assert entries.ask(0, 0)
    assert entries.current == 2


def test_fewer_than_k_that_live_are_enough():
    entries = Entries([0, 1, 2], 2)
    assert entries.ask(0, 0)
    entries.leave(1)
    assert entries.current == 0
    entries.leave(2)
    assert entries.current == 1
    assert entries.ask(0, 1)
    assert entries.current == 2


def test_a_table_joins_in_the_round_of_now_and_hears_the_same_again():
    entries = Entries([0], 1)
    entries.ask(0, 0)
    assert entries.join(7) == 1
    entries.ask(0, 1)
    assert (entries.join(7), entries.join(8)) == (1, 2)


def test_a_contribution_counts_once_its_worker_is_in_the_round():
    r = rounds([0, 1, 2], first_of=2)
    for worker, request in enumerate("abc"):
        assert give(r, worker, 0, request) == []
    assert told(r.decide(2, 0, is_in=True)) == []
    assert told(r.decide(0, 0, is_in=True)) == ["end 1 ac"]
    assert [each.request for each in r.pending()] == ["b"]  # until it is known that it is not
    assert told(r.decide(1, 0, is_in=False)) == ["late b"]
    assert r.decide(1, 0, is_in=False) == []
    assert r.pending() == []
    assert give(r, 1, 0, "b") == ["late b"]


def test_a_round_ends_without_those_who_have_left():
    r = rounds([0, 1], first_of=2)
    give(r, 0, 0, "a")
    assert r.decide(0, 0, is_in=True) == []
    assert told(r.leave(1)) == ["end 1 a"]


def test_who_is_in_a_round_goes_where_the_round_goes():
    r, other = rounds([0, 1], first_of=2), rounds([0, 1], first_of=2)
    give(r, 0, 3, "a")
    r.decide(0, 3, is_in=True)
    other.resume(3, r.let_in(), None)
    assert r.give_back() == ["a"]
    give(other, 0, 3, "a")
    assert give(other, 1, 3, "b", lets_in=True) == ["end 4 ab"]


# --- means that are held ------------------------------------------------------------------------
def test_a_mean_that_is_held_ends_with_the_first_release():
    r = rounds([0, 1])
    give(r, 0, 0, "a", is_held=True)
    assert give(r, 1, 0, "b") == ["hold 1 ab"]
    assert r.at == (0, True)
    assert give(r, 0, 1, "c") == []
    assert release(r, 0, "r") == ["end 1", "released r"]
    assert release(r, 0, "s") == ["released s"]  # of a round that is over
    assert give(r, 1, 1, "d") == ["end 2 cd"]


def test_a_release_that_comes_before_its_mean_waits_for_it():
    r = rounds([0])
    assert release(r, 0, "r", drops=True) == []
    assert give(r, 0, 0, "a", is_held=True) == ["hold 1 a", "end 1 dropped", "released r"]


def test_a_contribution_to_a_round_that_is_held_comes_too_late():
    r = rounds([0, 1], first_of=1)
    assert give(r, 0, 0, "a", is_held=True, lets_in=True) == ["hold 1 a"]
    assert give(r, 1, 0, "b", is_held=True) == ["late b"]


def test_a_mean_is_dropped_once_all_have_left_whose_it_is():
    r = rounds([0, 1, 2], first_of=2)
    give(r, 0, 0, "a", is_held=True, lets_in=True)
    give(r, 1, 0, "b", is_held=True, lets_in=True)
    assert r.leave(0) == []
    assert told(r.leave(1)) == ["end 1 dropped"]
    alone = rounds([0])
    give(alone, 0, 0, "a", is_held=True)
    assert told(alone.leave(0)) == ["end 1 dropped"]


# --- limits -------------------------------------------------------------------------------------
def test_no_round_ends_beyond_the_least_limit_of_those_that_count():
    r = rounds([0])
    r.limit(7, (1, False))
    r.limit(8, (2, False))
    assert [give(r, 0, number, request) for number, request in enumerate("abc")] == [
        ["end 1 a"],
        [],
        [],
    ]
    assert told(r.unlimit(7)) == ["end 2 b"]
    assert told(r.unlimit(8)) == ["end 3 c"]


def test_a_mean_may_be_held_though_its_round_may_not_end():
    r = rounds([0])
    r.limit(7, (0, True))
    assert give(r, 0, 0, "a", is_held=True) == ["hold 1 a"]
    assert release(r, 0, "r") == []
    assert told(r.unlimit(7)) == ["end 1", "released r"]


def test_no_mean_is_held_beyond_a_limit():
    r = rounds([0, 1])
    give(r, 0, 0, "a", is_held=True)
    r.limit(7, r.at)
    assert told(r.leave(1)) == []
    r.limit(7, (0, True))
    assert told(r.advance()) == ["hold 1 a"]
    assert release(r, 0, "r") == []
    assert told(r.unlimit(7)) == ["end 1", "released r"]


# --- clocks and modes ---------------------------------------------------------------------------
def test_clocks_know_the_slowest_until_it_leaves():
    clocks = Clocks([0, 1])
    clocks.tick(0, 5)
    assert clocks.slowest == 0
    clocks.tick(1, 3)
    clocks.tick(1, 2)  # clocks do not go back
    assert clocks.slowest == 3
    assert clocks.slowest_with({0: 1}) == 1
    clocks.leave(1)
    assert clocks.slowest == 5
    clocks.leave(0)
    assert clocks.slowest == math.inf


@pytest.mark.parametrize("gone", [(), (3,), (1, 2, 3)])
def test_a_copy_knows_of_the_workers_what_the_server_knew_that_has_died(gone):
    def progress():
        return WorkerProgress(0, (1, 2, 3), lambda: {1, 2, 3} - {*gone}, {})

    before, after = progress(), progress()
    for worker in (1, 2, 3):
        before.clocks.tick(worker, 10 * worker)
    for each in (before, after):
        for worker in gone:
            each.leave(worker)
    after.load(before.state())
    assert after.state() == before.state()


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "2"])
def test_a_bound_is_a_number(wrong):
    with pytest.raises(ValueError, match="SSP takes a number of steps"):
        SSP(wrong)
    with pytest.raises(ValueError, match="FirstOf takes a number of workers"):
        FirstOf(wrong)


def test_modes_have_names():
    assert [str(mode_of(m)) for m in ("sync", SSP(3), FirstOf(2))] == [
        "'sync'",
        "SSP(3)",
        "FirstOf(2)",
    ]
    with pytest.raises(ValueError, match="mode is 'fast'; it must be 'sync', 'async'"):
        mode_of("fast")
