"""Commands that the leader of a parameter server runs: each is carried out once, whoever dies."""

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_for_event_orders import hypothesis_settings
from ps_core_steps import core_of, push
from ps_simulation import Choices

from ringcomm.errors import RingcommError
from ringcomm.ps.control.agreement import (
    Agreement,
    Do,
    Member,
    Order,
    OrdersGiven,
    OrdersTaken,
    Until,
)
from ringcomm.ps.control.commands import (
    CLOSING,
    COMMIT,
    COUNT,
    DRAIN,
    DROP,
    END,
    FREEZE,
    GIVE,
    GO_ON,
    HOLD,
    LET,
    MAKE,
    MAKE_ALL,
    REFUSE,
    REPLACED,
    STOP,
    STOPPING,
    THAW,
    Close,
    End,
    Migrate,
    Open,
    Pause,
    Recover,
    Refuse,
    Replaced,
    Snapshot,
    Stop,
    command_of,
    failed,
)
from ringcomm.ps.control.move_lock import MoveLock
from ringcomm.ps.end_of_job import EndOfTraining
from ringcomm.ps.moment_numbers import moment_number
from ringcomm.ps.placement.partitions import Move
from ringcomm.ps.placement.replacement_workers import Newcomer, Newcomers
from ringcomm.ps.server.core import events as on
from ringcomm.ps.server.core.actions import Discard, Fail, Notify, Reopen, Reply, Step, Tell
from ringcomm.ps.server.core.core_table import ServedTable
from ringcomm.ps.update_modes import Mode

ANY_ORDER = hypothesis_settings(5_000, 20)
EVALUATOR, SPARE = 90, 91


@dataclass(frozen=True)
class Asked:
    """A request for a command."""

    source: int
    number: int = 0
    content: Any = field(default=None, compare=False)

    @property
    def header(self):
        return SimpleNamespace(sequence=self.number)


class Job:
    """What the leader knows: ranks 0 to n - 1 are workers; servers 0 and 1 have tables 1 and 2."""

    def __init__(self, n):
        self.all_workers, self.left = {*range(n)}, set()
        self.rested, self.following, self.recovered = set(), set(), None
        self.name, self.move_lock = "job", MoveLock(lambda: 0.0)
        self.evaluators, self.standing_by = {EVALUATOR}, {SPARE}
        self.other_servers = [1]
        self.server_numbers, self.newcomers = (0, 1), Newcomers()
        self.newcomers.take(Newcomer(SPARE, "worker", 7, 1), None)
        self.tables = {
            n: ServedTable(n, f"t{n}", Mode("async"), True, [0, 1], openers={0, 1}) for n in (1, 2)
        }

    @property
    def workers(self):
        return self.all_workers - self.left

    @property
    def live_workers(self):
        return self.workers - self.rested

    @property
    def ranks(self):
        return self.workers | self.evaluators | self.standing_by

    def clients(self):
        return sorted(self.workers | self.evaluators)


class Leader:
    """A server that leads, as far as commands go; of copies each has one, and hears the same.

    send: sends orders, of the one that answers.
    """

    def __init__(self, n, n_losses):
        self.job, self.send = Job(n), None
        self.agreement = Agreement(self.job, n_losses)
        self.orders = OrdersGiven(lambda *order: self.send and self.send(*order), n_losses)

    def hear(self, what, *more):
        if what == "ask":
            (request,) = more
            if request.source not in self.job.left:
                self.agreement.ask(request, command_of(request.content, request))
        elif what == "answer":
            self.orders.answered(*more)
        elif what == "gone":
            self.job.left.add(more[0])
            self.orders.forget(Member(*more))
            self.agreement.lose(Member(*more))
        else:
            self.job.move_lock.moving = None if more[0] else (9, 0)
        return self.carried_out(self.agreement.due())

    def carried_out(self, actions):
        """Give orders, and carry out the steps of the leader itself; return all other actions."""
        others = []
        for each in actions:
            if isinstance(each, Tell):
                member = Member(each.dest, each.is_server)
                hear = partial(self.agreement.answered, member, each.step)
                self.orders.give(member, (each.do, each.content), hear)
                continue
            if not isinstance(each, Step):
                others.append(each)
                continue
            for step in each.actions:
                del self.job.tables[step.table]
            self.agreement.performed(each.key, "")
            others += self.carried_out(self.agreement.due())
        return others


class Rank:
    """A rank: it asks for commands, carries out orders, and calls should_stop()."""

    def __init__(self, world, rank):
        self.world, self.rank = world, rank
        self.training, self.n_replaced, self.refusing = EndOfTraining(), 0, set()
        self.calls, self.is_over, self.n_asked, self.open = 0, False, 0, {}
        self.replies, self.did = [], Counter()
        self.n_losses = 0
        do = {
            COUNT: lambda _: self.training.ask(),
            END: self.training.end_at,
            REPLACED: self.note_replaced,
            REFUSE: self.refusing.add,
            GO_ON: self.refusing.discard,
        }
        self.orders = OrdersTaken(
            {name: self.counted(name, act) for name, act in do.items()}, lambda: self.n_losses
        )

    def counted(self, name, act):
        def carry_out(content):
            self.did[name] += 1
            return act(content)

        return carry_out

    def note_replaced(self, _):
        self.n_replaced += 1

    def ask(self, command, **more):
        self.n_asked += 1
        self.open[self.n_asked] = request = Asked(
            self.rank, self.n_asked, {"command": command, **more}
        )
        self.world.to_leader[self.rank].append(("ask", request))

    def receive(self, message):
        if not isinstance(message, Reply | Fail):
            number, order = message
            is_valid, answer = self.orders.take(number, *order)
            if is_valid:
                self.world.to_leader[self.rank].append(("answer", number, answer))
        elif self.open.pop(message.request.number, None) is not None:
            self.replies.append(message)

    def call(self):
        """A step of a worker, unless it is more than a round ahead of another, or waits."""
        live = self.world.live_workers
        if self.is_over or self.calls > min(each.calls for each in live if not each.is_over):
            return
        over = self.training.is_over()
        if over is not None:
            self.is_over = over
            self.calls += not over


class World:
    """Ranks, a leader, perhaps its copy, and what is on its way between them, in order."""

    def __init__(self, choices, n, *, has_copy=True):
        self.choices, self.n, self.n_losses, self.has_copy = choices, n, 0, has_copy
        self.ranks = {r: Rank(self, r) for r in (*range(n), EVALUATOR, SPARE)}
        self.to_leader, self.to_rank = defaultdict(deque), defaultdict(deque)
        self.heard, self.dead, self.replies = [], set(), {}
        self.server = OrdersTaken({DROP: self.drop}, lambda: self.n_losses)
        self.dropped = []
        self.leader = Leader(n, lambda: self.n_losses)
        self.leader.send = self.send_order

    def drop(self, table):
        self.dropped.append(table)

    @property
    def live_workers(self):
        return [self.ranks[rank] for rank in range(self.n) if rank not in self.dead]

    def let_leader_hear(self, what, *more):
        if what == "ask" and more[0] in self.replies:  # it comes again; see replication.Answers
            if (reply := self.replies[more[0]]) is not None:
                self.to_rank[more[0].source].append(reply)
            return
        if what == "ask":
            self.replies[more[0]] = None
        self.heard.append((what, *more))
        actions = self.leader.hear(what, *more)
        self.replies |= {each.request: each for each in actions if isinstance(each, Reply | Fail)}
        for each in actions:
            if isinstance(each, Reply | Fail):
                self.to_rank[each.request.source].append(each)

    def send_order(self, member, number, order):
        dest = "server" if member.is_server else member.number
        self.to_rank[dest].append((number, order))

    def deliver(self):
        busy = [(False, k) for k, channel in self.to_leader.items() if channel]
        busy += [(True, k) for k, channel in self.to_rank.items() if channel]
        if not busy:
            return False
        is_to_rank, key = busy[self.choices.below(len(busy))]
        if not is_to_rank:
            self.let_leader_hear(*self.to_leader[key].popleft())
            return True
        message = self.to_rank[key].popleft()
        if key == "server":
            number, order = message
            is_valid, answer = self.server.take(number, *order)
            if is_valid:
                self.to_leader[key].append(("answer", number, answer))
        elif key not in self.dead:
            self.ranks[key].receive(message)
        return True

    def kill(self, rank):
        """A rank dies; what it has sent last is lost, and its death is heard behind the rest."""
        self.dead.add(rank)
        channel = self.to_leader[rank]
        for _ in range(self.choices.below(len(channel) + 1)):
            channel.pop()
        channel.append(("gone", rank))

    def kill_leader(self):
        """Its copy goes on, which has heard the same; what was on its way is lost."""
        for channel in self.to_rank.values():
            for _ in range(self.choices.below(len(channel) + 1)):
                channel.pop()
        for channel in self.to_leader.values():
            kept = [each for each in channel if each[0] == "gone"]
            channel.clear()
            channel.extend(kept)
        self.leader = Leader(self.n, lambda: self.n_losses)
        for each in self.heard:
            self.leader.hear(*each)
        self.leader.send = self.send_order
        self.leader.orders.again()
        for number, rank in self.ranks.items():  # see Client.take_over()
            if number not in self.dead:
                self.to_leader[number].extend(("ask", each) for each in rank.open.values())

    def run(self, act, *, lives=None):
        """Let all go on in any order; rank `lives` does not die."""
        while not self.choices.are_over:
            what = self.choices.below(16)
            if what < 7:
                self.deliver()
            elif what < 12:
                self.live_workers[self.choices.below(len(self.live_workers))].call()
            elif what == 12 and len(self.live_workers) > 2:
                victims = [each.rank for each in self.live_workers if each.rank != lives]
                self.kill(victims[self.choices.below(len(victims))])
            elif what == 13 and self.has_copy:
                self.kill_leader()
            else:
                act()
        while self.deliver():
            pass


@given(numbers=st.binary(min_size=20, max_size=300), n=st.integers(1, 5), by_count=st.booleans())
@ANY_ORDER
def test_all_workers_end_at_one_call_of_should_stop_whoever_dies(numbers, n, by_count):
    world = World(Choices(numbers), n)

    def act():
        asker = world.live_workers[world.choices.below(len(world.live_workers))]
        if not asker.training.is_begun():
            asker.ask("stop", by_count=by_count)

    world.run(act)
    act()
    while world.deliver():
        pass
    for _ in range(10_000):
        if all(each.is_over for each in world.live_workers):
            break
        for each in world.live_workers:
            each.call()
    assert all(each.is_over for each in world.live_workers), "some train on"
    if by_count:
        assert len({each.calls for each in world.live_workers}) == 1
    assert world.ranks[EVALUATOR].training.is_over()
    assert not world.leader.agreement.is_running
    assert all(not each.open for each in world.live_workers)


@given(numbers=st.binary(min_size=20, max_size=300), n=st.integers(2, 5))
@ANY_ORDER
def test_who_asks_is_answered_once_all_who_live_have_done_it_and_each_has_once(numbers, n):
    world, n_asked = World(Choices(numbers), n), Counter()
    chief = world.ranks[0]

    def act():
        what = world.choices.below(4)
        if what < 2:
            n_asked["replaced"] += 1
            chief.ask("replaced")
        elif what == 2 and not chief.open:
            chief.ask(["refuse", "go on"][n_asked["refusals"] % 2])
            n_asked["refusals"] += 1
        else:
            is_quiet = bool(world.choices.below(2))
            world.let_leader_hear("quiet", is_quiet)

    world.run(act, lives=0)
    assert not chief.open
    assert not world.leader.agreement.is_running
    others = [each for rank, each in world.ranks.items() if rank not in {0, *world.dead}]
    for each in others:
        assert each.refusing == ({0} if n_asked["refusals"] % 2 else set())
        if each.rank < n:
            assert each.n_replaced == n_asked["replaced"]


@given(numbers=st.binary(min_size=20, max_size=300), n=st.integers(2, 4))
@ANY_ORDER
def test_a_table_goes_once_when_all_who_use_it_have_closed_it_or_are_gone(numbers, n):
    world = World(Choices(numbers), n)
    to_close = [(rank, table) for rank in (0, 1) for table in (1, 2)]

    def act():
        if world.choices.below(2):
            world.let_leader_hear("quiet", bool(world.choices.below(2)))
        elif to_close:
            rank, table = to_close.pop(world.choices.below(len(to_close)))
            if rank not in world.dead:
                world.ranks[rank].ask("close", table=table)
        for table in {1, 2} - world.leader.job.tables.keys():
            assert not [each for each in to_close if each[1] == table and each[0] not in world.dead]

    world.run(act)
    world.let_leader_hear("quiet", True)
    while world.deliver():
        pass
    open_to = {table for rank, table in to_close if rank not in world.dead}
    asked = {each.content["table"] for what, each, *_ in world.heard if what == "ask"}
    assert world.leader.job.tables.keys() == {1, 2} - (asked - open_to)
    assert sorted(world.dropped) == sorted(asked - open_to)
    waits = {request.content["table"] for each in world.ranks.values() for request in
             each.open.values() if each.rank not in world.dead}  # fmt: skip
    assert waits <= open_to


# --- one by one -----------------------------------------------------------------------------------
def agreement(n=3):
    job = Job(n)
    return job, Agreement(job, lambda: 0)


def told(actions):
    return [(each.dest, each.do, each.content) for each in actions if isinstance(each, Tell)]


def answer_all(leader, actions, answer=None):
    for each in actions:
        if isinstance(each, Tell):
            leader.answered(Member(each.dest, each.is_server), each.step, answer)
    return leader.due()


def test_the_next_call_after_the_largest_number_is_the_last():
    _, leader = agreement()
    leader.ask(Asked(0), Stop(by_count=True))
    asked = leader.due()
    assert told(asked) == [(rank, COUNT, None) for rank in range(3)]
    for each, count in zip(asked, (4, 7, 5), strict=True):
        leader.answered(Member(each.dest), each.step, count)
    ended = leader.due()
    assert told(ended) == [*((rank, END, 8) for rank in (0, 1, 2, SPARE)), (EVALUATOR, END, 0)]
    assert answer_all(leader, ended) == [Reply(Asked(0))]


def test_a_worker_that_comes_meanwhile_is_asked_too():
    job, leader = agreement(2)
    leader.ask(Asked(0), Stop(by_count=True))
    asked = leader.due()
    job.all_workers.add(SPARE)
    again = answer_all(leader, asked, 3)
    assert told(again) == [(SPARE, COUNT, None)]
    assert {content for _, _, content in told(answer_all(leader, again, 6))} == {7, 0}


def test_where_nobody_waits_for_others_each_ends_at_once():
    _, leader = agreement(2)
    leader.ask(Asked(0), Stop(by_count=False))
    assert {each[1:] for each in told(leader.due())} == {(END, 0)}


def test_nobody_waits_for_who_is_gone_and_it_is_told_nothing():
    job, leader = agreement()
    leader.ask(Asked(0, 1), Replaced(1))
    assert [each.dest for each in leader.due()] == [1, 2]
    job.left.add(1)
    leader.lose(Member(1))
    assert leader.due() == []
    assert leader.missing(0) == [("ps.restore()", "", [2])]
    leader.lose(Member(2))
    assert leader.due() == [Reply(Asked(0, 1))]
    leader.ask(Asked(0, 2), Refuse(0))
    assert told(leader.due()) == [(EVALUATOR, REFUSE, 0), (SPARE, REFUSE, 0)]


def test_who_completes_no_more_steps_still_hears_of_new_values_and_is_not_asked_when_to_end():
    """It may pull, and evaluate, after its loop."""
    job, leader = agreement()
    job.rested.add(2)
    leader.ask(Asked(0, 1), Replaced(1))
    assert [each.dest for each in leader.due()] == [1, 2]
    leader.ask(Asked(0, 2), Stop(by_count=True))
    assert [each[:2] for each in told(leader.due())] == [(0, COUNT), (1, COUNT)]


def test_a_core_tells_workers_that_rest_and_none_that_have_left():
    core = core_of(Mode("ssp", 1), (1, 2, 3))
    core.handle(on.Left(2, still_asks=True), 0.0)
    core.handle(on.Left(3), 0.0)
    told_of = core.handle(on.Asked(push(1, 5), Replaced(5)), 0.0)
    assert [(each.dest, each.do) for each in told_of] == [(2, REPLACED)]


def test_requests_for_one_command_join_it_and_all_are_answered():
    job, leader = agreement()
    leader.ask(Asked(0), Close(1))
    assert leader.due() == []
    assert leader.missing(0) == [(CLOSING, "t1", [1])]
    assert leader.missing(1) == []
    job.move_lock.begin((2, 0))
    leader.ask(Asked(1), Close(1))
    assert leader.due() == []
    job.move_lock.end()
    (step,) = leader.due()
    assert step.actions == [Discard(1)]
    del job.tables[1]
    assert leader.due() == []
    leader.performed(step.key, "")
    dropped = leader.due()
    assert dropped == [Tell(1, True, DROP, 1, 1)]
    assert leader.missing(0) == [(CLOSING, "", [])]
    assert answer_all(leader, dropped) == [Reply(Asked(0)), Reply(Asked(1))]


def test_a_table_is_open_once_all_servers_have_made_it():
    job, leader = agreement()
    job.tables[1].is_open = False
    described = {"number": 1, "spec": {}, "owners": [0, 1], "epochs": {}}
    leader.ask(Asked(0), Open(1))
    makes = leader.due()
    assert told(makes) == [(1, MAKE, [described])]
    leader.ask(Asked(1), Open(1))
    assert leader.due() == []
    replies = [Reply(Asked(0), content=described), Reply(Asked(1), content=described)]
    assert answer_all(leader, makes, "") == replies
    assert job.tables[1].is_open
    leader.ask(Asked(2), Open(1))
    assert leader.due() == [Reply(Asked(2), content=described)]


def test_a_table_that_one_server_cannot_make_goes_everywhere_and_all_who_asked_hear_why():
    job, leader = agreement()
    job.tables[1].is_open = False
    leader.ask(Asked(0), Open(1))
    makes = leader.due()
    leader.ask(Asked(1), Open(1))
    (step,) = answer_all(leader, makes, failed(MemoryError("no room")))
    assert step.actions == [Discard(1)]
    del job.tables[1]
    leader.performed(step.key, "")
    dropped = leader.due()
    assert told(dropped) == [(1, DROP, 1)]
    why = "table[t1]: cannot be made: server 1: MemoryError: no room"
    assert answer_all(leader, dropped) == [Fail(Asked(0), why), Fail(Asked(1), why)]


@pytest.mark.parametrize("why", [None, {"failed": "MemoryError: no room"}])
def test_all_begin_anew_with_all_tables_or_hear_why_not(why):
    job, leader = agreement()
    job.tables[2].is_open = False  # nobody has it for sure
    for rank in range(3):
        leader.ask(Asked(rank), Recover((0, 1), {"t1": rank}, has_checkpoint=True))
    (step,) = leader.due()
    assert step.actions == [Reopen({rank: {"t1": rank} for rank in range(3)})]
    leader.performed(step.key, "")
    (make,) = makes = leader.due()
    taken, (table,) = make.content
    assert (make.dest, make.do, taken, table["number"]) == (
        1,
        MAKE_ALL,
        [Newcomer(SPARE, "worker", 7, 1)],
        1,
    )
    replies = answer_all(leader, makes, why)
    assert [each.request for each in replies] == [Asked(rank) for rank in range(3)]
    if why:
        assert (
            replies[0].why
            == "ps.recover: tables cannot be made anew: server 1: MemoryError: no room"
        )
    else:
        assert replies[0].content == {"servers": (0, 1), "tables": [table], "taken": taken}


def test_a_command_that_cannot_be_is_refused():
    _, leader = agreement()
    leader.ask(Asked(0), Close(7))
    assert leader.due() == [Fail(Asked(0), "there is no table 7")]
    with pytest.raises(ValueError, match="no command 'sing'"):
        command_of({"command": "sing"}, Asked(0))


def test_commands_that_wait_hold_up_no_others():
    _, leader = agreement()
    leader.ask(Asked(0), Close(1))
    leader.ask(Asked(2), Refuse(2, goes_on=True))
    assert {each[1] for each in told(leader.due())} == {GO_ON}


def test_orders_of_before_a_loss_are_void_and_commands_begin_again():
    losses, refusing = [0], []
    leader = Agreement(Job(2), lambda: losses[0])
    leader.ask(Asked(0), Refuse(0))
    sent = leader.due()
    numbers = []
    given = OrdersGiven(lambda _, number, __: numbers.append(number), lambda: losses[0])
    given.give(Member(1, True), REFUSE, None)
    assert given.awaits_servers
    member = OrdersTaken({REFUSE: refusing.append}, lambda: losses[0])
    losses[0] = 1
    assert not given.awaits_servers
    assert member.take(numbers[0], REFUSE, 0) == (False, None)
    given.again()
    given.answered(numbers[0], {"failed": "KeyError"})  # it is void
    given.give(Member(1), REFUSE, None)
    assert len(numbers) == 2
    again = leader.due()
    assert told(again) == told(sent)
    leader.answered(Member(sent[0].dest), sent[0].step, None)
    assert leader.awaits_answers
    assert member.take(numbers[1], REFUSE, 0) == (True, None)
    assert refusing == [0]
    assert answer_all(leader, again) == [Reply(Asked(0))]


def test_what_a_dead_rank_has_asked_for_begins_again_too():
    losses, job = [0], Job(2)
    leader = Agreement(job, lambda: losses[0])
    leader.ask(Asked(0), Refuse(0, goes_on=True))
    leader.due()
    job.left.add(0)
    leader.lose(Member(0))
    losses[0] = 1
    assert {each[1] for each in told(leader.due())} == {GO_ON}


@pytest.mark.parametrize("command", [Close(1), Open(1), Replaced(4), Stop(by_count=True)])
def test_a_loss_drops_commands_about_tables_without_a_reply(command):
    """Who has asked for one fails by itself; a reply could come before it hears of the loss."""
    losses, job = [0], Job(2)
    job.tables[1].is_open = False
    leader = Agreement(job, lambda: losses[0])
    leader.ask(Asked(0), command)
    leader.due()
    assert leader.is_running
    losses[0] = 1
    assert leader.due() == []
    assert not leader.is_running


def test_an_order_that_comes_again_is_answered_and_not_carried_out_again():
    done = []
    member = OrdersTaken({"add": lambda x: done.append(x) or len(done)}, lambda: 0)
    assert [member.take(n, "add", n) for n in (1, 2, 1, 2, 3)] == [
        (True, 1), (True, 2), (True, 1), (True, 2), (True, 3)
    ]  # fmt: skip
    assert done == [1, 2, 3]


def orders_given():
    """Return the orders of a server, and what it has sent."""
    sent = []
    return OrdersGiven(lambda *each: sent.append(each), lambda: 0), sent


def test_who_goes_on_in_the_place_of_another_sends_what_is_not_answered_in_order():
    given, sent = orders_given()
    server, heard = Member(1, True), []
    for member, order in ((Member(1), "a"), (server, "b"), (Member(2), "c"), (server, "d")):
        given.give(member, order, heard.append)
    first = [*sent]
    assert [number for _, number, _ in first] == [1, 2, 3, 4] == [*range(1, given.last + 1)]
    given.answered(2, "done")
    given.answered(2, "it comes again")
    assert heard == ["done"]
    given.again()
    assert sent[4:] == [first[0], first[2], first[3]]
    given.again(1)  # the server, not the rank of that number
    assert sent[7:] == [first[3]]
    given.forget(Member(1))
    assert given.awaits_servers
    given.forget(server)
    assert not given.awaits_servers
    given.again()
    assert sent[8:] == [first[2]]


def test_an_order_whose_answer_nobody_awaits_may_not_go_wrong_unseen():
    given, _ = orders_given()
    for number, answer in enumerate((None, {"failed": "KeyError: 7"}), start=1):
        given.give(Member(1, True), "without", None)
        if answer is None:
            given.answered(number, answer)
            continue
        with pytest.raises(RingcommError, match=r"cannot carry out without.*KeyError: 7"):
            given.answered(number, answer)


def moment(number=0 << 32 | 1, save_to=None):
    return Snapshot(number, 1.0, save_to)


def snapshot_of(leader, job, asked=None):
    """Ask for a snapshot, and answer until servers hold it; return the orders to hold."""
    leader.ask(asked or Asked(0, 1), moment())
    stops = leader.due()
    assert [each[1] for each in told(stops)] == [STOP, STOP]
    for each, rounds in zip(stops, ({"1": 4}, {"1": 6, "2": 3}), strict=True):
        leader.answered(Member(each.dest, True), each.step, rounds)
    holds = leader.due()
    assert told(holds) == [(n, HOLD, [1, None, {1: 6, 2: 3}]) for n in job.server_numbers]
    return holds


WHOLE, NOT_WHOLE = {"is_whole": True}, {"is_whole": False}


def test_servers_hold_one_moment_until_its_owner_ends_it():
    job, leader = agreement()
    holds = snapshot_of(leader, job)
    (begun,) = answer_all(leader, holds, WHOLE)
    assert begun.request == Asked(0, 1)
    assert (begun.content["job"], begun.content["rounds"]) == ("job", {1: 6, 2: 3})
    assert job.move_lock.pauses == {1}
    leader.ask(Asked(0, 2), End(1, is_taken=True))
    lets = leader.due()
    assert told(lets) == [(0, LET, [1, True]), (1, LET, [1, True])]
    assert job.move_lock.pauses == {1}
    assert answer_all(leader, lets) == [Reply(Asked(0, 2))]
    assert job.move_lock.is_free


def test_a_moment_lists_the_tables_that_were_open_as_it_began():
    """One that is opened meanwhile is on some servers alone as they take it."""
    job, leader = agreement()
    job.tables[2].is_open = False
    holds = snapshot_of(leader, job)
    job.tables[2].is_open = True
    (begun,) = answer_all(leader, holds, WHOLE)
    assert begun.content["tables"].keys() == {1}


def test_a_moment_that_is_not_whole_is_tried_again_and_refused_in_the_end():
    job, leader = agreement()
    holds = snapshot_of(leader, job)
    for _ in range(9):
        lets = answer_all(leader, holds, NOT_WHOLE)
        assert {each[1:] for each in [(a, b, tuple(c)) for a, b, c in told(lets)]} == {
            (LET, (1, False))
        }
        stops = answer_all(leader, lets)
        holds = answer_all(leader, stops, {})
    lets = answer_all(leader, holds, NOT_WHOLE)
    lets = answer_all(leader, lets)
    (fail,) = answer_all(leader, lets)
    assert "in 10 attempts" in fail.why
    assert not leader.is_running


def test_a_server_without_room_lets_the_snapshot_fail_everywhere():
    job, leader = agreement()
    holds = snapshot_of(leader, job)
    leader.answered(Member(0, True), holds[0].step, WHOLE)
    leader.answered(Member(1, True), holds[1].step, failed(MemoryError("no room")))
    lets = leader.due()
    assert [each[1] for each in told(lets)] == [LET, LET]
    assert answer_all(leader, lets) == [
        Fail(Asked(0, 1), "ps.snapshot: server 1: MemoryError: no room")
    ]


@pytest.mark.parametrize("way", ["gives up", "is gone"])
@pytest.mark.parametrize("is_held", [False, True])
def test_servers_let_go_what_is_held_for_a_rank_that_gives_up_or_is_gone(way, is_held):
    job, leader = agreement()
    holds = snapshot_of(leader, job)
    if is_held:
        assert len(answer_all(leader, holds, WHOLE)) == 1
    if way == "gives up":
        leader.ask(Asked(0, 2), End(1, is_taken=False))
    else:
        job.left.add(0)
        leader.lose(Member(0))
    lets = leader.due()
    assert told(lets) == [(0, LET, [1, False]), (1, LET, [1, False])]
    replies = answer_all(leader, lets)
    assert {each.request.number for each in replies} == (
        set() if way == "is gone" else {2} if is_held else {1, 2}
    )
    assert not leader.is_running


def test_who_ends_a_snapshot_as_a_server_is_lost_is_answered():
    """It may have heard of the loss before it asked, and the leader hears of it later."""
    losses, job = [0], Job(2)
    leader = Agreement(job, lambda: losses[0])
    answer_all(leader, snapshot_of(leader, job), WHOLE)
    leader.ask(Asked(0, 2), End(1, is_taken=False))
    leader.due()
    losses[0] = 1
    assert leader.due() == [Reply(Asked(0, 2))]
    assert job.move_lock.is_free


def test_who_ends_a_snapshot_as_all_recover_is_answered():
    """No further server was lost; but servers let go what they do not know any more."""
    job = Job(2)
    leader = Agreement(job, lambda: 0)
    answer_all(leader, snapshot_of(leader, job), WHOLE)
    leader.ask(Asked(0, 2), End(1, is_taken=False))
    leader.due()
    leader.forget_tables()
    assert leader.due() == [Reply(Asked(0, 2))]
    assert job.move_lock.is_free
    assert not leader.is_running


def test_a_pause_outlives_a_loss():
    losses, job = [0], Job(2)
    leader = Agreement(job, lambda: losses[0])
    leader.ask(Asked(0, 1), Pause(1, 0.0))
    (begun,) = leader.due()
    assert begun.content["rounds"] == {}
    losses[0], job.move_lock = 1, MoveLock(lambda: 0.0)
    assert leader.due() == []
    assert job.move_lock.pauses == {1}
    leader.ask(Asked(0, 2), End(1, is_taken=False))
    assert leader.due() == [Reply(Asked(0, 2))]


# --- moves ----------------------------------------------------------------------------------------
FROZEN = {"at": [0, False], "pending": [], "held": None, "clocks": []}


def move_of(*partitions, owner=0, dest=1, number=1, **more):
    return Migrate(tuple(Move(each, 0, dest) for each in partitions), owner, number, **more)


def ask_for_moves(*partitions, job=None, **more):
    """Return a job, its leader, which has been asked for moves, and the orders that follow."""
    losses = [0]
    job = job or Job(3)
    leader = Agreement(job, lambda: losses[0])
    leader.losses = losses
    leader.ask(Asked(0, 1), move_of(*partitions, **more))
    return job, leader, leader.due()


def give(moved, *problems):
    return {"moved": moved, "problems": problems}


def move_on(leader, orders, given, frozen=FROZEN):
    """Answer until the leader commits, or thaws; return its orders."""
    assert {each.do for each in orders} == {FREEZE}
    gives = answer_all(leader, orders, frozen)
    assert {each.do for each in gives} == {GIVE}
    return answer_all(leader, gives, given)


def end_move(leader, commits):
    """Answer the last orders of a move; return what follows once clients were told of it."""
    (step,) = answer_all(leader, commits)
    assert step.actions == [Notify([0, 1, 2, EVALUATOR], (1, 0))]
    leader.performed(step.key, "")
    return leader.due()


def test_a_partition_moves_between_two_servers_and_all_servers_hear_of_it():
    job, leader, orders = ask_for_moves((1, 0))
    job.tables[1].epochs[0] = 4
    key = (1, 0)
    assert told(orders) == [(0, FREEZE, [key, {}]), (1, FREEZE, [key, {}])]
    assert job.move_lock.moving == key
    for each, clocks in zip(orders, ([[1, 5], [2, 6]], [[1, 4]]), strict=True):
        leader.answered(Member(each.dest, True), each.step, {**FROZEN, "clocks": clocks})
    gives = leader.due()
    assert told(gives) == [(0, GIVE, [key, {"moves": [(0, 1)]}])]
    commits = answer_all(leader, gives, give([[0, 1]]))
    more = {"epoch": 5, "moved": [(0, 1)], "clocks": [(1, 4), (2, 6)]}
    assert told(commits) == [(0, COMMIT, [key, more]), (1, COMMIT, [key, more])]
    assert end_move(leader, commits) == [
        Reply(Asked(0, 1), content={"moved": 1, "problems": []})
    ]  # fmt: skip
    assert job.move_lock.is_free


def test_servers_in_different_rounds_go_as_far_as_any_before_they_give():
    _, leader, orders = ask_for_moves((1, 0))
    for each, at in zip(orders, ([3, True], [4, False]), strict=True):
        leader.answered(Member(each.dest, True), each.step, {**FROZEN, "at": at})
    drains = leader.due()
    assert [(each[0], each[1], each[2][1]) for each in told(drains)] == [
        (0, DRAIN, {"at": (4, False)}), (1, DRAIN, {"at": (4, False)})
    ]  # fmt: skip
    assert [each.do for each in answer_all(leader, drains, {"held": None})] == [GIVE]


def test_all_servers_take_part_if_rows_move_and_many_partitions_move_at_once():
    job = Job(3)
    job.tables[1] = ServedTable(1, "t1", Mode("async"), False, [0] * 70)
    job, leader, orders = ask_for_moves(*((1, part) for part in range(70)), job=job)
    (gives,) = answer_all(leader, orders, FROZEN)
    _, more = gives.content
    assert [part for part, _ in more["moves"]] == [*range(64)]
    commits = answer_all(leader, [gives], give(more["moves"]))
    assert [each.dest for each in commits] == [0, 1]
    job.tables[1].owners[:64] = [1] * 64
    orders = end_move(leader, commits)
    (gives,) = answer_all(leader, orders, FROZEN)
    assert len(gives.content[1]["moves"]) == 6


def test_what_is_there_already_or_was_closed_meanwhile_is_left_out():
    job = Job(3)
    job.tables[1].owners[:] = [1, 1]
    _, leader, orders = ask_for_moves((1, 0), (7, 0), (1, 1), job=job)
    assert orders == [Reply(Asked(0, 1), content={"moved": 0, "problems": []})]
    assert job.move_lock.is_free
    assert not leader.is_running


@pytest.mark.parametrize("move", [((1, 9), 1), ((1, 0), 5)])
def test_a_move_that_cannot_be_is_refused_and_nothing_moves(move):
    partition, dest = move
    job, _, (fail,) = ask_for_moves((1, 0), partition, dest=dest)
    assert "cannot do Move(partition=" in fail.why
    assert job.move_lock.is_free


@pytest.mark.parametrize("why", ["no room", "an error"])
def test_if_nothing_could_move_all_go_on_and_who_asked_hears_why(why):
    job, leader, orders = ask_for_moves((1, 0))
    given = give([], why) if why == "no room" else failed(ValueError(why))
    thaws = move_on(leader, orders, given)
    assert [(each.dest, each.do) for each in thaws] == [(0, THAW), (1, THAW)]
    (reply,) = answer_all(leader, thaws)
    assert reply.content["moved"] == 0
    assert why in reply.content["problems"][0]
    assert job.move_lock.is_free


@pytest.mark.parametrize("how", ["left", "rested"])
def test_a_round_that_waits_with_the_part_of_a_worker_that_is_gone_does_not_move(how):
    """It could not contribute again; or the round would be over before it has."""
    job, leader, orders = ask_for_moves((1, 0))
    getattr(job, how).add(2)
    thaws = answer_all(leader, orders, {**FROZEN, "pending": [1, 2]})
    assert {each.do for each in thaws} == {THAW}
    (reply,) = answer_all(leader, thaws)
    assert reply.content["problems"] == [
        "table t1: worker 2 has left, or completes no more steps, and its part of a round waits "
        "for the others. Try again after the round"
    ]


def test_the_moves_of_one_who_is_gone_end_after_that_which_has_begun():
    job, leader, orders = ask_for_moves((1, 0), (2, 0))
    leader.ask(Asked(1, 1), move_of((2, 1), owner=1, dest=0))
    assert leader.due() == []  # its turn comes later
    job.left.add(0)
    leader.lose(Member(0))
    commits = move_on(leader, orders, give([[0, 1]]))
    (step,) = answer_all(leader, commits)
    leader.performed(step.key, "")
    assert told(leader.due()) == [(0, FREEZE, [(2, 1), {}]), (1, FREEZE, [(2, 1), {}])]


def test_the_moves_of_one_who_is_gone_before_they_begin_do_not():
    job = Job(3)
    assert job.move_lock.pause(9, 0.0)
    job, leader, orders = ask_for_moves((1, 0), job=job)
    assert orders == []
    job.left.add(0)
    leader.lose(Member(0))
    assert leader.due() == []
    assert not leader.is_running
    job.move_lock.unpause(9)
    assert job.move_lock.is_free


def test_a_table_moves_once_all_servers_have_made_it():
    """Else it would move though one cannot make it, and it goes again."""
    job = Job(3)
    job.tables[1].is_open = False
    _, leader, orders = ask_for_moves((1, 0), job=job)
    assert orders == []
    job.tables[1].is_open = True
    assert {each.do for each in leader.due()} == {FREEZE}


def test_no_table_moves_that_is_about_to_go():
    """Both may be due by the same event."""
    job = Job(3)
    assert job.move_lock.pause(9, 0.0)
    leader = Agreement(job, lambda: 0)
    for rank in (0, 1):
        leader.ask(Asked(rank, 1), Close(1))
    leader.ask(Asked(2, 1), move_of((1, 0), owner=2))
    assert leader.due() == []
    job.move_lock.unpause(9)
    (step,) = leader.due()
    assert step.actions == [Discard(1)]
    del job.tables[1]
    leader.performed(step.key, "")
    reply, *drops = leader.due()[::-1]
    assert reply == Reply(Asked(2, 1), content={"moved": 0, "problems": []})
    assert [each.do for each in drops] == [DROP]


def test_who_waits_for_a_move_hears_which_worker_is_within_a_pause():
    job = Job(3)
    assert job.move_lock.pause(moment_number(2, 1), 0.0)
    _, leader, _ = ask_for_moves((1, 0), job=job)
    assert leader.missing(0) == [("a move", "", [2])]
    assert leader.missing(1) == []


def test_a_loss_drops_moves_without_a_reply():
    job, leader, _ = ask_for_moves((1, 0), changes_places=True)
    assert leader.commands() == [move_of((1, 0), changes_places=True)]
    leader.losses[0] = 1
    assert leader.due() == []
    assert not leader.is_running
    del job


def test_the_leader_moves_what_it_wants_though_nobody_has_asked():
    leader = Agreement(Job(3), lambda: 0)
    leader.ask(None, move_of((1, 0), owner=None))
    commits = move_on(leader, leader.due(), give([[0, 1]]))
    assert end_move(leader, commits) == []
    assert not leader.is_running


def test_a_command_goes_on_once_the_leader_has_carried_out_its_own_step():
    class Two:
        key, is_about_tables = "two", False

        def script(self, job, asked):
            found = [(yield Do(["a"]))]
            yield Until(lambda: job.move_lock.is_free)
            found.append((yield Do(["b"])))
            found.append(len((yield Order({Member(1): None}, "c"))))
            return found

        def awaited(self, job, asked):
            return STOPPING, "", []

    job, leader = agreement()
    job.move_lock.begin((2, 0))
    leader.ask(Asked(0), Two())
    assert leader.due() == [Step("two", ["a"])]
    assert leader.due() == []
    leader.performed("two", "")
    assert leader.due() == []
    job.move_lock.end()
    assert leader.due() == [Step("two", ["b"])]
    leader.performed("two", "no room")
    assert answer_all(leader, leader.due()) == [Reply(Asked(0), content=["", "no room", 1])]
