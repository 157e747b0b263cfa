"""The server of each partition, as far as this rank knows, and the order of its requests to it.

Pure: see ringcomm.ps.client.request_order.
"""

from __future__ import annotations

from collections.abc import Mapping

from ringcomm.ps.client.request_order import RequestOrder
from ringcomm.ps.placement.partition_places_and_moves import Partition, View
from ringcomm.ps.protocol.frame_meta import owners_of


class PartitionOwners:
    """The view of this rank, and the order of its requests to each partition.

    Attributes:
        view: the owners of partitions.
        orders: of this rank's requests, by partition.
        notices: moves that servers have announced, by partition and epoch, to be confirmed.
        confirmed: the last move that was, by partition; of a hash table by 0.
    """

    def __init__(self) -> None:
        self.view = View()
        self.orders: dict[Partition, RequestOrder] = {}
        self.notices: list[tuple[Partition, int]] = []
        self.confirmed: dict[Partition, int] = {}

    def add_table(self, number: int, owners: list[int], epochs: Mapping[int, int]) -> None:
        """Learn the owners of a table's partitions.

        Args:
            number: of the table.
            owners: by partition.
            epochs: of partitions that have moved.
        """
        changes = {}
        for part, owner in enumerate(owners):
            partition, epoch = (number, part), epochs.get(part, 0)
            order = self.orders.get(partition)
            if order is None:
                self.orders[partition] = RequestOrder(epoch)
            elif epoch <= order.epoch:
                continue
            else:  # the server before returns what was sent to it
                order.moved(epoch)
            changes[partition] = (owner,)
        self.view = self.view.with_(changes)

    def forget_table(self, number: int) -> None:
        """Know a table no more, to which no request is under way."""
        for partition in [each for each in self.orders if each[0] == number]:
            del self.orders[partition]
        for partition in [each for each in self.confirmed if each[0] == number]:
            del self.confirmed[partition]
        chains = {part: chain for part, chain in self.view.chains.items() if part[0] != number}
        self.view = View(self.view.number + 1, chains)

    def note_move(self, partition: Partition, meta: bytes, epoch: int) -> list[int]:
        """A server has announced a move, to be confirmed; return the requests to send now."""
        self.notices.append((partition, epoch))
        if partition not in self.orders:
            return []
        return self.orders[partition].moved(self._learn(partition, meta))

    def returned(self, partition: Partition, sequence: int, meta: bytes) -> list[int]:
        """A server has returned a request; return the requests to send now."""
        return self.orders[partition].returned(sequence, self._learn(partition, meta))

    def _learn(self, partition: Partition, meta: bytes) -> int:
        epoch, owners = owners_of(meta)
        if epoch > self.orders[partition].epoch:
            self.view = self.view.with_({partition: (int(owners[0]),)})
        return epoch

    def take_confirmed(self) -> list[tuple[Partition, int]]:
        """Return the moves, by partition and epoch, of which the server before awaits no more."""
        waiting: list[tuple[Partition, int]] = []
        confirmed: list[tuple[Partition, int]] = []
        for partition, epoch in self.notices:
            order = self.orders.get(partition)
            is_settled = order is None or order.is_settled
            (confirmed if is_settled else waiting).append((partition, epoch))
        self.notices = waiting
        return confirmed

    def lose(self) -> None:
        """Know of no request: all have failed, for a server died."""
        self.notices.clear()
        self.confirmed.clear()
        for partition, order in self.orders.items():
            self.orders[partition] = RequestOrder(order.epoch)

    @property
    def is_settled(self) -> bool:
        return all(order.is_settled for order in self.orders.values())
