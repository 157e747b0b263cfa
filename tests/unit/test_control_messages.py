"""The control channel, with a transport that only records."""

from types import SimpleNamespace

import pytest
from loopback import LoopbackHub

from ringcomm.engine.peers.answer_whether_entered import Whereabouts
from ringcomm.transport import failure_news
from ringcomm.transport.base import ANY_SOURCE, ArrivedMessage, PeerDied
from ringcomm.transport.control_header import ControlHeader, ControlKind
from ringcomm.transport.control_messages import Watch
from ringcomm.transport.peer_state import GaveUp


class Recorder:
    rank, size, ring_epoch = 0, 3, 7

    def __init__(self):
        self.events, self.sent = [], []

    def poll(self):
        events, self.events = self.events, []
        return events

    def control(self, dest, message):
        header, text = ControlHeader.unpack(message)
        self.sent.append((dest, header.kind, header.about, text.partition("\n")[0]))
        self.last = header


class Somewhere:
    """This rank's operations: one that is known by its ticket, and `tasks`."""

    def __init__(self, *tasks):
        self.tasks = tasks

    def __contains__(self, key):
        return False

    def operations(self):
        return [SimpleNamespace(task=task) for task in self.tasks]

    def has_entered(self, base, number):
        return (base, number) == (50, 500)

    def oldest(self):
        return "barrier #3"


def asked(key):
    return ArrivedMessage(
        1, ControlHeader(ControlKind.ASK, 7, key, fingerprint=10 * key, value=500).pack()
    )


def agreed(source, key):
    return ArrivedMessage(source, ControlHeader(ControlKind.AGREE, 7, key).pack())


def hear(*events, here=None):
    transport = Recorder()
    transport.events = list(events)
    watch = Watch(transport)
    here = here or Somewhere()
    watch.here = Whereabouts(watch, here, here, here)
    watch.poll()
    return watch, transport


def test_a_death_seen_here_is_told_to_those_who_cannot_see_it():
    _, transport = hear(PeerDied(2, "was killed", 2))
    assert (1, ControlKind.FAILED, 2, "was killed") in transport.sent


def test_a_follower_s_death_is_not_spread_as_a_cause():
    _, transport = hear(PeerDied(2, "followed", 1))
    assert transport.sent == []


def test_messages_of_an_older_ring_are_dropped():
    old = ControlHeader(ControlKind.FAILED, 6, about=1).pack("long ago\n1")
    new = ControlHeader(ControlKind.FAILED, 7, about=2).pack("now\n2")
    watch, _ = hear(ArrivedMessage(1, old), ArrivedMessage(1, new))
    assert watch.peers.dead == {2: "now"}


def test_a_rank_says_where_it_is_instead():
    _, transport = hear(asked(5), asked(6))
    assert transport.sent == [
        (1, ControlKind.HERE, 0, ""),
        (1, ControlKind.ELSEWHERE, 0, "barrier #3"),
    ]


@pytest.mark.parametrize(
    ("waiters", "members", "is_named"),
    [([0], (0, 1), True), ([], (0, 1), False), ([0], (0, 2), False)],
)
def test_a_rank_says_in_which_operation_it_waits_for_the_one_that_asks(waiters, members, is_named):
    task = SimpleNamespace(base=7, number=3, waiters=waiters, members=members)
    _, transport = hear(asked(6), here=Somewhere(task))
    assert transport.last.flag is is_named
    assert (transport.last.fingerprint, transport.last.value) == ((7, 3) if is_named else (0, 0))


@pytest.mark.parametrize(
    ("answer", "is_crossed"),
    [
        ({"fingerprint": 7, "value": 3, "flag": True}, True),
        ({"fingerprint": 50, "value": 500, "flag": True}, False),  # this rank has entered it
        ({}, False),  # it waits in nothing
    ],
)
def test_a_wait_is_crossed_if_another_rank_waits_where_this_one_is_not(answer, is_crossed):
    watch, _ = hear(
        ArrivedMessage(1, ControlHeader(ControlKind.ELSEWHERE, 7, 9, **answer).pack("barrier #3"))
    )
    assert watch.here.is_crossed(SimpleNamespace(key=9)) is is_crossed
    watch.peers.note_entered(1, 9)
    assert not watch.here.is_crossed(SimpleNamespace(key=9))


def test_letters_are_taken_once_in_order_from_whom_they_are_wanted():
    watch, _ = hear(agreed(2, 9), agreed(1, 9), agreed(1, 9))
    first, second = (watch.letter(ControlKind.AGREE, 9, 1) for _ in range(2))
    assert first.test()
    assert second.test()
    assert not watch.letter(ControlKind.AGREE, 9, 1).test()
    anyone = watch.letter(ControlKind.AGREE, 9, ANY_SOURCE)
    assert anyone.test()
    assert anyone.source == 2
    assert watch._boxes == {}


def test_whoever_wrote_first_is_heard_first():
    watch, _ = hear(agreed(2, 9), agreed(1, 9), agreed(1, 9))
    letters = [watch.letter(ControlKind.AGREE, 9, ANY_SOURCE) for _ in range(3)]
    assert all(letter.test() for letter in letters)
    assert [letter.source for letter in letters] == [2, 1, 1]


def test_a_rank_that_has_left_tells_all_what_it_will_never_enter():
    watch, transport = hear(agreed(2, 9))
    watch.announce_left("called shutdown()")
    transport.events = [agreed(1, 10)]
    watch.poll()
    absences = [
        (dest, text) for dest, kind, _, text in transport.sent if kind is ControlKind.ABSENT
    ]
    assert absences == [(1, "called shutdown()"), (2, "called shutdown()")] * 2


def test_among_many_ranks_news_is_passed_on(monkeypatch):
    monkeypatch.setattr(failure_news, "DIRECT", 5)
    hub = LoopbackHub(6)
    watches = [Watch(hub.transport(rank)) for rank in range(6)]
    gave_up = GaveUp(tuple(range(1, 6)), "two\nlines " + "and ä " * 1000)
    watches[0].announce_gave_up(gave_up)
    for _ in range(3):
        for watch in reversed(watches):
            watch.poll()
    for watch in watches[1:]:
        heard = watch.peers.gave_up[0]
        assert heard.message == gave_up.message[: len(heard.message)]
        assert len(heard.message) > 1000
    for watch in watches:
        watch.announce_left("called shutdown()")
    for _ in range(3):
        for watch in watches:
            watch.poll()
    assert all(watch.peers.are_all_gone for watch in watches)
    assert watches[3].peers.left == dict.fromkeys((0, 1, 2, 4, 5), "called shutdown()")
