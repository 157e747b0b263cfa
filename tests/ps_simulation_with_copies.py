"""Servers with copies, clients and a network, in one thread: servers die, whatever is under way.

The servers are real, up to their wire. A list of numbers makes each choice: the same list is the
same run. Each push adds 1 to an element of its own, so values show how often it counts.
"""

import json
import time
from collections import Counter, defaultdict, deque

import numpy as np
from hypothesis_for_event_orders import hypothesis_settings

from ringcomm.ps import optim
from ringcomm.ps.client.request_order import PartitionOwners
from ringcomm.ps.control.agreement import OrdersTaken
from ringcomm.ps.control.commands import COUNT, END, REPLACED
from ringcomm.ps.end_of_job import EndOfTraining
from ringcomm.ps.protocol.frame_meta import PushMeta, packed_json
from ringcomm.ps.protocol.frames import (
    CopyOption,
    EntryOption,
    FrameHeader,
    FrameKind,
    NewsOption,
    ServerOption,
    Status,
)
from ringcomm.ps.protocol.link import Delivery
from ringcomm.ps.roles import Layout, Takeovers
from ringcomm.ps.server.homes.home_pushes import NoPushes
from ringcomm.ps.server.homes.local_homes import Homes
from ringcomm.ps.server.replies import as_body
from ringcomm.ps.server.server import Server
from ringcomm.ps.table_spec import Spec
from ringcomm.ps.update_modes import SSP, FirstOf, Mode

BLOCK = 40  # elements of a partition
N_PARTS = 4
NOTHING = np.empty(0, np.uint8)


def memory(nbytes):
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]


ANY_ORDER = hypothesis_settings(5_000, 6)


class ModelTime:
    """In the place of the module time: each look at it takes 10 ms."""

    def __init__(self):
        self.now = time.monotonic() + 1e6  # later than any look at the real one

    def monotonic(self):
        self.now += 0.01
        return self.now

    time = monotonic  # a name of the module


class Wire:
    """Link of one rank."""

    may_read, carried_out, n_queued = True, (0, 0), 0

    def __init__(self, net, rank):
        self.net, self.rank = net, rank

    def send(self, dest, header, meta=b"", body=NOTHING):
        if dest not in self.net.heard[self.rank]:
            header = header._replace(n_body=body.nbytes)
            frame = Delivery(self.rank, header, meta, body.view(np.uint8).copy())
            self.net.channels[self.rank, dest].append(frame)

    def shares_memory(self, rank):
        return False

    def memory(self, nbytes):
        return memory(nbytes)

    def make_pushes(self, home):
        return NoPushes()

    def nothing(self, *args):
        pass

    enter = leave = close = view = nothing


class Process:
    """A rank, and all that it knows of the others."""

    def __init__(self, net, rank):
        self.net, self.rank, self.wire = net, rank, net.wire(rank)
        self.layout = Layout(
            net.workers,
            net.servers,
            net.evaluators,
            replication=net.replication,
            spares=net.spares,
        )
        self.takeovers = Takeovers(self.layout)

    def receive(self, frame):
        header = frame.header
        if (header.kind, header.option) == (FrameKind.NEWS, NewsOption.HOMES):
            said = json.loads(frame.meta)
            self.note_copied(frame.source, frame.header.clock, said["copied"])
            for home in self.takeovers.said(frame.source, frame.header.clock, said["runs"]):
                self.taken(home)
        else:
            self.take(frame)

    def hear(self, rank):
        if rank in self.net.servers:
            self.takeovers.died(rank)

    def look(self):
        pass

    def note_copied(self, rank, dead, homes):
        pass


class ServerProcess(Process):
    def __init__(self, net, rank):
        super().__init__(net, rank)
        index = self.layout.number_of(rank)
        self.homes = Homes(
            index, self.layout, self.wire,
            lambda home, seen, wire, clock: Server(
                home, seen, wire, self.wire.memory, {}, clock=clock
            ),
            self.wire.make_pushes,
        )  # fmt: skip
        self.take, self.taken = self.homes.on_request, self.homes.on_taken
        self.look, self.note_copied = self.homes.look, self.homes.on_homes

    def hear(self, rank):
        super().hear(rank)
        self.homes.on_death(rank)


class Client(Process):
    """A worker: it keeps its requests until they are answered, and sends them again if need be."""

    def __init__(self, net, rank, n_steps):
        super().__init__(net, rank)
        self.n_steps, self.step, self.sequence = n_steps, 0, 0
        self.asked = {}  # what is not answered: home, header, meta, body, and what takes the reply
        self.owners = None
        self.n_pushed = Counter()
        self.n_rounds = 0
        self.has_left = self.waits = False
        self.table = 1
        self.training, self.n_replaced = EndOfTraining(), 0
        do = {
            COUNT: lambda _: self.training.ask(), END: self.training.end_at,
            REPLACED: self.note_replaced,
        }  # fmt: skip
        self.orders = OrdersTaken(do, lambda: self.layout.n_losses)
        meta = packed_json({"command": "open", "spec": net.spec.to_json()})
        self.ask(self.layout.leader, FrameKind.ASK, meta=meta, take=self.created)

    def created(self, reply):
        self.know(json.loads(reply.body.tobytes() or reply.meta))

    def know(self, created):
        self.table, self.owners = created["number"], PartitionOwners()
        self.owners.add_table(self.table, created["owners"], {})
        for part, epoch in created["epochs"].items():
            self.owners.orders[self.table, int(part)].epoch = epoch

    def ask(self, home, kind, meta=b"", body=NOTHING, *, take=None, **more):
        self.sequence += 1
        if kind == FrameKind.ASK:
            more["view"] = self.layout.n_losses
        header = FrameHeader(kind, origin=self.rank, sequence=self.sequence, **more)
        self.asked[self.sequence] = home, header, meta, body, take
        self.send(self.sequence)

    def send(self, sequence):
        home, header, meta, body, _ = self.asked[sequence]
        self.send_frame(home, header, meta, body)

    def send_frame(self, home, header, meta=b"", body=NOTHING):
        if home in self.layout.hosts:
            header = header._replace(home=home + 1)
        self.wire.send(self.layout.rank_of(home), header, meta, body)

    def taken(self, home):
        for sequence in sorted(self.asked):
            if self.asked[sequence][0] == home:  # None: it waits until others have come back
                self.send(sequence)
        for partition, epoch in self.owners.confirmed.items() if self.owners else ():
            self.say_noted(home, partition, epoch)

    def take(self, reply):
        if reply.header.kind == FrameKind.ORDER:
            self.take_order(reply)
            return
        if reply.header.kind == FrameKind.NEWS:
            self.noticed(reply.header, reply.meta)
            return
        sequence, asked = reply.header.sequence, self.asked.get(reply.header.sequence)
        if asked is None:
            return  # it was asked again
        header = asked[1]
        partition = header.table, header.partition
        order = None if self.owners is None else self.owners.orders.get(partition)
        if reply.header.status == Status.WRONG_VIEW:
            if reply.header.view == header.view and asked[0] is not None:  # else it came twice
                self.again(partition, self.owners.returned(partition, sequence, reply.meta))
            return
        is_of_places = header.kind == FrameKind.ASK and b'"places"' in asked[2]
        may_be_refused = is_of_places and reply.header.status == Status.REFUSED
        assert reply.header.status in (Status.OK, Status.LATE) or may_be_refused, reply.meta
        del self.asked[sequence]
        if header.table and order is not None and order.sent_in(sequence) is not None:
            self.again(partition, order.answered(sequence))
        if asked[4] is not None:
            asked[4](reply)

    # --- commands
    def take_order(self, frame):
        number, order = frame.header.sequence, json.loads(frame.meta)
        is_valid, answer = self.orders.take(number, order["do"], order["content"])
        if is_valid:
            header = FrameHeader(FrameKind.REPLY, origin=self.rank, sequence=number)
            self.send_frame(self.layout.number_of(frame.header.origin), header, packed_json(answer))

    def note_replaced(self, _=None):
        self.n_replaced += 1

    def ask_leader(self):
        """Ask for the end of training, once; then, several times, that all know of new values."""
        command = {"command": "replaced"}
        if not self.training.is_begun():
            command = {"command": "stop", "by_count": True}
        else:
            self.note_replaced()
        self.ask(self.layout.leader, FrameKind.ASK, packed_json(command))

    # --- partitions that move
    def noticed(self, header, meta):
        partition = header.table, header.partition
        self.again(partition, self.owners.note_move(partition, meta, header.clock))

    def again(self, partition, sequences):
        order = self.owners.orders.get(partition)  # None: it does not know the table yet
        for sequence, (_, header, *more) in self.asked.items():
            asks_leader = header.kind == FrameKind.ENTER and header.option == EntryOption.ASK
            is_of_it = (header.table, header.partition) == partition and not asks_leader
            if is_of_it and order is not None and order.sent_in(sequence) is None:
                self.asked[sequence] = None, header, *more
        for sequence in sequences:
            self.net.n_resent += 1
            self.send_part(sequence)
        for each, epoch in self.owners.take_confirmed():
            self.owners.confirmed[each] = epoch
            for home in self.layout.server_numbers:
                self.say_noted(home, each, epoch)

    def say_noted(self, home, partition, epoch):
        header = FrameHeader(
            FrameKind.NEWS, origin=self.rank, table=partition[0], partition=partition[1],
            clock=epoch, option=NewsOption.NOTED,
        )  # fmt: skip
        self.send_frame(home, header)

    def send_part(self, sequence):
        """Send a request to the present owner of its partition."""
        _, header, *more = self.asked[sequence]
        partition = header.table, header.partition
        header = header._replace(view=self.owners.orders[partition].epoch)
        self.asked[sequence] = self.owners.view.owner(partition), header, *more
        self.send(sequence)

    def move(self):
        servers = self.layout.server_numbers
        part, dest = self.net.choices.below(N_PARTS), servers[self.net.choices.below(len(servers))]

        def moved(reply):
            answer = json.loads(reply.body.tobytes() or reply.meta)
            self.net.n_moved += answer["moved"]

        body = as_body({"command": "move", "moves": [[self.table, part, -1, dest]]})
        self.ask(self.layout.leader, FrameKind.ASK, body=body, take=moved)

    def change_places(self):
        server = self.net.choices.below(len(self.net.servers))
        is_added = self.net.choices.below(2)
        change = {"add" if is_added else "remove": [server]}

        def changed(reply):
            self.net.n_changed += reply.header.status == Status.OK

        self.ask_places(change, changed)

    def ask_places(self, change, take=None):
        hosts = [*self.layout.ranks_of_servers().items()]
        asked = {"command": "places", **change, "hosts": hosts}
        self.ask(self.layout.leader, FrameKind.ASK, packed_json(asked), take=take)

    def part_at(self, home):
        """Return a partition that a home has."""
        return next(p for p in range(N_PARTS) if self.owners.view.owner((self.table, p)) == home)

    # --- what it does
    def act(self):
        if self.owners is None or self.has_left or self.waits:
            return False
        is_chief = self.rank == self.net.workers[0]
        if is_chief and self.net.commands and self.net.choices.below(4) == 1:
            self.ask_leader()
        is_over = self.training.is_over()
        if is_over is None:
            return False
        if is_over or self.step == self.n_steps:
            if self.asked:
                return False
            self.leave()
            return True
        self.step += 1
        if self.net.moves and self.net.choices.below(3) == 1:
            self.move()
        if self.net.changes_places and self.net.choices.below(3) == 1:
            self.change_places()
        choice = self.net.choices.below(8)
        if self.net.mode.has_rounds or choice < 4:
            self.push()
        elif choice < 7:
            self.read(self.net.choices.below(N_PARTS))
        else:
            for home in self.layout.server_numbers:
                self.ask(home, FrameKind.TICK, clock=self.step)
        if self.net.mode.has_rounds and choice >= 4:
            self.read(choice % N_PARTS)
        return True

    def leave(self):
        self.has_left = True
        layout = self.layout
        for home in {*range(len(layout.servers))} - layout.lost - {*layout.server_numbers}:
            header = FrameHeader(FrameKind.SERVER, origin=self.rank, option=ServerOption.LEAVE)
            self.send_frame(home, header)
        for home in layout.server_numbers:
            self.ask(home, FrameKind.SERVER, option=ServerOption.LEAVE)

    def push(self):
        has_rounds = self.net.mode.has_rounds
        clock = self.n_rounds if has_rounds else 0
        self.n_rounds += 1
        if self.net.mode.name == "first_of":
            self.enter(clock)
            return
        parts = range(N_PARTS) if has_rounds else [self.net.choices.below(N_PARTS)]
        for part in parts:
            self.push_part(part, clock)

    def enter(self, clock):
        self.waits = True  # its next round is another one

        def decided(reply):
            self.waits = False
            is_in = reply.header.status == Status.OK
            option = EntryOption.IN if is_in else EntryOption.OUT
            for part in range(N_PARTS):
                self.push_part(part, clock)
                self.ask_part(part, FrameKind.ENTER, clock=clock, option=option)
            self.n_rounds = max(self.n_rounds, reply.header.clock)

        self.ask(
            self.layout.leader,
            FrameKind.ENTER,
            table=1,
            clock=clock,
            option=EntryOption.ASK,
            take=decided,
        )

    def ask_part(self, part, kind, meta=b"", body=NOTHING, *, take=None, **more):
        self.sequence += 1
        header = FrameHeader(
            kind, origin=self.rank, sequence=self.sequence, table=self.table, partition=part, **more
        )
        self.asked[self.sequence] = None, header, meta, body, take
        if self.owners.orders[self.table, part].add(self.sequence):
            self.send_part(self.sequence)

    def push_part(self, part, clock):
        workers = self.net.workers
        at = self.n_pushed[part] % self.net.room if not self.net.mode.has_rounds else 0
        at += self.net.room * workers.index(self.rank)
        self.n_pushed[part] += 1
        gradient = np.zeros(BLOCK)
        gradient[at] = 1.0
        meta = PushMeta(1.0, 0, BLOCK, "float64", 0, optim.Add().hyper).packed()

        def answered(reply):
            if reply.header.status == Status.OK:
                self.net.acked[part][at] += 1

        body = gradient.view(np.uint8)
        self.ask_part(part, FrameKind.PUSH, meta, body, clock=clock, take=answered)

    def read(self, part):
        least = self.net.least(part)

        def require(reply):
            self.net.require(part, reply.body.view(np.float64), least)

        self.ask_part(part, FrameKind.PULL, clock=self.clock_of_pull, take=require)

    @property
    def clock_of_pull(self):
        return self.n_rounds if self.net.mode.name == "sync" else 0


class Net:
    """A run: n_servers servers with 2 copies of each, of which some die.

    Args:
        mode: of the table.
        choices: see ps_simulation.
        is_patient: a server dies only while there are two copies of each.
        moves: clients let partitions move.
        spares: so many of the servers.
        changes_places: clients add and remove servers.
        commands: the chief asks the leader for commands.
        n_servers, n_workers, n_evaluators, n_steps, n_deaths: how many there are.
    """

    replication = 2

    def __init__(
        self, mode, choices, *, n_servers, n_workers, n_steps, n_deaths, is_patient=False,
        n_evaluators=0, moves=False, spares=0, changes_places=False, commands=False,
    ):  # fmt: skip
        self.commands = commands
        self.changes_places, self.n_changed = changes_places, 0
        self.is_patient, self.moves, self.spares = is_patient, moves, spares
        self.n_moved = self.n_resent = 0
        self.mode, self.choices, self.n_deaths = mode, choices, n_deaths
        self.workers = tuple(range(n_workers))
        self.servers = tuple(range(n_workers, n_workers + n_servers))
        self.evaluators = tuple(range(n_workers + n_servers, n_workers + n_servers + n_evaluators))
        self.clients = self.workers + self.evaluators
        self.room = BLOCK // n_workers
        count = BLOCK * N_PARTS
        add = optim.Add()
        self.spec = Spec(
            "w", "dense", "float64", (count,), add.to_json(), mode, BLOCK, 0.0, N_PARTS
        )
        self.channels = defaultdict(deque)
        self.heard = defaultdict(set)
        self.dead = []
        self.may_be_lost = False  # the last copy of a home died
        self.may_differ, self.n_dropped = False, 0  # copies that were given up
        self.acked = defaultdict(Counter)
        self.seen = defaultdict(lambda: np.zeros(BLOCK))  # the most that any worker has read
        self.ranks = {}
        for rank in self.servers:
            self.ranks[rank] = self.new_server(rank)
        for rank in self.clients:
            self.ranks[rank] = self.new_client(rank, n_steps)

    def wire(self, rank):
        return Wire(self, rank)

    def new_server(self, rank):
        return ServerProcess(self, rank)

    def new_client(self, rank, n_steps):
        return Client(self, rank, n_steps)

    @property
    def live(self):
        return {rank: each for rank, each in self.ranks.items() if rank not in self.dead}

    @property
    def homes(self):
        """Those of all servers that live."""
        live = [rank for rank in self.servers if rank not in self.dead]
        return [home for rank in live for home in self.ranks[rank].homes._homes.values()]

    def copies(self):
        """Of each home, how many copies there are in ranks that live, with all it has."""
        return Counter(home.number for home in self.homes if home.is_whole)

    def settle(self):
        """Let all arrive that is under way, and all hear of the dead."""
        while self.deliver_one() or self.tell() or self.look():
            pass

    def look(self):
        """Let servers look, for nothing may come that makes them do so; return True at news."""
        for process in self.live.values():
            process.look()
        return any(self.channels.values())

    @property
    def is_lost(self):
        return any(process.takeovers.lost() for process in self.live.values())

    def run(self):
        while not self.choices.are_over:
            self.act(self.choices.below(16))
        while self.deliver_one() or any(self.client(r).act() for r in self.clients) or self.tell():
            self.look()

    def client(self, rank):
        return self.ranks[rank]

    def act(self, what):
        busy = sorted(pair for pair, channel in self.channels.items() if channel)
        if what < 10 and busy:
            self.deliver(busy[self.choices.below(len(busy))])
        elif what < 14:
            self.client(self.clients[self.choices.below(len(self.clients))]).act()
        elif what == 14:
            self.tell()
        elif self.n_deaths and not (self.is_patient and min(self.copies().values()) < 2):
            self.n_deaths -= 1
            self.kill(self.choices.below(len(self.servers)))

    def kill(self, number):
        rank = self.servers[number]
        if rank in self.dead or len(self.dead) == len(self.servers) - 1:
            return
        self.dead.append(rank)
        self.may_be_lost |= len(self.copies()) < len(self.servers)
        for (source, dest), channel in [*self.channels.items()]:
            if dest == rank:
                channel.clear()
            elif source == rank:  # the end of what it has sent does not leave
                for _ in range(self.choices.below(8) % (len(channel) + 1)):
                    channel.pop()

    def tell(self):
        news = [
            (rank, dead) for dead in self.dead for rank in self.live if dead not in self.heard[rank]
        ]
        if not news:
            return False
        self.hear(*news[self.choices.below(len(news))])
        return True

    def hear(self, rank, dead):
        """Tell a rank of a death, behind what the dead one has sent it."""
        self.deliver_all(dead, rank)
        self.heard[rank].add(dead)
        self.note_death(rank, dead)

    def note_death(self, rank, dead):
        self.ranks[rank].hear(dead)

    def deliver_all(self, source, dest):
        while self.channels[source, dest]:
            self.deliver((source, dest))

    def deliver(self, pair):
        frame = self.channels[pair].popleft()
        if pair[1] in self.dead:
            return
        header = frame.header
        self.n_dropped += (header.kind, header.option) == (FrameKind.RECORD, CopyOption.DROP)
        self.ranks[pair[1]].receive(frame)
        self.ranks[pair[1]].look()

    def deliver_one(self):
        pair = next((pair for pair, channel in self.channels.items() if channel), None)
        if pair is not None:
            self.channels[pair] = self.channels.pop(pair)  # all have their turn
            self.deliver(pair)
        return pair is not None

    def parts_by_rank(self):
        """Return how many partitions the process of each live server answers for."""
        found = Counter({rank: 0 for rank in self.servers if rank not in self.dead})
        for rank in found:
            for home in self.ranks[rank].homes._homes.values():
                if home.is_primary:
                    found[rank] += len(home.server.catalog.contents[1].parts)
        return found

    # --- what must hold
    def least(self, part):
        """Return what a read that begins now must have: what was acknowledged, or read before."""
        share = {"sync": len(self.workers), "first_of": self.mode.bound}.get(self.mode.name, 1)
        acked = np.array([self.acked[part][at] / share for at in range(BLOCK)])
        return np.maximum(acked, self.seen[part])

    def require(self, part, values, least):
        """Fail unless values that were read have that, and nothing twice."""
        for at, value in enumerate(values):
            most = self.issued(part, at)
            if self.mode.name == "sync":
                most /= len(self.workers)
            assert least[at] - 1e-9 <= value <= most + 1e-9, (part, at, value, least[at])
        self.seen[part] = np.maximum(self.seen[part], values)

    def issued(self, part, at):
        worker, place = divmod(at, self.room)
        if worker >= len(self.workers):
            return 0
        n = self.client(worker).n_pushed[part]
        if self.mode.has_rounds:
            return n if place == 0 else 0
        return n // self.room + (place < n % self.room)

    def require_all(self):
        """Fail unless each request was answered, and all copies have the same values."""
        assert self.may_differ or not self.n_dropped, "a copy came to differ"
        if self.is_lost:
            assert self.may_be_lost
            return
        for rank in self.clients:
            assert self.client(rank).has_left, f"rank {rank} waits for {self.client(rank).asked}"
            assert not self.client(rank).asked
        workers = [self.client(rank) for rank in self.workers]
        if any(each.training.ends for each in workers):
            calls = {each.training.n_calls for each in workers if each.step < each.n_steps}
            assert len(calls) <= 1, "workers end at different steps"
        copies, self.n_compared = defaultdict(list), 0
        assert all(self.ranks[r].homes.is_over for r in self.servers if r not in self.dead)
        for home in self.homes:
            copies[home.number].append(home)
        found = Counter()
        for number in range(len(self.servers)):
            (primary,) = (home for home in copies[number] if home.is_primary)
            found.update([*primary.server.catalog.contents[1].parts])
            for part, block in primary.server.catalog.contents[1].parts.items():
                self.n_compared += len(copies[number]) > 1
                self.require(part, block.values, self.least(part))
                total = sum(self.acked[part].values())
                share = {"sync": len(self.workers), "first_of": 0}.get(self.mode.name, 1)
                if share:
                    assert round(block.values.sum() * share) == total
                for other in copies[number]:
                    places = primary.server.catalog.places, other.server.catalog.places
                    assert places[0].vacant == places[1].vacant or not other.is_whole
                    values = other.server.catalog.contents[1].parts[part]
                    assert values.values.tobytes() == block.values.tobytes()
                    assert values.version == block.version
                    assert values.all_last() == block.all_last()
                    assert self.replies_of(other) == self.replies_of(primary)
        assert found == Counter(range(N_PARTS))

    def replies_of(self, home):
        """Return what a copy would answer to requests that come again."""
        replies = home._home_link.answers.replies()
        return sorted(
            (client, sent.header.sequence, sent.header.status) for client, sent in replies
        )


MODES = {"async": Mode("async"), "sync": Mode("sync"), "ssp": SSP(1), "first_of": FirstOf(2)}
