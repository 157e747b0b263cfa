"""The script by which a rank takes a place: whoever dies, all who live agree on it."""

import copy
import json
from collections import Counter, deque
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_for_event_orders import hypothesis_settings
from ps_simulation import Choices
from ps_simulation_message_types import Request

from ringcomm.ps.control.agreement import Agreement, Member, OrdersGiven, OrdersTaken
from ringcomm.ps.control.commands import (
    BEGIN,
    HOW_FAR,
    JOINING,
    MEET,
    RETRACT,
    STAND_STILL,
    TAKE_PLACE,
    Here,
    StandBy,
    command_of,
)
from ringcomm.ps.placement.replacement_workers import Beginning, Newcomer, Newcomers
from ringcomm.ps.protocol.frames import FrameHeader, FrameKind
from ringcomm.ps.server.core.actions import Fail, Reply, Tell
from ringcomm.ps.server.core.core import Core

ANY_ORDER = hypothesis_settings(20_000, 100)
EVALUATOR = 40
NOWHERE = Beginning(0, {}).to_json()


class Job:
    """What the leader knows: ranks 0 to n - 1 are workers, others stand by; servers 0 and 1."""

    server_numbers, tables, following = (0, 1), {}, ()

    def __init__(self, n, spares=(50, 51)):
        self.first, self.spares = (*range(n),), spares
        self.left, self.newcomers, self.asks = set(), Newcomers(), lambda: {}

    @property
    def workers(self):
        return {*self.first, *self.newcomers.workers} - self.left

    live_workers = workers

    @property
    def evaluators(self):
        return {EVALUATOR, *self.newcomers.evaluators} - self.left

    @property
    def ranks(self):
        return {*self.first, EVALUATOR, *self.spares} - self.left

    def next_newcomer(self):
        members = SimpleNamespace(workers=self.first, evaluators=(EVALUATOR,))
        return self.newcomers.next(self.asks(), members)

    def die(self, rank):
        if rank in self.workers | self.evaluators:
            self.newcomers.fallen[rank] = None
        self.left.add(rank)


def asked(source, number=0, **content):
    return Request(
        source, FrameHeader(FrameKind.ASK, origin=source, sequence=number), "", None, content
    )


def places(n=3, spares=(50, 51)):
    """Return a job whose worker 1 has died, and its agreement."""
    job = Job(n, spares)
    leader = Agreement(job, lambda: 0)
    job.asks = lambda: {
        each.request.source: each.command.evaluates for each in leader.asked(StandBy)
    }
    return job, leader


def stand_by(leader, rank=50, *, evaluates=False):
    leader.ask(asked(rank, 1), StandBy(rank, evaluates))
    return leader.due()


def die(job, leader, rank):
    job.die(rank)
    leader.lose(Member(rank))
    return leader.due()


def told(actions):
    return [(each.dest, each.do) for each in actions if isinstance(each, Tell)]


def answer(leader, actions, content=None, of=None):
    """Answer all orders, or those of one server, alike."""
    for each in actions:
        if isinstance(each, Tell):
            other = of is not None and each.dest != of
            leader.answered(
                Member(each.dest, each.is_server), each.step, None if other else content
            )
    return leader.due()


def here(leader, rank=0, newcomer=50, *, clock=4, number=1):
    request, begins = asked(rank, number), Beginning(clock, {1: clock})
    leader.ask(request, Here(newcomer, rank, number, begins, n_calls=clock + 1))
    return leader.due()


# --- one by one -----------------------------------------------------------------------------------
def test_a_worker_begins_where_the_chief_stands_still_once_all_servers_know_it():
    job, leader = places()
    assert stand_by(leader) == []
    (stands,) = asks = die(job, leader, 1)
    assert (stands.dest, stands.do, stands.content) == (0, STAND_STILL, 50)
    assert answer(leader, asks) == []
    assert not leader.awaits_answers  # a step may take long: copies are made meanwhile
    takes = here(leader)
    newcomer = Newcomer(50, "worker", 1, 1)
    assert told(takes) == [(0, TAKE_PLACE), (1, TAKE_PLACE)]
    assert takes[0].content == [newcomer, [4, [(1, 4)], 0, 0, []], 0]
    job.newcomers.take(newcomer, Beginning(4, {1: 4}))
    (begin,) = begins = answer(leader, takes)
    assert (begin.dest, begin.do) == (50, BEGIN)
    assert begin.content == {"taken": [newcomer], "begins": [4, [(1, 4)], 0, 0, []], "calls": 5}
    news = answer(leader, begins)
    assert told(news) == [(EVALUATOR, MEET), (0, MEET), (2, MEET), (51, MEET)]
    # Nobody waits for the evaluator.
    over = answer(leader, [each for each in news if each.dest != EVALUATOR])
    assert [each.request.source for each in over] == [50, 0]
    assert over[0].content == {"place": newcomer}
    assert job.newcomers.coming is None


def test_one_comes_after_the_other_and_knows_who_came_before():
    job, leader = places()
    stand_by(leader, 51)
    stand_by(leader, 50)
    asks = die(job, leader, 1)
    assert told(die(job, leader, 2)) == []
    answer(leader, asks)
    takes = here(leader, newcomer=50)
    job.newcomers.take(takes[0].content[0], Beginning(4, {}))
    asks = answer(leader, answer(leader, answer(leader, takes)))
    assert [each[1] for each in told(asks)] == [STAND_STILL]
    answer(leader, asks)
    takes = here(leader, newcomer=51, number=2)
    assert takes[0].content[0] == Newcomer(51, "worker", 2, 2)


def test_a_newcomer_for_which_it_is_too_late_is_in_no_round_and_begins_elsewhere():
    job, leader = places()
    stand_by(leader)
    answer(leader, die(job, leader, 1))
    takes = here(leader, clock=4)
    retracts = answer(leader, takes, {"is_late": True}, of=1)
    assert told(retracts) == [(0, RETRACT), (1, RETRACT)]
    again = answer(leader, retracts)
    assert told(again) == [(0, STAND_STILL)]
    assert answer(leader, again) == []  # what it has said before counts no more
    assert here(leader, clock=5, number=2)[0].content[1] == [5, [(1, 5)], 0, 0, []]


def test_where_the_chief_dies_between_two_steps_the_next_one_stands_still():
    job, leader = places()
    stand_by(leader)
    asks = die(job, leader, 1)
    again = die(job, leader, 0)
    assert told(asks) + told(again) == [(0, STAND_STILL), (2, STAND_STILL)]
    assert leader.missing(50) == [(JOINING, "", [2])]
    answer(leader, again)
    assert here(leader, 2)[0].content[2] == 2


def test_where_no_worker_lives_a_newcomer_begins_behind_all():
    job, leader = places(2)
    stand_by(leader)
    die(job, leader, 1)
    asks = die(job, leader, 0)
    assert told(asks) == [(0, HOW_FAR), (1, HOW_FAR)]
    assert asks[0].content == [1, 0]
    for each, clock in zip(asks, (3, 4), strict=True):
        begins = {"begins": [clock, [(7, 9 - clock)], clock, clock, []]}
        leader.answered(Member(each.dest, True), each.step, begins)
    assert leader.due()[0].content[1:] == [[4, [(7, 6)], 4, 4, []], -1]


def test_no_place_is_given_once_a_server_knows_that_a_worker_has_left():
    """The leader has not heard it: that worker died before it had told all servers."""
    job, leader = places(1)
    stand_by(leader)
    asks = die(job, leader, 0)
    leader.answered(Member(0, True), asks[0].step, {"begins": [0, [], 0, 0, []]})
    leader.answered(Member(1, True), asks[1].step, {"begins": None})
    over = leader.due()
    assert [(each.request.source, each.content) for each in over] == [(50, None)]
    assert job.newcomers.is_ending


def test_who_still_waits_once_all_workers_have_left_hears_so():
    job, leader = places(1)
    stand_by(leader)
    job.newcomers.is_ending = True
    job.left.add(0)
    leader.lose(Member(0))
    assert [(each.request.source, each.content) for each in leader.due()] == [(50, None)]


def test_the_place_of_an_evaluator_goes_to_who_can_evaluate_and_nobody_stands_still():
    job, leader = places()
    stand_by(leader, 50)
    stand_by(leader, 51, evaluates=True)
    takes = die(job, leader, EVALUATOR)
    assert told(takes) == [(0, TAKE_PLACE), (1, TAKE_PLACE)]
    newcomer = Newcomer(51, "evaluator", EVALUATOR, 1)
    assert takes[0].content == [newcomer, None, -1]
    job.newcomers.take(newcomer, None)
    (begin,) = answer(leader, takes)
    assert begin.content["begins"] is None


@pytest.mark.parametrize("moment", ["asked", "standing", "taking", "begins", "known"])
def test_whoever_dies_on_its_way_lets_the_chief_go_and_is_followed(moment):
    job, leader = places()
    stand_by(leader, 50)
    stand_by(leader, 51)
    orders = die(job, leader, 1)
    if moment != "asked":
        answer(leader, orders)
    if moment in ("taking", "begins", "known"):
        orders = here(leader)
    if moment in ("begins", "known"):
        job.newcomers.take(orders[0].content[0], Beginning(4, {}))
        orders = answer(leader, orders)
    if moment == "known":
        orders = answer(leader, orders)
    after = die(job, leader, 50)
    has_place = moment in ("begins", "known")
    if moment == "asked":
        after = answer(leader, orders)
    elif moment == "taking":  # one server took it before it heard of the death
        after = answer(leader, orders, {"is_late": True}, of=1)
        assert [each[1] for each in told(after)] == [RETRACT, RETRACT]
        after = answer(leader, after)
    replies = [each.request.source for each in after if isinstance(each, Reply)]
    assert replies == ([0] if moment in ("taking", "begins", "known") else [])
    assert [each for each in told(after) if each[1] != MEET] == [(0, STAND_STILL)]
    answer(leader, after)  # the others may hang that were to know it
    takes = here(leader, newcomer=51, number=2)
    place = 50 if has_place else 1
    assert takes[0].content[0] == Newcomer(51, "worker", place, 2 if has_place else 1)


def test_a_server_that_cannot_take_a_newcomer_lets_it_fail_everywhere():
    job, leader = places()
    stand_by(leader)
    answer(leader, die(job, leader, 1))
    retracts = answer(leader, here(leader), {"failed": "MemoryError: no room"}, of=1)
    assert told(retracts) == [(0, RETRACT), (1, RETRACT)]
    failed = answer(leader, retracts)
    assert [type(each) for each in failed] == [Fail, Fail]
    assert "rank 50 cannot take a place: server 1: MemoryError" in failed[0].why
    assert job.newcomers.coming is None


def test_who_stands_still_for_nobody_goes_on():
    _, leader = places()
    assert [each.request.source for each in here(leader)] == [0]


def test_a_core_counts_no_rank_that_stands_by_as_a_request_that_waits():
    members = SimpleNamespace(
        workers=(1, 2), evaluators=(), server_numbers=(0,), leader=0, waiting=(7,), ranks=(1, 2, 7),
        n_losses=0,
    )  # fmt: skip
    core = Core(0, lambda: members)
    core.agreement.ask(asked(7, 1), StandBy(7, False))
    assert core.agreement.due() == []
    assert core.n_waiting == 0


# --- in any order ---------------------------------------------------------------------------------
class Leader:
    """The server that leads; of copies each has one, and hears the same."""

    def __init__(self, n, spares):
        self.job, self.send = Job(n, spares), None
        self.agreement = Agreement(self.job, lambda: 0)
        self.orders = OrdersGiven(lambda *order: self.send and self.send(*order), lambda: 0)
        self.job.asks = lambda: {
            each.request.source: each.command.evaluates for each in self.agreement.asked(StandBy)
        }

    def hear(self, what, *more):
        if what == "ask" and more[0].source not in self.job.left:
            self.agreement.ask(more[0], command_of(more[0].content, more[0]))
        elif what == "answer":
            self.orders.answered(*more)
        elif what == "gone":
            self.job.die(*more)
            self.orders.forget(Member(*more))
            self.agreement.lose(Member(*more))
        return self.carried_out(self.agreement.due())

    def carried_out(self, actions):
        """Give orders, and carry out those for this server itself; return all other actions."""
        others = []
        for each in actions:
            if not isinstance(each, Tell):
                others.append(each)
                continue
            member = Member(each.dest, each.is_server)
            if member != Member(0, True):
                hear = partial(self.agreement.answered, member, each.step)
                self.orders.give(member, (each.do, each.content), hear)
                continue
            made = carry_out(self.job.newcomers, self.job.left, each.do, each.content)
            self.agreement.answered(member, each.step, made)
        return others + self.carried_out(self.agreement.due()) if actions else others

    def copied(self):
        """Return a copy that is made now; see ringcomm.ps.server.homes.whole_copy."""
        made = Leader(len(self.job.first), self.job.spares)
        made.job.left = {*self.job.left}
        made.job.newcomers.load(json.loads(json.dumps(self.job.newcomers.state())))
        made.agreement.load(self.agreement.state())
        made.orders.last = self.orders.last
        for each in self.agreement.asked():
            assert made.hear("ask", each.request) == []
        return made


def carry_out(newcomers, dead, do, content):
    if do == HOW_FAR:
        return {"begins": [0, [], 0, 0, []]}
    if do == RETRACT:
        return newcomers.retract(content)
    newcomer, begins, beside = copy.deepcopy(content)
    if newcomer.rank in dead or beside in dead:
        return {"is_late": True}
    newcomers.take(newcomer, Beginning.of_json(begins))
    if newcomer.rank in dead:
        newcomers.fallen[newcomer.rank] = None
    return None


class Rank:
    """A worker, or one that stands by: it asks, carries out orders, and makes steps."""

    def __init__(self, world, rank):
        self.world, self.rank = world, rank
        self.taken, self.stands, self.open, self.n_asked = {}, Counter(), {}, 0
        self.begins, self.place = Counter(), "waits"
        do = {STAND_STILL: self.note, MEET: self.meet, BEGIN: self.begin}
        self.orders = OrdersTaken(do, lambda: 0)
        self.waits_for = {}  # by newcomer: the request

    def note(self, newcomer):
        self.stands[newcomer] += 1
        if newcomer in self.waits_for:
            self.say(newcomer)

    def meet(self, taken):
        for each in taken:
            self.taken[each.rank] = each
            self.stands.pop(each.rank, None)
            self.waits_for.pop(each.rank, None)

    def begin(self, said):
        self.begins[said["taken"][-1]] += 1
        self.meet(said["taken"])

    def ask(self, command, **more):
        self.n_asked += 1
        request = asked(self.rank, self.n_asked, command=command, **more)
        self.open[self.n_asked] = request
        self.world.to_leader[self.rank].append(("ask", request))
        return self.n_asked

    def say(self, newcomer):
        self.waits_for[newcomer] = self.ask("here", newcomer=newcomer, begins=NOWHERE, calls=0)

    def step(self):
        """End a step: stand still for those that are to begin here."""
        if self.place == "waits" and self.rank in self.world.spares:
            return
        for newcomer in [*self.stands]:
            if newcomer in self.world.dead:  # as a worker that hears of it by itself
                self.stands.pop(newcomer)
                self.waits_for.pop(newcomer, None)
            elif newcomer not in self.waits_for:
                self.say(newcomer)

    def receive(self, message):
        if not isinstance(message, Reply | Fail):
            number, order = message
            is_valid, answer = self.orders.take(number, *copy.deepcopy(order))
            if is_valid:
                self.world.to_leader[self.rank].append(("answer", number, answer))
        elif (request := self.open.pop(message.request.header.sequence, None)) is not None:
            if request.content["command"] == "stand by":
                self.place = message.content and message.content["place"]
            else:
                newcomer = request.content["newcomer"]
                self.stands.pop(newcomer, None)
                self.waits_for.pop(newcomer, None)


class World:
    """Ranks, a leader with its copy, another server, and what is on its way, in order."""

    def __init__(self, choices, n, n_spares):
        self.choices, self.n, self.spares = choices, n, (*range(50, 50 + n_spares),)
        self.ranks = {rank: Rank(self, rank) for rank in (*range(n), EVALUATOR, *self.spares)}
        self.to_leader = {key: deque() for key in (*self.ranks, "server")}
        self.to_rank = {key: deque() for key in self.to_leader}
        self.dead, self.replies, self.n_copied = set(), {}, 0
        self.other, self.known_dead = Newcomers(), set()
        self.server = OrdersTaken(
            {do: lambda x, do=do: self.served(do, x) for do in (TAKE_PLACE, RETRACT, HOW_FAR)},
            lambda: 0,
        )
        self.leader, self.copy = Leader(n, self.spares), Leader(n, self.spares)
        self.leader.send = self.send_order
        for rank in self.spares:
            self.ranks[rank].ask("stand by", evaluates=False)

    def served(self, do, content):
        """The other server carries out an order; it may have heard of deaths, or not."""
        if do == TAKE_PLACE and self.choices.below(4) == 3:
            return {"is_late": True}
        known = {rank for rank in self.dead if rank in self.known_dead or self.choices.below(2)}
        self.known_dead |= known
        return carry_out(self.other, self.known_dead, do, content)

    @property
    def live_workers(self):
        train = [each for each in self.ranks.values() if each.rank < self.n or each.begins]
        return [each for each in train if each.rank not in self.dead]

    def let_leader_hear(self, what, *more):
        if what == "ask" and (name := (more[0].source, more[0].header.sequence)) in self.replies:
            if (reply := self.replies[name]) is not None:
                self.to_rank[more[0].source].append(reply)
            return
        if what == "ask":
            self.replies[more[0].source, more[0].header.sequence] = None
        actions = self.leader.hear(what, *more)
        assert [str(each) for each in self.copy.hear(what, *more)] == [str(x) for x in actions]
        for each in actions:
            if isinstance(each, Reply | Fail):
                request = each.request
                self.replies[request.source, request.header.sequence] = each
        for each in actions:
            self.to_rank[each.request.source].append(each)

    def send_order(self, member, number, order):
        self.to_rank["server" if member.is_server else member.number].append((number, order))

    def deliver(self):
        busy = [(False, key) for key, channel in self.to_leader.items() if channel]
        busy += [(True, key) for key, channel in self.to_rank.items() if channel]
        if not busy:
            return False
        is_to_rank, key = busy[self.choices.below(len(busy))]
        if not is_to_rank:
            self.let_leader_hear(*self.to_leader[key].popleft())
            return True
        message = self.to_rank[key].popleft()
        if key == "server":
            number, order = message
            _, answer = self.server.take(number, *copy.deepcopy(order))
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
        """Its copy goes on, which has heard the same; a new copy is made once that can be."""
        for channel in self.to_rank.values():
            for _ in range(self.choices.below(len(channel) + 1)):
                channel.pop()
        for channel in self.to_leader.values():
            kept = [each for each in channel if each[0] == "gone"]
            channel.clear()
            channel.extend(kept)
        self.leader = self.copy
        self.leader.send = self.send_order
        self.leader.orders.again()
        for number, rank in self.ranks.items():
            if number not in self.dead:
                self.to_leader[number].extend(("ask", each) for each in rank.open.values())
        while self.leader.agreement.awaits_answers and self.deliver_alone():
            pass
        self.copy = self.leader.copied()
        self.n_copied += self.leader.job.newcomers.coming is not None

    def deliver_alone(self):
        """Deliver, while there is no copy."""
        self.copy = copy.copy(self.leader)
        self.copy.hear = lambda *_: self.heard
        hear = self.leader.hear

        def remember(*event):
            self.heard = hear(*event)
            return self.heard

        self.leader.hear = remember
        try:
            return self.deliver()
        finally:
            del self.leader.hear

    def run(self):
        while not self.choices.are_over:
            what = self.choices.below(16)
            if what < 9:
                self.deliver()
            elif what < 13:
                workers = self.live_workers
                workers[self.choices.below(len(workers))].step()
            elif what < 15:
                train = [each.rank for each in self.live_workers]
                victims = [*train, *(rank for rank in self.spares if rank not in self.dead)]
                victim = victims[self.choices.below(len(victims))]
                if train != [victim] and victim not in self.dead:
                    self.kill(victim)
            else:
                self.kill_leader()
        is_busy = True
        while is_busy:
            is_busy = self.deliver()
            for each in self.live_workers:
                each.step()
            is_busy |= any(self.to_leader.values()) or any(self.to_rank.values())


@given(
    numbers=st.binary(min_size=60, max_size=400), n=st.integers(1, 3), n_spares=st.integers(1, 4)
)
@ANY_ORDER
def test_all_who_live_agree_on_who_has_which_place_whoever_dies(numbers, n, n_spares):
    world = World(Choices(numbers), n, n_spares)
    world.run()
    taken, job = world.leader.job.newcomers.taken, world.leader.job
    live = {rank: each for rank, each in taken.items() if rank not in world.dead}
    assert world.other.taken == taken
    assert job.newcomers.coming is None
    places = [each.place for each in taken.values()]
    assert len({*places}) == len(places)
    assert {*places} <= world.dead
    free = world.dead & {*range(n), *taken} - {*places}
    waiting = [rank for rank in world.spares if rank not in world.dead and rank not in taken]
    assert not (free and waiting), "a place stays free"
    for rank, each in world.ranks.items():
        if rank in world.dead:
            continue
        assert not each.stands, "a worker stands still for ever"
        assert {request.content["command"] for request in each.open.values()} <= {"stand by"}
        assert bool(each.begins) == (rank in taken) == (each.place == taken.get(rank))
        assert sum(each.begins.values()) <= 1
        if rank != EVALUATOR:
            assert each.taken.items() >= live.items()
