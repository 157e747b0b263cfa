"""Tells the parts of a rank which ranks of the job have died, once each; and what is lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from ringcomm.errors import ServerLostError

_SHOWN: Final = 8  # tables in an error


class Peers(Protocol):
    """The other ranks, as one rank knows them."""

    @property
    def dead(self) -> Mapping[int, str]:
        """The ranks that died, and how; it grows."""

    @property
    def survivable(self) -> frozenset[int]:
        """The ranks without which the job goes on."""


class Deaths:
    """The deaths that a job survives, as one rank hears of them. In the thread that drives.

    Args:
        peers: the other ranks.

    Attributes:
        listeners: called with the rank that died, and how, in this order.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._n_seen = 0
        self._known: set[int] = set()
        self.listeners: list[Callable[[int, str], object]] = []

    def look(self) -> None:
        """Tell the listeners of the deaths since the last look."""
        dead = self._peers.dead
        if len(dead) == self._n_seen:
            return
        self._n_seen = len(dead)
        for rank, how in {**dead}.items():
            if rank in self._peers.survivable and rank not in self._known:
                self._known.add(rank)
                for listen in self.listeners:
                    listen(rank, how)


@dataclass(frozen=True)
class Loss:
    """A server that died, and what it had alone.

    Attributes:
        server: its number.
        rank: in the job.
        name: of that rank.
        how: it died.
        tables: of which it had a part.
        copies: so many there were of what it had; the other one is lost, too.
    """

    server: int
    rank: int
    name: str
    how: str
    tables: tuple[str, ...]
    copies: int = 1

    def error(self, label: str) -> ServerLostError:
        """Return the error of a call that cannot go on."""
        shown = ", ".join(self.tables[:_SHOWN]) + ", ..." * (len(self.tables) > _SHOWN)
        what = f"its part of {shown}" if self.tables else "what it had of the tables"
        lost = "is lost, with its copy" if self.copies > 1 else "is lost"
        then = (
            "call ps.recover(path) on every worker, which goes back to the newest checkpoint, or "
            "end this job"
        )
        return ServerLostError(
            f"{label}: server {self.server} ({self.name}) {self.how}, and {what} {lost}. The "
            f"other servers go on, but calls for tables do not: {then}",
            rank=self.rank,
            reason=self.how,
        )
