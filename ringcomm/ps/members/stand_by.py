"""A rank that stands by: it waits for a place, and takes it.

See ringcomm.ps.control.commands.StandBy.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ringcomm.engine.control.missed_commands import take_missed
from ringcomm.engine.core.context import EngineContext
from ringcomm.engine.core.engine import Engine
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.ledger import Ledger
from ringcomm.errors import PeerFailedError, ServerLostError
from ringcomm.ps.checkpoint.recover import count_from, follow
from ringcomm.ps.client.json_requests import ask_leader, ask_servers, ignore
from ringcomm.ps.control.commands import BEGIN
from ringcomm.ps.placement.replacement_workers import Beginning, Newcomer
from ringcomm.ps.protocol.frames import FrameKind, ServerOption
from ringcomm.transport.group_members import Members

if TYPE_CHECKING:
    from ringcomm.ps.session import Session


_log: Final = logging.getLogger("ringcomm")


# --- a group without collectives ------------------------------------------------------------------
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


_LABEL: Final = "ps.init"


def stand_by(current: Session, *, evaluates: bool) -> bool:
    """Return True once this rank has the place of another; False if no place is given any more.

    Args:
        current: of this rank.
        evaluates: it can be an evaluator, too.

    Raises:
        PeerFailedError: a rank died without which the job does not go on.
        CommTimeoutError: it has its place, but workers do not answer that they know it.
    """
    current.orders.handlers[BEGIN] = partial(_begin, current)
    while not current.is_newcomer:
        try:
            if not _await_place(current, evaluates=evaluates):
                return False
        except ServerLostError:  # the workers go back to a checkpoint
            manifest, has_place = follow(current), current.engine.job_rank in current.layout.joined
            if manifest is None and has_place:
                raise  # nobody is left but this rank
            if manifest is None:
                _say_gone(current)
                return False
            if has_place and not current.is_evaluator:
                count_from(current, manifest)
    return True


def _await_place(current: Session, *, evaluates: bool) -> bool:
    client = current.client
    place = ask_leader(client, _LABEL, "stand by", needs_tables=True, evaluates=evaluates)
    client.drive_until(lambda: place.done() or current.is_newcomer, _LABEL, math.inf)
    return place.wait() is not None


def _say_gone(current: Session) -> None:
    """Let the servers know, of which the leader alone has said that nobody recovers; see follow().

    Those that wait for nobody have ended, so no reply is awaited.
    """
    client = current.client
    ask_servers(
        client, _LABEL, FrameKind.SERVER, client.servers, ignore, option=ServerOption.LEAVE
    )  # fmt: skip


def _begin(current: Session, told: dict[str, Any]) -> None:
    """Have a place, and be where the chief is; called in the loop."""
    layout, me = current.layout, current.engine.job_rank
    for each in told["taken"]:
        layout.join(Newcomer(*each))
    newcomer = layout.newcomer(me)
    ranks = layout.workers if newcomer.role == "worker" else layout.evaluators
    current.group = GroupWithoutCollectives(current.engine, ranks, newcomer.place)
    if told["begins"] is not None:
        begins = Beginning.of_json(told["begins"])
        current.clock, current.begins = begins.clock, begins.rounds
        current.engine.control.catch_up(begins.boundaries)
        current.engine.control.go_on_from(begins.steps)
        if why := take_missed(begins.commands):
            _log.warning(
                "ps: the other workers have changed a parameter by a command: %s. Make rc.Params() "
                "before ps.init(), so that a rank that comes later has what they have",
                why,
            )
        current.training.begin_at(told["calls"])
    elif current.training.ends:
        current.training.end_at(0)  # it knows when workers end
    if current.engine.page is not None:
        current.engine.page.set_role(newcomer.role)
