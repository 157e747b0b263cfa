"""Copies of servers, as a model runs them: whoever dies, whenever, and whoever hears of it first.

No acknowledged push is lost or doubled, reads have what was acknowledged before, each request is
answered, and both copies have the same bits.
"""

import numpy as np
import pytest
from harness import at_length
from hypothesis import given
from hypothesis import strategies as st
from ps_simulation import Choices
from ps_simulation_with_copies import ANY_ORDER, MODES, N_PARTS, NOTHING, Net

from ringcomm.ps.control.agreement import Member
from ringcomm.ps.protocol.frame_meta import packed_json
from ringcomm.ps.protocol.frames import (
    CopyOption,
    FrameHeader,
    FrameKind,
    NewsOption,
    Where,
    header_of,
)
from ringcomm.ps.protocol.link import Delivery
from ringcomm.ps.roles import Layout, Takeovers
from ringcomm.ps.server.homes import copy_transfer
from ringcomm.ps.server.homes.home_pushes import NoPushes
from ringcomm.ps.server.homes.records import AT, Entry, send_record
from ringcomm.ps.server.homes.replication import KEPT, Answers, Came, Log, SentUnits, Way

pytestmark = pytest.mark.usefixtures("model_time", "small_frames")


@pytest.fixture
def small_frames(monkeypatch):
    """Let pieces of a copy go one by one: much comes between."""
    monkeypatch.setattr(copy_transfer, "FRAME_NBYTES", 1)
    monkeypatch.setattr(copy_transfer, "WINDOW_NBYTES", 1)


@pytest.mark.parametrize("mode", MODES)
@ANY_ORDER
@given(
    numbers=st.binary(min_size=100, max_size=900), n_servers=st.integers(2, 4),
    n_workers=st.integers(2, 3), n_steps=st.integers(3, 12), n_deaths=st.integers(1, 3),
)  # fmt: skip
def test_what_was_acknowledged_is_there_once_whoever_dies(mode, numbers, **sizes):
    net = Net(MODES[mode], Choices(numbers), **sizes)
    net.run()
    net.require_all()


@ANY_ORDER
@given(
    numbers=st.binary(min_size=100, max_size=900), n_servers=st.integers(2, 4),
    n_workers=st.integers(2, 3), n_steps=st.integers(3, 12), n_deaths=st.integers(1, 3),
)  # fmt: skip
def test_commands_are_carried_out_once_whichever_server_dies(numbers, **sizes):
    net = Net(MODES["async"], Choices(numbers), commands=True, **sizes)
    net.run()
    net.require_all()
    if not net.is_lost:
        chief, *others = [net.client(rank) for rank in net.workers]
        assert not chief.asked
        assert all(each.n_replaced <= chief.n_replaced for each in others)  # some have left


@pytest.mark.parametrize("mode", MODES)
@ANY_ORDER
@given(
    numbers=st.binary(min_size=300, max_size=1500), n_servers=st.integers(3, 5),
    n_workers=st.integers(2, 3), n_steps=st.integers(6, 20),
)  # fmt: skip
def test_servers_may_die_one_after_the_other_once_lost_copies_are_made_again(
    mode, numbers, n_servers, **sizes
):
    sizes |= {"n_servers": n_servers, "n_deaths": n_servers - 1, "is_patient": True}
    net = Net(MODES[mode], Choices(numbers), **sizes)
    net.run()
    assert not net.is_lost
    net.require_all()


@pytest.mark.parametrize("mode", MODES)
def test_all_servers_but_one_die_one_after_the_other(mode):
    """Training goes on between, and requests wait while a copy is made."""
    numbers = Choices([0])
    net = Net(MODES[mode], numbers, n_servers=4, n_workers=2, n_steps=60, n_deaths=0)
    for victim in (2, 0, 1):
        for _ in range(8):
            net.settle()
            assert set(net.copies().values()) == {2}
            for rank in net.workers:
                net.client(rank).act()
        net.kill(victim)
    net.settle()
    assert len(net.dead) == 3
    assert set(net.copies().values()) == {1}
    net.run()
    assert all(net.acked.values())
    net.require_all()


def begun(mode, n_steps=30):
    """Return a run of 3 servers of which number 1 has died: copies are about to be made."""
    net = Net(MODES[mode], Choices([0]), n_servers=3, n_workers=2, n_steps=n_steps, n_deaths=0)
    net.settle()
    for rank in net.workers:
        net.client(rank).act()
    net.kill(1)
    while net.tell():
        pass
    return net


def deliver_but_between(net, *servers):
    """Let all arrive that is under way, but for what two servers send each other."""
    while True:
        pairs = [pair for pair, channel in net.channels.items() if channel]
        others = [pair for pair in pairs if {*pair} != {*servers}]
        if not others:
            return
        net.deliver(others[0])


def copying():
    """Return a run, two servers and the home of the first, of which the second is getting a copy.

    What they send each other has yet to arrive.
    """
    net = begun("async")
    source, dest = net.servers[0], net.servers[2]
    copied = net.ranks[source].homes._homes[0]
    while copied._sending is None:
        net.deliver_one()
    deliver_but_between(net, source, dest)
    return net, source, dest, copied


def test_a_server_is_not_copied_before_others_have_answered_it():
    """The copy would not know what is to follow from the answer."""
    net, answers = begun("async"), []
    copied = net.ranks[net.servers[0]].homes._homes[0]
    order = packed_json({"do": "how far", "content": []})
    copied.server.orders.give(Member(2, is_server=True), (order, NOTHING), answers.append)
    while copied._sending is None:
        assert net.deliver_one()
    assert len(answers) == 1
    net.run()
    assert set(net.copies().values()) == {2}


def test_what_comes_behind_a_change_that_waits_for_a_copy_waits_too():
    net, source, dest, copied = copying()
    n = sum(net.acked[0].values())
    copied.say(CopyOption.TIME)  # is of no single block
    net.client(0).push_part(0, 0)
    net.client(0).read(0)
    deliver_but_between(net, source, dest)
    assert len(net.client(0).asked) == 2
    net.settle()
    assert sum(net.acked[0].values()) == n + 1
    net.run()
    net.require_all()


def test_a_primary_answers_pushes_and_reads_while_it_is_copied():
    """Nothing that it sends the new copy, or gets from it, arrives meanwhile."""
    net, source, dest, copied = copying()
    ways, client = set(), net.client(0)
    while not copied._sending.has_sent_all:
        for part in (0, 3):
            n = sum(net.acked[part].values())
            ways.add(copied._sending._units.way_of((1, part)))
            client.push_part(part, 0)
            client.read(part)
            deliver_but_between(net, source, dest)
            assert sum(net.acked[part].values()) == n + 1
        net.deliver((source, dest))
        while net.channels[dest, source] and not copied._sending.has_sent_all:
            net.deliver((dest, source))
    assert ways == {Way.HERE, Way.BOTH}
    net.run()
    assert set(net.copies().values()) == {2}
    net.require_all()
    assert net.n_compared


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("mode", MODES)
def test_one_of_the_two_may_die_at_each_moment_of_a_copy(mode, victim):
    """All is lost, or all that was acknowledged is there; never a part of it."""
    ends = set()
    for n_messages in range(0, 300, at_length(1, 25)):  # in the gate: every 25th
        net = begun(mode, n_steps=8)
        for k in range(n_messages):
            net.deliver_one()
            if k % 3 == 0:
                net.client(k % 2).act()
        net.kill(victim)
        net.settle()
        ends.add(net.is_lost)
        net.run()
        net.require_all()
    assert ends == {True, False}


@pytest.mark.parametrize("mode", MODES)
@ANY_ORDER
@given(
    numbers=st.binary(min_size=200, max_size=1500), n_servers=st.integers(3, 5),
    n_workers=st.integers(2, 3), n_steps=st.integers(4, 14), is_patient=st.booleans(),
)  # fmt: skip
def test_partitions_move_whoever_dies(mode, numbers, n_servers, **sizes):
    """A move that has begun ends, and its partitions are on one server, with all that was there."""
    net = Net(
        MODES[mode], Choices(numbers), n_servers=n_servers, n_deaths=n_servers - 1, moves=True,
        **sizes,
    )  # fmt: skip
    net.run()
    net.require_all()


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@ANY_ORDER
@given(
    numbers=st.binary(min_size=200, max_size=1500), n_servers=st.integers(3, 5),
    n_workers=st.integers(2, 3), n_steps=st.integers(4, 14), is_patient=st.booleans(),
    spares=st.integers(1, 2), moves=st.booleans(), n_deaths=st.integers(0, 3),
)  # fmt: skip
def test_servers_are_added_and_removed_and_spares_take_places_whoever_dies(mode, numbers, **sizes):
    net = Net(MODES[mode], Choices(numbers), changes_places=True, **sizes)
    net.run()
    net.require_all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_spare_has_as_much_as_a_server_that_died(mode, victim):
    """It answers for what that one had, or the others do if the spare itself dies."""
    net = Net(MODES[mode], Choices([0]), n_servers=3, spares=1, n_workers=2, n_steps=9, n_deaths=0)
    net.settle()
    assert sorted(net.parts_by_rank().values()) == [0, 2, 2]
    for rank in net.workers:
        net.client(rank).act()
    net.kill(victim)
    for _ in range(30):  # looks, between which time passes
        net.settle()
    assert sorted(net.parts_by_rank().values()) == [2, 2]
    assert set(net.copies().values()) == {2}
    net.run()
    net.require_all()


def test_the_next_leader_knows_who_has_a_place_though_its_copy_was_made_later():
    net = Net(
        MODES["sync"], Choices([0]), n_servers=4, spares=1, n_workers=2, n_steps=9, n_deaths=0
    )
    net.settle()
    net.client(0).ask_places({"remove": [2]})
    net.settle()
    for victim in (1, 0):  # the copy of the leader; the leader, once it has another copy
        net.kill(victim)
        net.settle()
        leader = next(home for home in net.homes if home.number == 0 and home.is_primary)
        assert 2 in leader.server.catalog.places.vacant
    net.run()
    net.require_all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_move_commits_whichever_server_dies_in_it(mode, victim):
    """A server dies after each number of messages of one move."""
    for n_messages in range(0, 60, at_length(1, 6)):  # in the gate: every sixth
        net = Net(MODES[mode], Choices([0]), n_servers=3, n_workers=2, n_steps=4, n_deaths=0)
        net.settle()
        for rank in net.workers:
            net.client(rank).act()
        net.settle()
        client = net.client(0)
        source = client.owners.view.owner((1, 1))
        net.choices = Choices([1, (source + 1) % 3, 0])
        client.move()
        for rank in net.workers:
            net.client(rank).act()
        for _ in range(n_messages):
            net.deliver_one()
        net.kill(victim)
        net.settle()
        assert net.n_moved == 1
        assert client.owners.view.owner((1, 1)) == (source + 1) % 3
        net.run()
        net.require_all()


def test_clients_hear_of_a_move_of_which_a_dead_leader_was_about_to_tell():
    """Else the servers wait for them at the next move, and bounded reads for ever."""
    net = Net(MODES["ssp"], Choices([0]), n_servers=3, n_workers=2, n_steps=4, n_deaths=0)
    net.settle()
    net.choices = Choices([1, 0])  # partition 1, to server 0
    net.client(0).move()
    from_leader = [net.channels[net.servers[0], rank] for rank in net.workers]

    def notices(channel):
        return [
            f
            for f in channel
            if (f.header.kind, f.header.option) == (FrameKind.NEWS, NewsOption.MOVED)
        ]

    while not all(map(notices, from_leader)):
        assert net.deliver_one()
    for channel in from_leader:
        for notice in notices(channel):
            channel.remove(notice)
    net.kill(0)
    net.settle()
    live = [net.ranks[rank].homes for rank in net.servers[1:]]
    for home_of_it in (each for process in live for each in process._homes.values()):
        assert not home_of_it.server.core.migration.state()


@pytest.mark.parametrize("has_arrived", [False, True])
def test_a_command_goes_on_though_its_leader_dies_whether_or_not_its_orders_have_arrived(
    has_arrived,
):
    net = Net(MODES["async"], Choices([0]), n_servers=3, n_workers=2, n_steps=9, n_deaths=0)
    net.settle()
    net.client(0).ask_leader()
    from_leader = [net.channels[net.servers[0], rank] for rank in net.workers]
    while not all(from_leader):
        assert net.deliver_one()
    for rank, channel in zip(net.workers, from_leader, strict=True):
        if has_arrived:  # but no answer has
            net.deliver_all(net.servers[0], rank)
            assert net.client(rank).training.is_over() is None
        channel.clear()
    net.kill(0)
    net.settle()
    assert all(net.client(rank).training.ends for rank in net.workers)
    assert not net.client(0).asked
    net.run()
    net.require_all()


# --- its parts ----------------------------------------------------------------------------------
def test_a_read_goes_behind_the_changes_before_it():
    log = Log(NoPushes(), has_follower=True)
    assert log.add_read("first")
    assert (log.add("a"), log.add("b")) == (1, 2)
    assert not log.add_read("read")
    assert [*log.done(1)] == ["a"]
    assert [*log.done(2)] == ["b", "read"]
    assert log.add_read("last")


def test_what_was_kept_for_a_follower_is_done_once_it_is_dead():
    log = Log(NoPushes(), has_follower=True)
    log.add("a")
    log.add_read("read")
    assert [*log.lose_follower()] == ["a", "read"]
    assert not log.has_follower
    assert len(log) == 0


def test_a_change_is_sent_to_a_new_copy_that_has_the_unit_and_waits_where_it_has_a_part():
    units = SentUnits("ab")
    assert (units.way_of("a"), units.way_of("c")) == (Way.HERE, Way.BOTH)
    units.begin("a")
    assert (units.way_of("a"), units.way_of("b")) == (Way.LATER, Way.HERE)
    units.end("a")
    assert (units.way_of("a"), units.way_of("b")) == (Way.BOTH, Way.HERE)


def test_a_change_that_is_answered_at_once_has_its_own_body_on_the_way_to_the_other_copy():
    """Its sender may write there then."""
    sent = []

    class Near:
        def shares_memory(self, rank):
            return True

        def send(self, dest, header, meta, body):
            sent.append((header_of(meta[AT.size :]).where, body))

    body = np.arange(4, dtype=np.uint8)
    push = Delivery(7, FrameHeader(FrameKind.PUSH, where=Where.SHARED, n_body=4), b"", body)
    send_record(Near(), 0, 1, 0, Entry(push, 0.0, 0.0))
    send_record(Near(), 0, 1, 1, Entry(push, 0.0, 0.0))
    (place, own), (place_when_awaited, seen) = sent
    assert (place, place_when_awaited) == (Where.NONE, Where.SHARED)
    assert own.tolist() == body.tolist()
    assert not np.shares_memory(own, body)
    assert not seen.nbytes


def test_a_copy_at_which_a_change_went_otherwise_is_given_up(caplog):
    """It came while the copy was made, so no report says it."""
    net = begun("async")
    copies = net.ranks[net.servers[2]].homes._homes
    while 0 not in copies:
        net.deliver_one()
    copies[0]._home_link.outcome, net.may_differ = 1, True
    net.run()
    assert net.copies()[0] == 1
    assert "of server 0 no copy can be made on rank 4: RingcommError: while it was made" in (
        caplog.text
    )
    net.require_all()


def test_a_request_that_comes_again_gets_the_reply_of_the_first_time():
    answers = Answers()
    assert answers.came(1, 5) == Came.FIRST
    assert answers.came(1, 5) == Came.WAITS
    answers.note(1, 5, "reply")
    answers.note(1, 6, "to what only reads")
    assert answers.came(1, 5) == Came.ANSWERED
    assert answers.reply(1, 5) == "reply"
    assert answers.came(1, 6) == Came.FIRST
    assert answers.came(2, 5) == Came.FIRST
    answers.forget(1)
    assert answers.came(1, 5) == Came.FIRST


def test_an_order_that_comes_twice_is_answered_once_it_is_carried_out_and_then_again():
    """Its sender forgets it then: before, the death of this process would lose it."""
    net = Net(MODES["async"], Choices([0]), n_servers=3, n_workers=2, n_steps=1, n_deaths=0)
    net.settle()
    primary, (sender, *_) = net.servers[1], net.servers
    order = {"do": "without", "content": [1, 0, []]}
    header = FrameHeader(FrameKind.ORDER, origin=sender, home=2, sequence=1 << 20)

    def come():
        net.ranks[primary].homes.on_request(Delivery(sender, header, packed_json(order), NOTHING))

    def answers():
        return [f for f in net.channels[primary, sender] if f.header.kind == FrameKind.REPLY]

    come()
    come()
    assert not answers()
    while not answers():
        assert net.deliver_one()
    come()
    first, again = answers()
    assert (first.header, first.meta) == (again.header, again.meta) == (first.header, b"null")
    assert (first.header.home, first.header.sequence) == (1, 1 << 20)


def test_a_server_that_is_dead_runs_nothing_though_its_word_comes_late():
    """Over another wire than that of the one which goes on in its place."""
    layout = Layout((0,), (1, 2, 3), (), replication=2)
    seen = Takeovers(layout)
    seen.died(1)
    assert seen.said(3, 1, [2]) == []
    assert seen.said(3, 2, [2, 1, 0]) == [1, 0]
    assert seen.said(2, 1, [1, 0]) == []
    seen.died(2)
    assert seen.lost() == []
    assert (layout.rank_of(0), layout.rank_of(1)) == (3, 3)


def test_the_oldest_replies_go_which_every_client_has():
    answers = Answers()
    for sequence in range(KEPT + 1):
        answers.came(1, sequence)
        answers.note(1, sequence, sequence)
    assert answers.came(1, 1) == Came.ANSWERED
    assert answers.came(1, 0) == Came.FIRST


@pytest.mark.parametrize("last", ["the leader", "a worker's death"])
def test_a_spare_takes_a_place_in_whatever_order_the_leader_hears(last):
    """Servers whose homes have both copies all along say so once, when they hear of the death."""
    net = Net(
        MODES["sync"], Choices([0]), n_servers=5, spares=1, n_workers=2, n_steps=9, n_deaths=0
    )  # fmt: skip
    net.settle()
    victim, leader = net.servers[2], net.servers[0]
    net.kill(2)
    if last == "the leader":
        for rank in (*net.workers, *net.servers[3:]):
            net.hear(rank, victim)
        net.deliver_all(net.servers[4], leader)
    else:
        for rank in (*net.workers, *net.servers):
            if rank != victim:
                net.hear(rank, victim)
        net.deliver_all(net.servers[4], leader)
        net.ranks[leader].homes.on_death(net.workers[1])
    for _ in range(30):  # looks, between which time passes
        net.settle()
    assert sorted(net.parts_by_rank().values()) == [1, 1, 1, 1]


class Page:
    """The values of a status page."""

    def __init__(self):
        self.values = {}

    def log_scalar(self, name, _, value):
        self.values[name] = value


def test_top_counts_the_slices_that_a_server_serves_in_the_place_of_a_dead_one_and_copies_apart():
    net = Net(MODES["async"], Choices([0]), n_servers=2, n_workers=1, n_steps=1, n_deaths=0)
    pages = {rank: Page() for rank in net.servers}
    for rank, page in pages.items():
        net.ranks[rank].homes.display.page = page

    def shown(page):
        page.values = {}
        for _ in range(300):  # looks, between which time passes
            net.settle()
        return page.values["slices"], page.values["copies"]

    (first, copied), others = map(shown, pages.values())
    assert (first > 0, copied > 0, first + copied) == (True, True, N_PARTS)
    assert others == (copied, first)
    net.kill(0)
    assert shown(pages[net.servers[1]]) == (N_PARTS, 0)
