"""When pushes become updates, and how far workers may drift apart."""

import math

import pytest

from ringcomm.ps.rounds import SSP, Clocks, Entries, FirstOf, Rounds, mode_of


def test_a_round_ends_with_the_last_and_is_in_worker_order():
    rounds = Rounds([2, 0, 1])
    for worker in (2, 0):
        assert rounds.add(worker, 0, f"g{worker}")
        assert rounds.take() is None
    assert rounds.missing == [1]
    rounds.add(1, 0, "g1")
    assert rounds.take() == [(0, "g0"), (1, "g1"), (2, "g2")]
    assert rounds.take() is None


def test_what_comes_early_waits_for_its_round():
    rounds = Rounds([0, 1])
    rounds.add(0, 0, "a")
    rounds.add(0, 1, "b")
    rounds.add(1, 0, "c")
    assert rounds.take() == [(0, "a"), (1, "c")]
    assert rounds.take() is None
    rounds.add(1, 1, "d")
    assert rounds.take() == [(0, "b"), (1, "d")]


def test_a_worker_that_leaves_is_not_waited_for_and_what_it_gave_counts():
    rounds = Rounds([0, 1, 2])
    rounds.add(0, 0, "a")
    rounds.add(2, 0, "c")
    rounds.leave(2)
    assert rounds.take() is None
    rounds.leave(1)
    assert rounds.take() == [(0, "a"), (2, "c")]


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


def test_a_contribution_counts_once_its_worker_is_in_the_round():
    rounds = Rounds([0, 1, 2], first_of=2)
    for worker in range(3):
        assert rounds.add(worker, 0, f"g{worker}")
        assert rounds.take() is None
    rounds.enter(2, 0)
    assert rounds.take() is None
    rounds.enter(0, 0)
    assert rounds.take() == [(0, "g0"), (2, "g2")]
    assert rounds.pending() == [(0, 1, "g1")]  # until it is known that it is not
    assert rounds.drop(1, 0) == "g1"
    assert rounds.drop(1, 0) is None
    assert rounds.pending() == []
    assert not rounds.add(1, 0, "g1")


def test_a_round_ends_without_those_who_have_left():
    rounds = Rounds([0, 1], first_of=2)
    rounds.add(0, 0, "a")
    rounds.enter(0, 0)
    assert rounds.take() is None
    rounds.leave(1)
    assert rounds.take() == [(0, "a")]


def test_who_is_in_a_round_goes_where_the_round_goes():
    rounds, other = Rounds([0, 1], first_of=2), Rounds([0, 1], first_of=2)
    rounds.add(0, 3, "a")
    rounds.enter(0, 3)
    other.resume(3, rounds.pending(), rounds.entered())
    other.add(1, 3, "b")
    other.enter(1, 3)
    assert other.take() == [(0, "a"), (1, "b")]


def test_no_round_ends_beyond_the_least_limit_of_those_that_count():
    rounds = Rounds([0])
    for number in range(3):
        rounds.add(0, number, number)
    rounds.limit(7, 1)
    rounds.limit(8, 2)
    assert rounds.take() == [(0, 0)]
    assert rounds.take() is None
    rounds.unlimit(7)
    assert rounds.take() == [(0, 1)]
    assert rounds.take() is None
    rounds.unlimit(8)
    assert rounds.take() == [(0, 2)]


def test_clocks_know_the_slowest_until_it_leaves():
    clocks = Clocks([0, 1])
    clocks.tick(0, 5)
    assert clocks.slowest == 0
    clocks.tick(1, 3)
    clocks.tick(1, 2)  # clocks do not go back
    assert clocks.slowest == 3
    assert clocks.behind(4) == [1]
    clocks.leave(1)
    assert clocks.slowest == 5
    clocks.leave(0)
    assert clocks.slowest == math.inf


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
