"""What a rank concludes from what it hears: a pure table."""

import pytest

from ringcomm.transport.control_header import NBYTES, ControlHeader, ControlKind
from ringcomm.transport.peer_state import GaveUp, Obstacle, PeerTable


def table():
    return PeerTable(rank=0, size=5)


ALL = range(5)
KEY, OTHER = 7, 8


def test_nothing_stands_in_the_way_at_first():
    assert table().obstacle(KEY, ALL) is None


def test_death_is_an_obstacle_to_every_operation_of_that_rank_and_no_other():
    peers = table()
    peers.note_dead(3, "died", blames=3)
    assert peers.obstacle(KEY, ALL) == peers.obstacle(OTHER, (0, 3)) == Obstacle(3, "died")
    assert peers.obstacle(KEY, (0, 1)) is None


def test_the_cause_is_named_before_its_followers():
    peers = table()
    peers.note_dead(2, "raised PeerFailedError", blames=4)
    peers.note_dead(4, "raised ValueError", blames=4)
    assert peers.obstacle(KEY, ALL) == Obstacle(4, "raised ValueError")


def test_the_cause_is_named_although_it_is_no_member():
    peers = table()
    peers.note_dead(2, "raised PeerFailedError", blames=4)
    peers.note_dead(4, "raised ValueError", blames=4)
    assert peers.obstacle(KEY, (0, 2)) == Obstacle(4, "raised ValueError")
    assert peers.obstacle(KEY, (0, 1)) is None


def test_a_follower_alone_points_at_the_cause():
    peers = table()
    peers.note_dead(2, "whatever", blames=4)
    assert peers.obstacle(KEY, ALL) == Obstacle(4, "failed, and rank 2 stopped because of it")


def test_a_cause_that_left_is_not_said_to_have_failed():
    peers = table()
    peers.note_left(4, "left the job")
    peers.note_dead(2, "whatever", blames=4)
    assert peers.obstacle(KEY, ALL) == Obstacle(4, "left the job, and rank 2 stopped because of it")


def test_words_are_better_than_a_bare_death():
    peers = table()
    peers.note_dead(1, "died without a word", blames=1)
    peers.note_failed(1, "raised ValueError: boom")
    assert peers.obstacle(KEY, ALL) == Obstacle(1, "raised ValueError: boom")
    peers.note_dead(1, "died without a word", blames=1)
    assert peers.obstacle(KEY, ALL) == Obstacle(1, "raised ValueError: boom")


def test_departure_hinders_only_what_the_rank_will_never_enter():
    peers = table()
    peers.note_left(2, "left")
    assert peers.obstacle(KEY, ALL) is None
    peers.note_absent(2, KEY, "left")
    assert peers.obstacle(KEY, ALL) == Obstacle(2, "left")
    assert peers.obstacle(OTHER, ALL) is None


def test_missing_are_those_that_did_not_say_they_entered():
    peers = table()
    peers.note_entered(1, KEY)
    peers.note_entered(2, OTHER)
    peers.note_dead(3, "died", blames=3)
    assert peers.missing(KEY, ALL) == [2, 4]
    assert peers.missing(KEY, (0, 1)) == []
    peers.forget(KEY)
    assert peers.missing(KEY, ALL) == [1, 2, 4]


def test_who_waits_elsewhere_is_not_blamed_unless_all_do():
    peers = table()
    peers.note_elsewhere(1, KEY, "")
    peers.note_elsewhere(2, KEY, "barrier #3")
    peers.note_entered(4, KEY)
    assert peers.blamed(KEY, ALL) == [1, 3]  # 3 has not answered
    assert peers.blamed(KEY, (0, 2, 4)) == [2]
    peers.note_entered(2, KEY)
    assert peers.blamed(KEY, (0, 2, 4)) == []


def test_who_is_elsewhere_is_so_until_it_enters():
    peers = table()
    peers.note_elsewhere(2, KEY, "barrier #3")
    peers.note_elsewhere(1, KEY, "")
    assert peers.whereabouts(KEY) == {1: "", 2: "barrier #3"}
    peers.note_entered(2, KEY)
    assert peers.whereabouts(KEY) == {1: ""}
    peers.forget(KEY)
    assert peers.whereabouts(KEY) == {}


def test_still_here_are_neither_dead_nor_gone():
    peers = table()
    peers.note_left(1, "left")
    peers.note_dead(2, "died", blames=2)
    assert peers.still_here == [3, 4]


def test_what_a_rank_says_first_when_it_gives_up_counts_for_its_groups():
    peers = table()
    first, second = GaveUp((1,), "first"), GaveUp((2,), "second")
    peers.note_gave_up(3, first)
    peers.note_gave_up(3, second)
    assert peers.quitter(ALL) is first
    assert peers.quitter((0, 1)) is None


@pytest.mark.parametrize("missing", [(), (2,), (1, 5)])
def test_giving_up_survives_the_wire(missing):
    gave_up = GaveUp(missing, "two\nlines")
    assert GaveUp.of_text(gave_up.text()) == gave_up


@pytest.mark.parametrize("text", ["", "raised ValueError: größer"])
def test_header_survives_the_wire(text):
    header = ControlHeader(
        ControlKind.FAILED, 3, 2**63, 2**64 - 1, value=2**40, about=70_000, flag=True, round=31
    )
    packed = header.pack(text)
    assert len(packed) == NBYTES + len(text.encode())
    assert ControlHeader.unpack(packed) == (header, text)


def test_a_rank_that_left_is_named_before_those_who_failed_for_want_of_it():
    peers = table()
    peers.note_dead(1, "raised PeerFailedError", blames=3)
    peers.note_absent(3, KEY, "left the job")
    assert peers.obstacle(KEY, ALL) == Obstacle(3, "left the job")
    assert peers.obstacle(OTHER, ALL) == Obstacle(3, "failed, and rank 1 stopped because of it")


def test_a_rank_that_left_and_then_died_is_said_to_have_left():
    peers = table()
    peers.note_absent(3, KEY, "left the job")
    peers.note_dead(3, "died without a word", blames=3)
    assert peers.obstacle(KEY, ALL) == Obstacle(3, "left the job")
