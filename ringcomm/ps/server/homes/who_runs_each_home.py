"""The server that runs each home, as far as one rank knows. Pure.

When a server dies, each server that lives tells all ranks which homes it runs from now on. A home
is lost once all have said so of all the dead, and none of them runs it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ringcomm.ps.roles import Layout


class Takeovers:
    """Decides where homes run.

    Args:
        layout: who is who; this changes its `hosts`.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._dead: set[int] = set()
        self._said: dict[int, set[int]] = {}  # by dead rank: the servers that have spoken

    def died(self, rank: int) -> None:
        self._dead.add(rank)

    def said(self, rank: int, dead: int, homes: Sequence[int]) -> list[int]:
        """A server has said which homes it runs, after a death; return those that are new there.

        What a server said comes late if others have spoken of its death: they may run them by now.
        """
        is_late = rank in self._said
        self._said.setdefault(dead, set()).add(rank)
        if is_late:
            return []
        taken = [home for home in homes if self._layout.rank_of(home) != rank]
        self._layout.hosts.update(dict.fromkeys(taken, rank))
        return taken

    def lost(self) -> list[int]:
        """Return the homes that no server has any more."""
        live = {*self._layout.servers} - self._dead
        homes = self._layout.server_numbers
        orphans = [home for home in homes if self._layout.rank_of(home) in self._dead]
        return orphans if orphans and self._all_spoke(live) else []

    def _all_spoke(self, live: Collection[int]) -> bool:
        return all({*live} <= self._said.get(rank, set()) for rank in self._dead)
