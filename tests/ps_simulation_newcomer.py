"""A fake rank that stands by, and takes the place of a worker that died."""

from ps_simulation_client import Client

from ringcomm.ps.control.commands import BEGIN
from ringcomm.ps.placement.replacement_workers import Beginning


class SpareClient(Client):
    """It does nothing until it has a place, then what any worker does."""

    def __init__(self, world, rank, n_ops):
        super().__init__(world, rank, n_ops)
        self.owners, self.orders, self.row_orders = {}, {}, {}  # it opens the tables that are there
        self.stands_by = self.is_blocked = self.has_left = True
        self.orders_taken.handlers[BEGIN] = self.begin_to_train
        self.ask_leader(self.answered, "stand by", evaluates=False)

    def begin_to_train(self, told):
        begins = Beginning.of_json(told["begins"])
        self.clock = begins.clock
        self.rounds.update(begins.rounds)
        self.stands_by = self.has_left = False
        self.world.n_joined += 1

    def answered(self, replies):
        """All workers know that it has a place; or there will be none."""
        self.is_blocked = replies[0].content is None
        self.stands_by = False
        assert self.is_blocked == self.has_left

    def die(self):
        super().die()
        self.stands_by = False
