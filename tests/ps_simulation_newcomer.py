"""A fake rank that stood by, and takes the place of a worker that died; see ringcomm.ps.members.

A worker stands still between two steps, and says where the newcomer begins; the newcomer tells all
servers, and gives the place back to all of them if one answers that it is too late.
"""

from ps_simulation_client import Client

from ringcomm.ps.placement.replacement_workers import Beginning, Newcomer
from ringcomm.ps.protocol.frames import FrameKind, Join, Status


class SpareClient(Client):
    """It does nothing until it has a place, then what any worker does."""

    def __init__(self, world, rank, n_ops):
        super().__init__(world, rank, n_ops)
        self.owners, self.orders, self.row_orders = {}, {}, {}  # it opens the tables that are there
        self.stands_by = self.is_blocked = self.has_left = True
        self.place = self.beside = None

    @property
    def is_joining(self):
        return self.beside is not None

    def join(self, place, beside, number):
        """Take a place, as the newcomer of this number, beside a worker that stands still."""
        self.stands_by = self.has_left = False
        self.place, self.beside = place, beside
        beside.is_blocked = True
        self.clock = beside.clock
        self.rounds.update(beside.rounds)
        rounds = {n: beside.rounds[n] for n in self.world.shapes if self.counts(n)}
        newcomer = Newcomer(self.rank, "worker", place, number)
        servers = self.world.members.server_numbers
        said = newcomer, Beginning(self.clock, rounds), beside.rank, servers
        self.ask_servers(FrameKind.JOIN, self.answered, content=said, option=Join.TAKE)

    def counts(self, number):
        return self.world.shapes[number].mode.has_rounds

    def answered(self, replies):
        if any(reply.status == Status.LATE for reply in replies):
            self.ask_servers(FrameKind.JOIN, self.returned, option=Join.RETRACT)
            return
        self.world.filled[self.place] = self.rank
        self.let_go()
        self.is_blocked = False

    def returned(self, _):
        """It has no place, and stands by again."""
        self.world.n_returned += 1
        self.let_go()
        self.stands_by = self.has_left = True

    def let_go(self):
        """Let the worker go on that has stood still."""
        if self.beside is not None and not self.beside.has_left:
            self.beside.is_blocked = False
        self.beside = None

    def die(self):
        self.stands_by = False
        self.let_go()
        super().die()
