"""The order of one rank's requests to one partition, also while the partition changes its server.

Decisions only: events in, what is to be sent out.

Requests of one rank to one server arrive in order. When a partition moves, those that the old
server has not carried out come back, perhaps while later ones are being made. Nothing is sent to
the new server before everything that was sent to the old one has been answered, went along with
the partition, or has come back; then it leaves in the order in which it was made.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable


class Lane:
    """One rank's requests to one partition, by their ascending sequence numbers.

    Args:
        epoch: number of the view in which the partition came to its server, as far as is known.
    """

    __slots__ = ("_held", "_n_old", "_sent", "epoch")

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch
        self._sent: dict[int, int] = {}  # sequence -> epoch
        self._n_old = 0  # of those: with another epoch than the present one
        self._held: list[int] = []

    @property
    def is_settled(self) -> bool:
        """True if all that is under way is on its way to the present server."""
        return not self._n_old

    @property
    def is_empty(self) -> bool:
        """True if nothing is under way."""
        return not (self._sent or self._held)

    def ask(self, sequence: int) -> bool:
        """Take note of a new request; return True if it is to be sent now."""
        if self._n_old:
            self._held.append(sequence)
            return False
        self._sent[sequence] = self.epoch
        return True

    def answered(self, sequence: int) -> list[int]:
        """A request has been carried out, or refused; return those that are to be sent now."""
        self._n_old -= self._sent.pop(sequence) != self.epoch
        return self._due()

    def moved(self, epoch: int, along: Iterable[int]) -> list[int]:
        """The partition has moved; return the requests that are to be sent now.

        Args:
            epoch: number of the view in which it did.
            along: requests that went with it; they will be answered by the new server.
        """
        self._learn(epoch)
        for sequence in along:
            if self._sent.get(sequence, epoch) < epoch:
                self._sent[sequence] = epoch
                self._n_old -= epoch == self.epoch
        return self._due()

    def came_back(self, sequence: int, epoch: int) -> list[int]:
        """A request was not carried out, for the partition has moved; return what to send now.

        Raises:
            ValueError: it was sent to the server that owns the partition in that view.
        """
        sent_in = self._sent[sequence]
        if epoch <= sent_in:
            raise ValueError(f"a request of epoch {sent_in} came back with epoch {epoch}")
        self._learn(epoch)
        del self._sent[sequence]
        self._n_old -= 1
        bisect.insort(self._held, sequence)
        return self._due()

    def _learn(self, epoch: int) -> None:
        if epoch > self.epoch:
            self.epoch = epoch
            self._n_old = len(self._sent)

    def _due(self) -> list[int]:
        if self._n_old or not self._held:
            return []
        due, self._held = self._held, []
        self._sent.update(dict.fromkeys(due, self.epoch))
        return due
