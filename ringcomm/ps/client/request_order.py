"""Keeps one rank's requests to one partition in order, also while the partition moves.

Pure: requests, replies and news of moves go in; the requests to send come out.

Requests of one rank to one server arrive in order. When a partition moves, the old server returns
the requests that it has not carried out, perhaps while the rank makes new ones. Nothing is sent to
the new server until everything that was sent to the old one was answered or returned. Then all
leave in the order in which they were made.
"""

from __future__ import annotations

import bisect


class RequestOrder:
    """One rank's requests to one partition, by their ascending sequence numbers.

    Args:
        epoch: number of the view in which the partition came to its server, as far as is known.
    """

    __slots__ = ("_n_old", "_sent", "_waiting", "epoch")

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch
        self._sent: dict[int, int] = {}  # sequence -> epoch
        self._n_old = 0  # of those: with another epoch than the present one
        self._waiting: list[int] = []

    @property
    def is_settled(self) -> bool:
        """True if all requests under way are on their way to the present server."""
        return not self._n_old

    @property
    def is_empty(self) -> bool:
        return not (self._sent or self._waiting)

    def add(self, sequence: int) -> bool:
        """Add a new request; return True if it is to be sent now."""
        if self._n_old:
            self._waiting.append(sequence)
            return False
        self._sent[sequence] = self.epoch
        return True

    def sent_in(self, sequence: int) -> int | None:
        """Return the epoch in which a request under way was sent; None: it waits."""
        return self._sent.get(sequence)

    def answered(self, sequence: int) -> list[int]:
        """Remove a request that was carried out or refused; return those to send now."""
        self._n_old -= self._sent.pop(sequence) != self.epoch
        return self._due()

    def moved(self, epoch: int) -> list[int]:
        """The partition has moved, in the view of this number; return the requests to send now."""
        if epoch > self.epoch:
            self.epoch = epoch
            self._n_old = len(self._sent)
        return self._due()

    def returned(self, sequence: int, epoch: int) -> list[int]:
        """A request was returned, for the partition has moved; return those to send now.

        Raises:
            ValueError: it was sent to the server that owns the partition in that view.
        """
        sent_in = self._sent[sequence]
        if epoch <= sent_in:
            raise ValueError(f"a request of epoch {sent_in} came back with epoch {epoch}")
        self.moved(epoch)
        del self._sent[sequence]
        self._n_old -= 1
        bisect.insort(self._waiting, sequence)
        return self._due()

    def _due(self) -> list[int]:
        if self._n_old or not self._waiting:
            return []
        due, self._waiting = self._waiting, []
        self._sent.update(dict.fromkeys(due, self.epoch))
        return due
