"""Servers without copies, clients and a network, in one thread: servers die, and all recover.

The chief saves at any time. After the death of a server all clients go back to the checkpoint that
was complete last, as ps.recover() does, and make the steps since then again. The servers are real,
up to their wire and their files; what was pushed is counted by table, for each has a new number
after a recovery. See ps_simulation_with_copies.py for the rest.
"""

import json
from collections import Counter, defaultdict
from typing import Any, NamedTuple

import numpy as np
from ps_simulation_with_copies import (
    BLOCK,
    N_PARTS,
    Client,
    Net,
    Process,
    ServerProcess,
    Wire,
    memory,
)

from ringcomm.ps import optim
from ringcomm.ps.moment_numbers import moment_number
from ringcomm.ps.protocol.frame_meta import COMMIT, PushMeta, packed_json
from ringcomm.ps.protocol.frames import FilesOption, FrameKind, Status
from ringcomm.ps.server.server import Server

SAVES_OF = 6  # the chief saves once in so many steps


class Checkpoint(NamedTuple):
    step: int
    states: dict[int, Any]  # by partition


def goes_on(header):
    """Return True for a request that a server which lives answers, although another died."""
    return header.kind == FrameKind.SERVER or (header.kind == FrameKind.TICK and not header.option)


class WireToServers(Wire):
    def open(self, *_):
        """C++ carries out nothing here."""

    def close(self, *_):
        """See open()."""


class LoneServer(Process):
    def __init__(self, net, rank):
        super().__init__(net, rank)
        self.wire = WireToServers(net, rank)
        index = self.layout.number_of(rank)
        self.server = Server(index, self.layout, self.wire, memory, {})
        self.take, self.look = self.server.on_request, self.server.look

    def hear(self, rank):
        self.layout.lose(rank, ())
        self.server.on_death(rank)


class RecoveringClient(Client):
    def __init__(self, net, rank, n_steps):
        self.recovers = self.has_met = False
        self.n_moments, self.moment = 0, None
        super().__init__(net, rank, n_steps)

    @property
    def is_chief(self):
        return self.rank == self.net.workers[0]

    def ask_all(self, kind, meta, on_done, **more):
        """Ask all servers that live; on_done() once all have answered."""
        waiting = {*self.layout.server_numbers}

        def answered(home):
            def take(reply):
                waiting.discard(home)
                if not waiting:
                    on_done()

            return take

        for home in self.layout.server_numbers:
            self.ask(home, kind, meta, take=answered(home), **more)

    # --- a save
    def act(self):
        if self.recovers:
            return self.meet()
        may_save = self.is_chief and self.owners is not None and not self.has_left
        if may_save and self.moment is None and self.is_save_due():
            self.save()
            return True
        return super().act()

    def is_save_due(self):
        return self.net.checkpoint is None or self.net.choices.below(SAVES_OF) == 1

    def save(self):
        """Hold a moment, and keep what the servers have copied; see ps.save()."""
        self.n_moments += 1
        number = self.moment = moment_number(self.rank, self.n_moments)
        floor = {part: Counter(self.net.acked[self.table, part]) for part in range(N_PARTS)}
        step = self.step

        def keep(reply):
            del reply
            self.net.keep(self, number, step, floor)
            self.ask_leader_to("end", over, number=number, is_taken=False)

        def over(_):
            self.moment = None

        self.ask_leader_to("snapshot", keep, number=number, patience_s=0, save_to="saves")

    def ask_leader_to(self, command, take, **more):
        meta = packed_json({"command": command, **more})
        self.ask(self.layout.leader, FrameKind.ASK, meta, take=take)

    # --- a recovery
    def hear(self, rank):
        number = self.layout.number_of(rank)
        had_place = number in self.layout.server_numbers
        self.layout.lose(rank, ())
        if had_place:
            self.lose(number)

    def lose(self, lost):
        """A server is lost."""
        for sequence, (home, header, *_) in [*self.asked.items()]:
            if home == lost or not goes_on(header):
                del self.asked[sequence]  # it raises ServerLostError
        if not self.has_left:
            self.recovers, self.has_met, self.waits, self.moment = True, False, False, None

    def meet(self):
        if self.has_met or any(
            header.kind == FrameKind.TICK for _, header, *_ in self.asked.values()
        ):
            return False
        self.has_met = True
        tables = {"w": [self.table, self.net.spec.to_json()]}
        self.come(self.reopened, "recover", tables=tables, has_checkpoint=True)
        return True

    def come(self, take, command, **more):
        self.ask_leader_to(command, take, servers=self.layout.server_numbers, **more)

    def reopened(self, reply):
        answer = json.loads(reply.body.tobytes() or reply.meta)
        self.layout.know(answer["servers"])
        self.training.restart()
        (table,) = answer["tables"]
        self.know(table)
        self.n_rounds, self.n_pushed = 0, Counter()
        self.n_meetings = 0
        self.restore(self.layout.chief)

    def restore(self, rank):
        """Restore if this is the worker to do so, then meet the others; see ps.recover()."""
        if rank != self.rank:
            self.come(self.go_on, "recovered", said=None)
            return
        self.n_moments += 1
        number = moment_number(self.rank, self.n_moments)

        def pause():  # and nothing moves until it is over
            self.ask_leader_to("pause", lambda _: load(), number=number, patience_s=0)

        def load():
            self.net.prepare(self)
            meta = packed_json({"id": 1, "do": COMMIT, "values_only": False, "is_same_job": True})
            self.ask_all(FrameKind.FILES, meta, release, option=FilesOption.RESTORE)

        def release():
            self.ask_leader_to("end", lambda _: meet(), number=number, is_taken=False)

        def meet():
            said = {"manifest": {"clock": self.net.checkpoint.step}}
            self.come(self.go_on, "recovered", said=said)

        pause()

    def go_on(self, reply):
        answer = json.loads(reply.body.tobytes() or reply.meta)
        if answer["said"] is None:
            self.n_meetings += 1
            assert self.n_meetings < 3, "nobody restores"
            self.restore(answer["restores"])
            return
        self.step = answer["said"]["manifest"]["clock"]
        self.recovers, self.net.is_recovered = False, True
        for home in self.layout.server_numbers:
            self.ask(home, FrameKind.TICK, clock=self.step)
        self.net.n_recovered += 1

    # --- what it pushes
    def push_part(self, part, clock):
        has_rounds = self.net.mode.has_rounds
        at = 0 if has_rounds else self.n_pushed[part] % self.net.room
        at += self.net.room * self.net.workers.index(self.rank)
        self.n_pushed[part] += 1
        place = self.table, part
        self.net.issued[place][at] += 1
        gradient = np.zeros(BLOCK)
        gradient[at] = 1.0
        meta = PushMeta(1.0, 0, BLOCK, "float64", 0, optim.Add().hyper).packed()

        def answered(reply):
            assert reply.header.status == Status.OK
            self.net.acked[place][at] += 1

        self.ask_part(
            part, FrameKind.PUSH, meta, gradient.view(np.uint8), clock=clock, take=answered
        )

    def read(self, part):
        place = self.table, part
        acked = Counter(self.net.acked[place])
        clock = self.n_rounds if self.net.mode.name == "sync" else 0

        def require(reply):
            self.net.require(place, reply.body.view(np.float64), acked)

        self.ask_part(part, FrameKind.PULL, clock=clock, take=require)


class Evaluator(RecoveringClient):
    """Waits for steps, reads, and follows the workers; see ps.evaluator()."""

    is_chief = False

    def created(self, reply):
        super().created(reply)
        self.due = 1
        self.wait_for_step()

    def act(self):
        return self.recovers and self.meet()

    def wait_for_step(self):
        self.ask(
            self.layout.leader, FrameKind.TICK, clock=self.due, option=1, take=self.evaluate
        )  # fmt: skip

    def evaluate(self, reply):
        if reply.header.status != Status.OK:
            self.leave()
            return
        self.due = reply.header.clock + 1
        self.read(self.net.choices.below(N_PARTS))
        self.wait_for_step()

    def meet(self):
        if self.has_met:
            return False
        self.has_met = True
        self.come(self.reopened, "follow", tables=["w"], keeps_place=False)
        return True

    def reopened(self, reply):
        answer = json.loads(reply.body.tobytes() or reply.meta)
        self.recovers = False
        if answer["tables"] is None:
            self.leave()
            return
        self.layout.know(answer["servers"])
        (table,) = answer["tables"]
        self.know(table)
        self.due = answer["said"]["manifest"]["clock"] + 1
        self.net.n_followed += 1
        self.wait_for_step()


class LossyNet(Net):
    """A run: servers without copies, of which some die once there is a checkpoint."""

    replication = 1
    worker, evaluator = RecoveringClient, Evaluator

    def __init__(self, *args, **sizes):
        self.checkpoint = None
        self.issued = defaultdict(Counter)  # by table and partition: pushes, by element
        self.base = {}  # likewise: the values that were restored
        self.n_recovered, self.is_recovered = 0, False  # the latter: of the last death, too
        self.n_followed = 0
        super().__init__(*args, **sizes)
        self.acked = defaultdict(Counter)

    def new_server(self, rank):
        return LoneServer(self, rank)

    def new_client(self, rank, n_steps):
        kind = self.evaluator if rank in self.evaluators else self.worker
        return kind(self, rank, n_steps)

    def server(self, number):
        """Return the server that answers for a number."""
        return self.ranks[self.servers[number]].server

    def servers_of(self, numbers):
        """Return all copies of servers."""
        return [self.server(number) for number in numbers]

    def act(self, what):
        if what >= 13 and self.checkpoint is not None and self.n_deaths:  # more often than there
            what = 15
        super().act(what)

    def kill(self, number):
        if self.checkpoint is None:
            self.n_deaths += not self.choices.are_over  # it is for later
        else:
            self.is_recovered = False
            super().kill(number)

    def copies(self):
        """There is one copy of each server, which dies with it."""
        return Counter(rank for rank in self.servers if rank not in self.dead)

    def deliver_one(self):
        """At the end of a run, deaths that are left come once some clients have left."""
        have_left = [self.client(rank).has_left for rank in self.workers]
        if self.n_deaths and any(have_left) and not all(have_left):
            self.n_deaths -= 1
            self.kill(self.n_deaths % len(self.servers))
        return super().deliver_one()

    def keep(self, client, number, step, floor):
        """Keep what the servers have copied as the newest checkpoint, once each has written it.

        The leader may know of a death of which the client is about to hear.
        """
        if not {*client.layout.server_numbers} <= {*self.live_numbers()}:
            return
        states = {}
        for home in client.layout.server_numbers:
            for item in self.server(home).store._taken.get(number, ()):
                table, part = item.partition
                assert table == client.table
                assert part not in states
                states[part] = item.state
                values = item.state.arrays["values"]
                self.require((table, part), values, floor[part])
        assert [*sorted(states)] == [*range(N_PARTS)]
        self.checkpoint = Checkpoint(step, states)

    def prepare(self, client):
        """Let the servers have read the newest checkpoint."""
        for server in self.servers_of(client.layout.server_numbers):
            parts = server.catalog.contents[client.table].parts
            server.store._prepared[1] = [
                (((client.table, part), values), self.checkpoint.states[part])
                for part, values in parts.items()
            ]
        for part, state in self.checkpoint.states.items():
            self.base[client.table, part] = state.arrays["values"].copy()

    # --- what must hold
    def require(self, place, values, acked):
        """Fail unless what was acknowledged since the checkpoint is there, and nothing twice."""
        base, issued = self.base.get(place, np.zeros(BLOCK)), self.issued[place]
        share = len(self.workers) if self.mode.has_rounds else 1
        for at, value in enumerate(values - base):
            assert acked[at] / share - 1e-9 <= value <= issued[at] + 1e-9, (place, at, value)

    def require_all(self):
        """Fail unless each request was answered, and the values are those of the last recovery."""
        for rank in self.workers:
            client = self.ranks[rank]
            assert client.has_left, f"worker {rank} waits for {client.asked}"
            assert not client.asked
        live = [self.server(number) for number in self.live_numbers()]
        assert all(server.is_over for server in live)
        self.require_values(live)
        self.require_places(live)

    def require_places(self, live):
        """Fail if a spare stands by while others have the parts of those that died."""
        n_with_parts = sum(any(c.parts for c in s.catalog.contents.values()) for s in live)
        places = min(len(self.servers) - self.spares, N_PARTS)
        if self.is_recovered and not self.moves and len(live) >= places:
            assert n_with_parts == places

    def live_numbers(self):
        return [n for n, rank in enumerate(self.servers) if rank not in self.dead]

    def require_values(self, live):
        """Fail unless each partition is there once, with all that was pushed to it."""
        found = {}
        for server in live:
            for number, contents in server.catalog.contents.items():
                for part, block in contents.parts.items():
                    assert (number, part) not in found
                    found[number, part] = block.values
        for place, values in found.items():
            self.require(place, values, self.acked[place])
            base, acked = self.base.get(place, np.zeros(BLOCK)), self.acked[place]
            if self.mode.has_rounds:
                n = max(acked.values(), default=0)
                assert round((values - base).sum(), 6) == n
            else:
                assert (values - base).tolist() == [acked[at] for at in range(BLOCK)]


# --- with copies: a server is lost if both are gone -----------------------------------------------
class Losing(Process):
    """A rank that looks for what is lost, after all that it hears."""

    def hear(self, rank):
        Process.hear(self, rank)
        self.lose_what_is_lost()

    def receive(self, frame):
        super().receive(frame)
        self.lose_what_is_lost()

    def lose_what_is_lost(self):
        for home in self.takeovers.lost():
            if home not in self.layout.lost:
                self.layout.lost.add(home)
                self.lose(home)


class CopiedClient(Losing, RecoveringClient):
    pass


class CopiedEvaluator(Losing, Evaluator):
    pass


class CopiedServer(Losing, ServerProcess):
    def hear(self, rank):
        super().hear(rank)
        self.homes.on_death(rank)

    def lose(self, home):
        self.homes.on_loss(home)


class LossyCopiesNet(LossyNet):
    """A run: servers with copies, of which some die once there is a checkpoint."""

    replication = 2
    worker, evaluator = CopiedClient, CopiedEvaluator
    copies = Net.copies

    def new_server(self, rank):
        return CopiedServer(self, rank)

    def kill(self, number):
        """Every second time the server with the copy dies at once, too."""
        super().kill(number)
        if self.checkpoint is not None and self.choices.below(2):
            super().kill((number + 1) % len(self.servers))

    def server(self, number):
        (primary,) = (h.server for h in self.homes if h.number == number and h.is_primary)
        return primary

    def servers_of(self, numbers):
        return [home.server for home in self.homes if home.number in numbers and home.is_whole]

    def live_numbers(self):
        return sorted({home.number for home in self.homes})
