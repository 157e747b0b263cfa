"""What a rank concludes from what it hears: a pure table."""

import pytest

from ringcomm.transport.header import NBYTES, Header, Kind
from ringcomm.transport.peers import GaveUp, Obstacle, PeerTable


def table():
    return PeerTable(rank=0, size=5)


def test_nothing_stands_in_the_way_at_first():
    assert table().obstacle(1) is None


def test_death_is_an_obstacle_to_every_operation():
    peers = table()
    peers.note_dead(3, "died", blames=3)
    assert peers.obstacle(1) == peers.obstacle(99) == Obstacle(3, "died")


def test_the_cause_is_named_before_its_followers():
    peers = table()
    peers.note_dead(2, "raised PeerFailedError", blames=4)
    peers.note_dead(4, "raised ValueError", blames=4)
    assert peers.obstacle(1) == Obstacle(4, "raised ValueError")


def test_a_follower_alone_points_at_the_cause():
    peers = table()
    peers.note_dead(2, "whatever", blames=4)
    assert peers.obstacle(1) == Obstacle(2, "stopped because rank 4 failed")


def test_words_are_better_than_a_bare_death():
    peers = table()
    peers.note_dead(1, "died without a word", blames=1)
    peers.note_failed(1, "raised ValueError: boom")
    assert peers.obstacle(1) == Obstacle(1, "raised ValueError: boom")
    peers.note_dead(1, "died without a word", blames=1)
    assert peers.obstacle(1) == Obstacle(1, "raised ValueError: boom")


@pytest.mark.parametrize(("last", "operation", "is_obstacle"), [(7, 7, False), (7, 8, True)])
def test_departure_counts_only_for_later_operations(last, operation, is_obstacle):
    peers = table()
    peers.note_left(2, last, "left")
    assert (peers.obstacle(operation) == Obstacle(2, "left")) is is_obstacle


def test_missing_are_those_that_did_not_say_they_entered():
    peers = table()
    peers.note_entered(1, 5)
    peers.note_entered(2, 4)
    peers.note_dead(3, "died", blames=3)
    assert peers.missing(5) == [2, 4]
    peers.note_entered(2, 6)
    peers.note_entered(2, 5)  # an older answer that comes late
    assert peers.missing(6) == [1, 4]


def test_still_here_are_neither_dead_nor_gone():
    peers = table()
    peers.note_left(1, 3, "left")
    peers.note_dead(2, "died", blames=2)
    assert peers.still_here == [3, 4]


def test_the_first_to_give_up_counts():
    peers = table()
    first, second = GaveUp(3, (1,), "first"), GaveUp(3, (2,), "second")
    peers.note_gave_up(first)
    peers.note_gave_up(second)
    assert peers.gave_up is first


def test_a_later_give_up_in_an_earlier_operation_is_heard():
    """Else the one that gave up in the earlier operation would wait in it for ever."""
    peers = table()
    peers.note_gave_up(GaveUp(3, (2,), "in 3"))
    peers.note_gave_up(GaveUp(2, (), "in 2"))
    assert peers.gave_up == GaveUp(2, (), "in 2")


@pytest.mark.parametrize("missing", [(), (2,), (1, 5)])
def test_giving_up_survives_the_wire(missing):
    gave_up = GaveUp(9, missing, "two\nlines")
    assert GaveUp.of_text(9, gave_up.text()) == gave_up


@pytest.mark.parametrize("text", ["", "raised ValueError: größer"])
def test_header_survives_the_wire(text):
    header = Header(Kind.FAILED, 3, 1, 2**40, fingerprint=2**64 - 1, about=70_000, flag=True)
    packed = header.pack(text)
    assert len(packed) == NBYTES + len(text.encode())
    assert Header.unpack(packed) == (header, text)


def test_a_rank_that_left_is_named_before_those_who_failed_for_want_of_it():
    peers = table()
    peers.note_dead(1, "raised PeerFailedError", blames=3)
    peers.note_left(3, 5, "left the job")
    assert peers.obstacle(6) == Obstacle(3, "left the job")
    assert peers.obstacle(5).rank == 1


def test_a_rank_that_left_and_then_died_is_said_to_have_left():
    peers = table()
    peers.note_left(3, 5, "left the job")
    peers.note_dead(3, "died without a word", blames=3)
    assert peers.obstacle(6) == Obstacle(3, "left the job")
