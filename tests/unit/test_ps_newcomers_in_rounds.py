"""In which rounds a newcomer is that takes the place of a worker: on one server, and on several."""

import itertools
import random
from collections import deque
from functools import partial

import pytest
from harness import at_length
from ps_core_steps import KEY, arrive, core_of, leave, names, push
from ps_simulation import Members
from ps_simulation_message_types import Request

from ringcomm.ps.placement.replacement_workers import Beginning, Newcomer
from ringcomm.ps.protocol.frames import FrameHeader, FrameKind
from ringcomm.ps.server.core import events as on
from ringcomm.ps.server.core.actions import End, Late, Reply
from ringcomm.ps.server.core.core import Core
from ringcomm.ps.server.core.core_table import ServedTable
from ringcomm.ps.server.core.unit import AppliedHere, Unit
from ringcomm.ps.update_modes import FirstOf, Mode

# --- decisions of one server --------------------------------------------------------------------
SYNC = Mode("sync")
ORDER = Request(100, FrameHeader(FrameKind.ORDER))  # of the server that leads
TOO_LATE = {"is_late": True}


def take(core, rounds, *, rank=7, place=1, clock=0, beside=2):
    """Let rank 7 take the place of worker 1; return what follows."""
    newcomer = Newcomer(rank, "worker", place, 1)
    begins = Beginning(clock, rounds)
    return core.handle(on.TookPlace(ORDER, newcomer, begins, beside), 0.0)


def retract(core):
    return names(core.handle(on.Retracted(ORDER, 7), 0.0))


def die(core, rank):
    return names(core.handle(on.Died(rank), 0.0))


def test_a_round_that_has_begun_does_not_wait_for_a_newcomer():
    core = core_of(SYNC)
    die(core, 1)
    assert arrive(core, push(2, 1)) == ["End"]
    assert [each.content for each in take(core, {1: 2})] == [None]
    assert arrive(core, push(7, 2, clock=2)) == []
    assert arrive(core, push(2, 2, clock=1)) == ["End"]
    assert arrive(core, push(2, 3, clock=2)) == ["End"]
    assert arrive(core, push(2, 4, clock=3)) == []
    assert die(core, 7) == ["End"]


@pytest.mark.parametrize("why", ["a round is over", "the worker beside it is dead"])
def test_a_newcomer_that_comes_too_late_for_a_round_counts_in_none(why):
    core = core_of(SYNC, (1, 2, 3))
    die(core, 1)
    if why == "a round is over":
        arrive(core, push(2, 1))
        arrive(core, push(3, 1))
    else:
        die(core, 2)
    assert [each.content for each in take(core, {1: 0})] == [TOO_LATE]
    if why == "a round is over":
        arrive(core, push(2, 2, clock=1))
    assert arrive(core, push(3, 2, clock=core.unit_of(KEY).rounds.current)) == ["End"]


def test_a_newcomer_that_gives_its_place_back_is_not_waited_for():
    core = core_of(SYNC)
    die(core, 1)
    take(core, {1: 0})
    assert arrive(core, push(2, 1)) == []
    assert retract(core) == ["End", "Reply"]
    assert core.clients() == [2, 9]


def test_who_is_known_to_be_dead_gets_no_place():
    core = core_of(SYNC)
    for rank in (1, 7):
        die(core, rank)
    assert [each.content for each in take(core, {1: 0})] == [TOO_LATE]
    assert not core.newcomers.taken


def test_nobody_follows_who_died_before_all_knew_its_place():
    """Another server had heard of its death, and refused."""
    core = core_of(SYNC)
    die(core, 1)
    take(core, {1: 0})
    die(core, 7)
    assert arrive(core, push(2, 1)) == ["End"]
    assert [*core.newcomers.fallen] == [1, 7]
    assert retract(core) == ["Reply"]
    assert [*core.newcomers.fallen] == [1]
    assert arrive(core, push(2, 2, clock=1)) == ["End"]


def test_a_server_says_how_far_all_were_once_nobody_lives_though_it_has_not_heard_of_all_deaths():
    """What the dead have sent counts no more; a round that waits for them is over."""
    core = core_of(SYNC)
    arrive(core, push(2, 1))
    die(core, 1)
    assert core.unit_of(KEY).rounds.current == 1
    arrive(core, push(2, 2, clock=1))
    how_far = on.HowFar(ORDER, (1, 2))
    (reply,) = (each for each in core.handle(how_far, 0.0) if isinstance(each, Reply))
    assert Beginning.of_json(reply.content["begins"]).rounds == {1: 2}
    assert core.dead == {1, 2}
    leave(core, 9)  # no worker
    (reply,) = core.handle(how_far, 0.0)
    assert reply.content["begins"] is not None
    other = core_of(SYNC)
    leave(other, 1)
    (*_, reply) = other.handle(on.HowFar(ORDER, (2,)), 0.0)
    assert reply.content == {"begins": None}  # training is over


def test_rounds_go_by_if_all_who_were_in_them_have_gone():
    """The newcomer begins with round 3; who was to make the one before has left."""
    core = core_of(SYNC)
    die(core, 1)
    take(core, {1: 3})
    assert leave(core, 2) == ["End", "End", "End"]
    assert arrive(core, push(7, 2, clock=3)) == ["End"]


def test_bounded_reads_wait_for_the_steps_of_a_newcomer():
    core = core_of(Mode("ssp", 1))
    die(core, 1)
    tick = Request(2, FrameHeader(FrameKind.TICK, origin=2, sequence=1, clock=5))
    core.handle(on.Ticked(tick), 0.0)
    take(core, {}, clock=5)
    assert core.clocks.all() == {2: 5, 7: 5}
    tick = Request(2, FrameHeader(FrameKind.TICK, origin=2, sequence=2, clock=7))
    core.handle(on.Ticked(tick), 0.0)
    assert core.clocks.slowest == 5


def test_a_place_in_rounds_of_first_of_waits_for_a_newcomer():
    core = core_of(FirstOf(2))
    die(core, 1)
    ask = lambda rank, n: on.Entered(  # noqa: E731
        Request(rank, FrameHeader(FrameKind.ENTER, origin=rank, sequence=n + 1, table=1, clock=n))
    )
    (reply,) = core.handle(ask(2, 0), 0.0)
    assert (reply.clock, reply.is_late) == (1, False)
    take(core, {1: 1})
    (reply,) = core.handle(ask(2, 1), 0.0)
    assert reply.clock == 1  # it is not over yet
    (reply,) = core.handle(ask(7, 1), 0.0)
    assert (reply.clock, reply.is_late) == (2, False)


# --- several servers, in any order of messages --------------------------------------------------
class Chance(random.Random):
    """Chooses what happens next."""

    def below(self, n):
        return self.randrange(n)

    def one_of(self, things):
        return things[self.randrange(len(things))]


class Server:
    """A core with one block, and what the rounds of the block were made of."""

    def __init__(self, index):
        self.core = Core(index, lambda: Members((1, 2, 3), (), (0, 1), 0))
        self.key = 1, index
        self.core.add_table(ServedTable(1, "w", SYNC, True, [0, 1]))
        self.core.add_unit(Unit(self.key, SYNC, AppliedHere(), (1, 2, 3), is_ready=True))
        self.core.handle(on.Died(1), 0.0)
        self.rounds, self.late = [], []

    def hear(self, event, reply):
        """Take an event; pass to reply() who is answered, and whether that is late."""
        for action in self.core.handle(event, 0.0):
            if isinstance(action, End):
                self.rounds.append({each.worker for each in action.contributions})
                for each in action.contributions:
                    reply(each.worker, False)
            elif isinstance(action, Late):
                self.late.append(action.contribution.worker)
                reply(action.contribution.worker, True)
            elif isinstance(action, Reply):
                reply(action.request.source, action.content == TOO_LATE)


class World:
    """Two servers, workers 2 and 3, and rank 7, which comes in the place of worker 1.

    What a rank sends to a server arrives in this order, some time; a death behind all of it that
    arrives at all. `choices` says what happens next.
    """

    def __init__(self, choices):
        self.choices, self.servers = choices, [Server(0), Server(1)]
        self.channels = {(rank, to): deque() for rank in (2, 3, 7) for to in (0, 1)}
        self.made = {2: 0, 3: 0}  # rounds of each worker
        self.open = {}  # by rank: answers that it awaits, and whether one was late
        self.sequence = itertools.count(1)
        self.beside = self.stands_still = None
        self.dead, self.is_in, self.n_retracted = set(), False, 0

    def send(self, rank, event_of):
        self.open[rank] = [2, False]
        for to in (0, 1):
            self.channels[rank, to].append(event_of(to))

    def push(self, rank):
        n = self.made[rank]

        def event_of(to):
            kinds = {"sequence": next(self.sequence), "table": 1, "partition": to, "clock": n}
            return on.Contributed(
                (1, to), Request(rank, FrameHeader(FrameKind.PUSH, origin=rank, **kinds)), None
            )

        self.send(rank, event_of)

    def take(self):
        live = [rank for rank in (2, 3) if rank not in self.dead]
        self.beside = self.choices.one_of(live)

    def answered(self, rank, is_late):
        if rank in self.dead:
            return
        self.open[rank][0] -= 1
        self.open[rank][1] |= is_late
        if self.open[rank][0]:
            return
        _, was_late = self.open.pop(rank)
        if rank == 7 and not self.is_in:
            self.go_on(was_late=was_late)
            return
        assert not was_late, (rank, self.made)
        self.made[rank] += 1

    def go_on(self, *, was_late):
        """The newcomer has its answers: to TAKE, or to RETRACT."""
        order = Request(7, FrameHeader(FrameKind.ORDER))
        if self.beside is None:
            self.take()
        elif was_late:
            self.beside = self.stands_still = None
            self.n_retracted += 1
            self.send(7, lambda _: on.Retracted(order, 7))
        else:
            self.is_in, self.made[7] = True, self.made[self.stands_still]
            self.stands_still = None

    def stand_still(self, rank):
        """A worker says where the newcomer begins, which tells the servers."""
        self.stands_still = rank
        newcomer, begins = Newcomer(7, "worker", 1, 1), Beginning(0, {1: self.made[rank]})
        order = Request(7, FrameHeader(FrameKind.ORDER))
        self.send(7, lambda _: on.TookPlace(order, newcomer, begins, rank))

    def steps(self):
        """Return what may happen now."""
        steps = [partial(self.deliver, key) for key, queue in self.channels.items() if queue]
        for rank in self.made:
            if rank in self.dead or rank in self.open or self.made[rank] >= ROUNDS:
                continue
            if rank == self.beside and not self.is_in:
                if self.stands_still is None and 7 not in self.open:
                    steps.append(partial(self.stand_still, rank))
                continue  # the others may go on
            steps.append(partial(self.push, rank))
        if self.beside in self.dead and self.stands_still is None and 7 not in self.open:
            steps.append(self.take)
        return steps

    def deliver(self, key):
        self.servers[key[1]].hear(self.channels[key].popleft(), self.answered)

    def die(self, rank):
        """A worker is killed: of what it has sent, some arrives."""
        self.dead.add(rank)
        for to in (0, 1):
            queue = self.channels[rank, to]
            for _ in range(self.choices.below(len(queue) + 1)):
                queue.pop() if queue else None
            queue.append(on.Died(rank))


ROUNDS = 6


@pytest.mark.parametrize("seeds", at_length([range(20_000)], [range(200)]), ids=len)
def test_a_newcomer_is_in_the_same_rounds_on_all_servers_whoever_dies(seeds):
    """Servers hear of the chief's death at any time, also while the newcomer comes in."""
    n_retracted = 0
    for seed in seeds:
        world = World(rng := Chance(seed))
        world.take()
        dies_at = rng.below(60)
        for at in itertools.count():
            if at == dies_at and seed % 3:
                world.die(2)
            steps = world.steps()
            if not steps:
                break
            rng.one_of(steps)()
        live = {2, 3, 7} - world.dead
        assert all(world.made.get(rank) == ROUNDS for rank in live), (seed, world.made)
        first, second = (server.rounds for server in world.servers)
        assert len(first) == len(second) == ROUNDS, seed
        for one, other in zip(first, second, strict=True):
            assert one ^ other <= {2}, (seed, first, second)
        assert not any(rank in live for server in world.servers for rank in server.late), seed
        n_retracted += world.n_retracted
    assert n_retracted  # else nothing has come too late
