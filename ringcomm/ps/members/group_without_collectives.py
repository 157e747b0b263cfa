"""The default group of a rank that has taken the place of another."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from ringcomm.engine.core.context import EngineContext
from ringcomm.engine.core.engine import Engine
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.ledger import Ledger
from ringcomm.errors import PeerFailedError
from ringcomm.transport.group_members import Members


class GroupWithoutCollectives(Group):
    """A place in a group that cannot be joined: its collectives have ended with a death.

    It says which rank this is, of how many.

    Args:
        engine: of this rank.
        ranks: of the job, by place; this one among them.
        dead: the rank whose place this one has.
    """

    def __init__(self, engine: Engine, ranks: Sequence[int], dead: int) -> None:
        self.ranks = Members.of(tuple(ranks), engine.job_rank, engine.transport.nodes)
        self.size, self.rank = len(self.ranks), self.ranks.place
        self._engine, self._dead = weakref.ref(engine), dead

    def ledger_for(self, engine: EngineContext) -> Ledger:
        """Raise PeerFailedError: nobody else is in this group any more."""
        del engine
        raise PeerFailedError(
            f"this rank has joined in the place of rank {self._dead}, which died, and with it the "
            "group in which the workers began. ps.live_workers() makes a group of all that live; "
            "leave collectives out of what comes before the first step",
            rank=self._dead,
            reason="died",
        )
