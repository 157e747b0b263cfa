"""Tells the parts of a rank which ranks of the job have died, once each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping


class Deaths:
    """The deaths that a job survives, as one rank hears of them. In the thread that drives.

    Args:
        dead: the ranks that died, and how; it grows.
        survivable: the ranks without which the job goes on.

    Attributes:
        listeners: called with the rank that died, and how, in this order.
    """

    def __init__(self, dead: Mapping[int, str], survivable: Collection[int]) -> None:
        self._dead, self._survivable = dead, survivable
        self._n_seen = 0
        self._known: set[int] = set()
        self.listeners: list[Callable[[int, str], object]] = []

    def look(self) -> None:
        """Tell the listeners of the deaths since the last look."""
        if len(self._dead) == self._n_seen:
            return
        self._n_seen = len(self._dead)
        for rank, how in {**self._dead}.items():
            if rank in self._survivable and rank not in self._known:
                self._known.add(rank)
                for listen in self.listeners:
                    listen(rank, how)
