"""The control channel, with a transport that only records."""

from ringcomm.transport.base import Arrived, Died
from ringcomm.transport.header import Header, Kind
from ringcomm.transport.watch import Watch


class Recorder:
    rank, size, ring_epoch, incarnation = 0, 3, 7, 0

    def __init__(self):
        self.events, self.sent = [], []

    def poll(self):
        events, self.events = self.events, []
        return events

    def control(self, dest, message):
        header, text = Header.unpack(message)
        self.sent.append((dest, header.kind, header.about, text))


def hear(*events):
    transport = Recorder()
    transport.events = list(events)
    watch = Watch(transport)
    watch.sequence = 5
    watch.poll()
    return watch, transport


def test_a_death_seen_here_is_told_to_those_who_cannot_see_it():
    _, transport = hear(Died(2, "was killed", 2))
    assert (1, Kind.FAILED, 2, "was killed") in transport.sent


def test_a_follower_s_death_is_not_spread_as_a_cause():
    _, transport = hear(Died(2, "followed", 1))
    assert transport.sent == []


def test_messages_of_an_older_ring_are_dropped():
    old = Header(Kind.FAILED, 6, 0, 5, about=1).pack("long ago")
    new = Header(Kind.FAILED, 7, 0, 5, about=2).pack("now")
    watch, _ = hear(Arrived(1, old), Arrived(1, new))
    assert watch.peers.dead == {2: "now"}


def test_a_rank_answers_only_for_operations_it_has_entered():
    asked = [Arrived(1, Header(Kind.ASK, 7, 0, n).pack()) for n in (5, 6)]
    _, transport = hear(*asked)
    assert transport.sent == [(1, Kind.HERE, 0, "")]
