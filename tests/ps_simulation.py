"""Cores of several servers, clients, and a network that delays and repeats what it carries.

All is in one thread, and a list of numbers makes each choice: the same list is the same run.
"""

import copy
from collections import defaultdict, deque
from typing import NamedTuple

from ps_simulation_client import Client
from ps_simulation_message_types import FIRST_SERVER, Request
from ps_simulation_newcomer import SpareClient
from ps_simulation_server import Server

from ringcomm.ps.protocol.frames import FrameKind
from ringcomm.ps.server.core import events as on

MISTAKES = 8  # a server may refuse a partition, one time in so many


class Members(NamedTuple):
    workers: tuple[int, ...]
    evaluators: tuple[int, ...]
    server_numbers: tuple[int, ...]
    leader: int
    waiting: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    n_losses: int = 0


class Choices:
    """A list of bytes; zeros behind its end."""

    def __init__(self, numbers):
        self._numbers = iter(numbers)
        self.are_over = False

    def byte(self):
        number = next(self._numbers, None)
        self.are_over |= number is None
        return number or 0

    def below(self, n):
        return self.byte() % n

    def some_of(self, things):
        """Return at least one of them."""
        mask = self.byte()
        return [x for k, x in enumerate(things) if mask >> k & 1] or [things[mask % len(things)]]


class World:
    """A run.

    Args:
        shapes: tables, by number.
        choices: see Choices.
        n_servers, n_workers: how many there are.
        n_ops: what each client does before it leaves.
        may_fail: servers may refuse partitions.
        may_die: clients die, all but one worker; what they have sent last is lost.
        may_rest: workers complete no more steps at any time, and go on to read and move.
        n_spares: ranks that take the places of workers that die.
    """

    def __init__(
        self, shapes, choices, n_servers, n_workers, n_ops, *, may_fail, may_die=False,
        may_rest=False, n_spares=0,
    ):  # fmt: skip
        self.shapes = dict(enumerate(shapes))
        self.choices, self.n_servers = choices, n_servers
        self.may_fail, self.may_die, self.may_rest = may_fail, may_die, may_rest
        leader = n_servers - 1
        workers = tuple(range(1, n_workers + 1))
        self.chief = workers[-1]
        self.acked = set()  # of the dead: table, partition and update
        waiting = tuple(range(n_workers + 1, n_workers + 1 + n_spares))
        servers, ranks = tuple(range(n_servers)), (0, *workers, *waiting)
        self.members = Members(workers, (0,), servers, leader, waiting, ranks)
        self.leader_rank = FIRST_SERVER + leader
        self.now = 0.0
        self.channels = defaultdict(deque)
        self.delivered = {}  # the last push, by channel
        self.open = set()  # requests that are to be answered
        self.claims = {}  # by table, partition and epoch: a server
        self.rounds = defaultdict(lambda: defaultdict(dict))  # who is in: by table and round
        self.dead = set()
        self.servers = [Server(self, index) for index in range(n_servers)]
        for server in self.servers:
            for number, shape in self.shapes.items():
                if not shape.is_late:
                    server.install(number, shape)
        self.clients = {rank: Client(self, rank, n_ops) for rank in (0, *workers)}
        self.n_joined = self.n_returned = 0
        self.spares = [SpareClient(self, rank, n_ops) for rank in waiting]
        self.workers = (*workers, *waiting)
        self.clients |= {each.rank: each for each in self.spares}
        self.ranks = {**self.clients, **{server.rank: server for server in self.servers}}

    def first_owners(self, number):
        n = self.shapes[number].n_partitions
        return [(number + part) % self.n_servers for part in range(n)]

    # --- messages
    def send(self, source, dest, message):
        self.channels[source, dest].append(message)

    def send_to_server(self, server, dest, message):
        message = {**copy.deepcopy(message), "from": server.index}
        self.send(server.rank, FIRST_SERVER + dest, message)

    def ask(self, source, dest, request):
        if request.header.sequence:
            self.open.add((*identity(request), dest))
        self.send(source, dest, request)

    def settle(self, request, server):
        """Note that a request has been answered, which happens once."""
        is_new = request.content != "copy" and request.source not in self.dead
        if is_new and request.header.sequence:
            self.open.remove((*identity(request), server))

    def makes_a_mistake(self):
        return self.may_fail and self.choices.below(MISTAKES) == MISTAKES - 1

    @property
    def may_have_problems(self):
        return self.may_fail or any(
            client.has_left or client.has_rested for client in self.clients.values()
        )

    @property
    def is_abandoned(self):
        return any(client.has_abandoned for client in self.clients.values())

    @property
    def is_abandoned_by_all(self):
        """True if a worker died and the others complete no more steps: reads wait for no round."""
        live = [self.clients[rank] for rank in self.workers if rank not in self.dead]
        return bool(self.dead) and all(each.has_rested or each.has_left for each in live)

    # --- rounds
    def let_in(self, number, clock, name, parts):
        self.rounds[number][clock][name[0]] = name, parts

    def is_in(self, number, clock, rank):
        return rank in self.rounds[number][clock]

    def is_kept(self, number, clock):
        """Return False for a round whose mean is dropped by all its workers."""
        return not self.shapes[number].is_held or clock % 3 < 2

    # --- a run
    def run(self):
        while not self.choices.are_over:
            self.step()
        while self.deliver_one() or self.act_once() or self.wait() or self.give_up():
            pass
        assert all(client.has_left for client in self.clients.values()), "somebody waits for ever"

    def step(self):
        what = self.choices.byte()
        if what < 160:
            busy = sorted(pair for pair, channel in self.channels.items() if channel)
            if busy:
                self.deliver(busy[self.choices.below(len(busy))])
        elif what < 224:
            clients = [*self.clients.values()]
            clients[self.choices.below(len(clients))].act()
        elif what < 236:
            self.now += 0.2
            self.servers[self.choices.below(self.n_servers)].handle(on.TimePassed())
        elif what < 252:
            self.repeat()
        elif self.may_die:
            live = [each for each in self.clients.values() if not each.has_left or each.stands_by]
            if sum(each.is_worker and not each.stands_by for each in live) > 1:
                self.kill(live[self.choices.below(len(live))])

    def kill(self, client):
        """Let a client die: each server hears of it behind what had left."""
        self.dead.add(client.rank)
        self.open = {each for each in self.open if each[0] != client.rank}
        for server in self.servers:
            channel = self.channels[client.rank, server.rank]
            for _ in range(self.choices.below(8) % (len(channel) + 1)):
                channel.pop()
        client.die()
        workers = [rank for rank in self.members.workers if rank not in self.dead]
        live = [rank for rank in workers if not self.clients[rank].has_left]
        if client.rank == self.chief and live:
            self.chief = live[-1]
            self.clients[self.chief].succeed()

    def deliver(self, pair):
        message, receiver = self.channels[pair].popleft(), self.ranks[pair[1]]
        if isinstance(receiver, Client) and receiver.has_left and not receiver.stands_by:
            return
        if isinstance(message, Request) and message.header.kind == FrameKind.PUSH:
            self.delivered[pair] = message
        receiver.receive(message)
        for client in self.clients.values():
            client.look()

    def forget(self, push, server):
        """Take note that a push came back: it comes to this server no more."""
        if self.delivered.get((push.source, server)) == push._replace(content=None):
            del self.delivered[push.source, server]

    def repeat(self):
        """Let a push come again."""
        pairs = sorted(pair for pair in self.delivered if not self.clients[pair[0]].has_left)
        if pairs:
            pair = pairs[self.choices.below(len(pairs))]
            self.send(*pair, self.delivered[pair]._replace(content="copy"))

    def deliver_one(self):
        pair = next((pair for pair, channel in self.channels.items() if channel), None)
        if pair is not None:
            self.deliver(pair)
        return pair is not None

    def act_once(self):
        return any(client.act() or client.look() for client in self.clients.values())

    def wait(self):
        """Let time pass; return True if something comes of it."""
        for _ in range(10):
            self.now += 0.2
            for server in self.servers:
                server.handle(on.TimePassed())
        return any(self.channels.values())

    def give_up(self):
        """Let a worker leave that waits for one table, while others wait for it in another."""
        waiting = [each for each in self.clients.values() if not each.is_leaving]
        if len(self.shapes) == 1 or not waiting:
            return self.meet_deadline()
        waiting[0].has_abandoned = True
        waiting[0].leave()
        return True

    def meet_deadline(self):
        """Let a worker leave at its deadline, where a move waits for a mean that it has abandoned.

        Its own pause waits for the move. Without deaths another worker releases the mean.
        """
        if not self.dead or not any(shape.is_held for shape in self.shapes.values()):
            return False
        clients = self.clients.values()
        waiting = [each for each in clients if each.has_abandoned and not each.has_left]
        for client in waiting[:1]:
            client.say_left()
        return bool(waiting)

    # --- what must hold
    def require_bounded(self, server, key, request):
        """Fail if a read under SSP lacks a push that it must have."""
        number, wanted = key[0], request.header.clock
        if self.shapes[number].mode.name != "ssp":
            return
        for part in [key[1]] if self.shapes[number].is_dense else request.body:
            log = server.values[key].logs[part]
            for rank in self.workers:
                client = self.clients[rank]
                if rank in self.dead or client.stands_by:
                    continue
                assert client.has_left or client.has_rested or client.clock >= wanted
                issued = client.issued[number, part]
                old = {name for name in issued if client.steps.get((number, name), 0) < wanted}
                assert old <= {*log}, f"{wanted}: {old} are not in {log}"

    def require_unread(self, key, epoch):
        """Fail if a client may still read memory of a partition that moved."""
        for client in self.clients.values():
            if not client.has_left and key[0] in client.owners:
                assert client.order_of(key).epoch >= epoch

    def require_moment(self, number, known, rounds):
        """Fail unless all servers hold all tables, each as it was after the same rounds."""
        for server in self.servers:
            held = server.snapshots[number]
            for key in server.values:
                if key[0] in known:
                    is_counted = self.shapes[key[0]].mode.has_rounds and not self.dead
                    assert not is_counted or held[key].version == rounds.get(key[0], 0)

    def require_all(self):
        """Fail unless all values follow from what the clients were told, and nothing is left."""
        for number, shape in self.shapes.items():
            servers = [s for s in self.servers if number in s.core.tables]
            for part in range(shape.n_partitions) if servers else ():
                key = number, part if shape.is_dense else 0
                logs = [s.values[key].logs[part] for s in servers if self.has(s, key, part)]
                (log,) = logs
                self.require_log(number, part, log)
        for server in self.servers:
            require_empty(server)
        abandoned = {rank for rank, client in self.clients.items() if client.has_abandoned}
        assert {rank for rank, *_ in self.open} <= abandoned | self.dead

    def has(self, server, key, part):
        return key in server.values and part in server.values[key].logs

    def require_log(self, number, part, log):
        has_rounds = self.shapes[number].mode.has_rounds
        rounds = [entry for entry in log if isinstance(entry[1], tuple)]
        singly = [entry for entry in log if not isinstance(entry[1], tuple)]
        for rank, client in self.clients.items():
            issued = client.issued[number, part]
            if has_rounds:
                issued = [name for name in issued if len(name) > 2]
            came = [name for name in singly if name[0] == rank and name[1] != "initial"]
            if rank in self.dead:
                assert came == [name for name in issued if name in came]
            else:
                assert came == issued
        firsts = [at for at, entry in enumerate(log) if entry[1] == "initial"]
        assert firsts == ([0] if self.shapes[number].is_of_chief and log else [])
        acked = {name for *place, name in self.acked if place == [number, part]}
        assert acked <= {name for _, *names in rounds for name in names} | {*singly}
        if has_rounds:
            expected = []
            for number_of_round, names in sorted(self.rounds[number].items()):
                found = [name for _, (name, parts) in sorted(names.items()) if part in parts]
                if found and self.is_kept(number, number_of_round):
                    expected.append((number_of_round, *found))
            rounds, expected = self.of_the_living(rounds), self.of_the_living(expected)
            if self.shapes[number].is_held and self.is_abandoned:
                assert rounds == [each for each in expected if each in rounds]
            else:
                assert rounds == expected

    def of_the_living(self, rounds):
        live = [(n, *(name for name in names if name[0] not in self.dead)) for n, *names in rounds]
        return [entry for entry in live if len(entry) > 1]


def identity(request):
    header = request.header
    return header.origin, header.sequence, header.view


def require_empty(server):
    """Fail if a core keeps anything once all have left."""
    core = server.core
    assert not server.snapshots
    assert not core.clients()
    assert core.n_waiting == 0
    assert not core.agreement.is_running
    assert not core.moments._moments
    assert not core.moments._stopped
    lock, migration = core.move_lock, core.migration
    assert lock.is_free
    assert not lock._patient
    assert not lock._waiting
    assert not migration._frozen
    assert not migration._giving
    assert not migration._unnoted
    assert not migration._postponed
    assert not server.retired
    assert not server.sent
    for unit in core.units():
        assert not unit.fence
        assert not unit.stands_still
        if unit.rounds is not None:
            assert unit.rounds.held is None
            assert not unit.rounds.requests()
            assert not unit.rounds._limits
