"""Tells the parts of a rank which ranks of the job have died, once each."""

from __future__ import annotations

from collections.abc import Callable

from ringcomm.transport.peer_state import PeerTable


class Deaths:
    """The deaths that a job survives, as one rank hears of them. In the thread that drives.

    Args:
        peers: the other ranks.

    Attributes:
        listeners: called with the rank that died, and how, in this order.
    """

    def __init__(self, peers: PeerTable) -> None:
        self._peers = peers
        self._n_seen = 0
        self._known: set[int] = set()
        self.listeners: list[Callable[[int, str], object]] = []

    def look(self) -> None:
        """Tell the listeners of the deaths since the last look."""
        dead = self._peers.dead
        if len(dead) == self._n_seen or self._peers.is_fatal:
            return
        self._n_seen = len(dead)
        for rank, how in {**dead}.items():
            if rank in self._peers.survivable and rank not in self._known:
                self._known.add(rank)
                for listen in self.listeners:
                    listen(rank, how)
