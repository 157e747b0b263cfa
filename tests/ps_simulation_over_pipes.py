"""The model of servers with copies, over real pipes: C++ carries out what it may.

A rank does all that has come when it is its turn. So a server may die before it has a push, after
it has sent it on, after it has carried it out, and before the acknowledgement is taken.

Workers read blocks in place, in the memory of servers that live or not, as soon as they have been
told where those are. All that happens is in one order, so a read must have what any read before it
has shown.
"""

import numpy as np
from ps_simulation_with_copies import BLOCK, NOTHING, Client, Net, Wire

from ringcomm import _core
from ringcomm.ps.protocol.frame_meta import KNOWN_BLOCK, PLACE
from ringcomm.ps.protocol.frames import FrameHeader, FrameKind, Where, frame_of, packed
from ringcomm.ps.protocol.link import Delivery
from ringcomm.ps.server.homes.home_pushes import make_pushes

ARENA, PIPE = 8 << 20, 1 << 17
INLINE_MAX = 512  # the model's bodies of pushes are smaller, unless they are to be shared
ROUNDS = 5  # of looks by all ranks, in which any push is acknowledged


class PipeWire(Wire):
    """Link of one rank. Every second push has its body in shared memory."""

    def __init__(self, net, rank):
        super().__init__(net, rank)
        memory = net.memories[rank]
        near = [*net.ranks_near(rank)]
        mates = [
            (mate, net.memories[mate], net.pipes[mate, rank], net.pipes[rank, mate])
            for mate in near
        ]  # fmt: skip
        self._endpoint = _core.make_pipe_endpoint(
            rank, memory, PIPE, mates, False, 0, True, INLINE_MAX, INLINE_MAX
        )
        self._bodies = {}

    def send(self, dest, header, meta=b"", body=NOTHING):
        if dest in self.net.heard[self.rank]:
            return
        body = body.reshape(-1).view(np.uint8)
        if header.kind == FrameKind.PUSH and header.sequence % 2:
            memory = self.net.memories[self.rank]
            place = self._bodies.get(header.sequence)
            if place is None:
                place = self._bodies[header.sequence] = _core.take(memory, body.nbytes)
                place[:] = body
            shared = header._replace(
                where=Where.SHARED, place=memory.offset_of(place), n_body=body.nbytes
            )
            self._endpoint.send(dest, packed(shared, meta))
            return
        self._endpoint.send(dest, packed(header._replace(where=0), meta, body.tobytes()))

    def shares_memory(self, rank):
        return True

    def memory(self, nbytes):
        return _core.take(self.net.memories[self.rank], nbytes)

    def place_of(self, x):
        return self.net.memories[self.rank].offset_of(x)

    def view(self, rank, place, nbytes):
        return _core.view(self.net.memories[rank], place, nbytes)

    def enter(self):
        self._endpoint.enter()

    def leave(self):
        self._endpoint.leave()

    def make_pushes(self, home):
        return make_pushes(self._endpoint, home)

    def close(self, partition):
        self._endpoint.close(*partition)

    def poll(self, receive):
        """Hand on what has come; return how many frames that were."""
        self.enter()
        try:
            arrived = self._endpoint.collect()
            acks = self._endpoint.take_acks()
            for sequence, clock in acks:
                header = FrameHeader(FrameKind.REPLY, sequence=sequence, clock=clock)
                receive(Delivery(0, header, b"", NOTHING))
            for source, data in arrived:
                if source in self.net.heard[self.rank]:
                    continue
                frame = frame_of(data)
                body = np.frombuffer(frame.inline, np.uint8)
                if frame.header.where == Where.SHARED:
                    body = self.view(source, frame.header.place, frame.header.n_body)
                receive(Delivery(source, frame.header, frame.meta, body))
        finally:
            self.leave()
        return len(arrived) + len(acks)

    def forget(self, rank):
        self._endpoint.forget(rank)
        self.net.memories[rank].withdraw()


class PipeClient(Client):
    """A worker that reads in place where it may, as DensePulls does.

    Attributes:
        n_in_place: reads that asked nobody.
    """

    def __init__(self, *args):
        self.blocks, self.n_in_place = {}, 0  # by part: epoch, memory of the server and the block
        super().__init__(*args)

    def take(self, reply):
        header = reply.header
        if header.option & KNOWN_BLOCK and header.kind == FrameKind.REPLY:
            memory = self.net.memories[reply.source]
            block = _core.view(memory, *PLACE.unpack(reply.meta))
            self.blocks[header.partition] = header.view, memory, block
        super().take(reply)

    def read(self, part):
        is_idle = not any(
            header.table and header.partition == part for _, header, *_ in self.asked.values()
        )
        epoch, *where = self.blocks.get(part, (None,))
        if is_idle and epoch == self.owners.orders[self.table, part].epoch:
            values = np.empty(BLOCK)
            clock = _core.read_open_block(*where, values.view(np.uint8), 0, self.clock_of_pull)
            if clock >= 0:
                self.n_in_place += 1
                self.net.require(part, values, self.net.least(part))
                return
        super().read(part)


class PipeNet(Net):
    """A run over pipes; see Net."""

    def __init__(self, *args, n_servers, n_workers, **more):
        ranks = range(n_workers + n_servers)
        self.memories = {rank: _core.NodeMemory.create(rank, ARENA) for rank in ranks}
        self.n_workers = n_workers
        self.pipes, self.taken = {}, []
        for rank in ranks:
            for mate in self.ranks_near(rank):
                self.taken.append(_core.take(self.memories[rank], PIPE))
                place = self.memories[rank].offset_of(self.taken[-1])
                _core.clear_pipe(self.memories[rank], place, PIPE)
                self.pipes[mate, rank] = place
        super().__init__(*args, n_servers=n_servers, n_workers=n_workers, **more)

    def ranks_near(self, rank):
        """Servers have pipes to all, also to themselves; workers to servers."""
        return [mate for mate in self.memories if rank >= self.n_workers or mate >= self.n_workers]

    def wire(self, rank):
        return PipeWire(self, rank)

    def new_client(self, rank, n_steps):
        return PipeClient(self, rank, n_steps)

    @property
    def n_in_place(self):
        return sum(self.client(rank).n_in_place for rank in self.workers)

    @property
    def n_without_python(self):
        """Pushes that C++ has carried out, on each copy."""
        return sum(home._pushes.carried_out[0] for home in self.homes)

    def poll(self, rank):
        process = self.ranks[rank]
        n = process.wire.poll(process.receive)
        process.wire.enter()
        process.look()
        process.wire.leave()
        return n

    def act(self, what):
        if what < 10:
            live = sorted(self.live)
            self.poll(live[self.choices.below(len(live))])
        else:
            super().act(what)

    def note_death(self, rank, dead):
        wire = self.ranks[rank].wire
        wire.forget(dead)
        wire.enter()
        super().note_death(rank, dead)
        wire.leave()

    def deliver_all(self, source, dest):
        self.poll(dest)

    def deliver_one(self):
        return sum(self.poll(rank) for _ in range(ROUNDS) for rank in sorted(self.live)) > 0

    def look(self):
        return False
