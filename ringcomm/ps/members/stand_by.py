"""A rank that stands by: it waits for a place, and takes it. See ringcomm.ps.members.let_in."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from ringcomm.engine.core.context import EngineContext
from ringcomm.engine.core.engine import Engine
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.ledger import Ledger
from ringcomm.errors import CommTimeoutError, PeerFailedError, ServerLostError
from ringcomm.ps.checkpoint.recover import follow
from ringcomm.ps.client.json_requests import ask_servers, ignore, json_of
from ringcomm.ps.client.request import Request
from ringcomm.ps.members.let_in import send
from ringcomm.ps.placement.replacement_workers import Beginning, Newcomer
from ringcomm.ps.protocol.frame_meta import packed_json
from ringcomm.ps.protocol.frames import Coming, FrameKind, Join, Status
from ringcomm.ps.server.replies import as_body
from ringcomm.transport.group_members import Members

if TYPE_CHECKING:
    from collections.abc import Callable

    from ringcomm.ps.protocol.link import Delivery
    from ringcomm.ps.session import Session


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
        CommTimeoutError: servers or workers that are to know of its place do not answer.
    """
    spare = _Spare(current)
    while True:
        try:
            given = spare.await_place(evaluates=evaluates)
            if given is None:
                return False
            is_over = spare.take(given)
            if is_over is not None:
                return not is_over
        except ServerLostError:  # the workers go back to a checkpoint
            if follow(current) is None:
                _say_gone(current)
                return False


def _say_gone(current: Session) -> None:
    """Let the servers know, of which the leader alone has said that nobody recovers; see follow().

    Those that wait for nobody have ended, so no reply is awaited.
    """
    client = current.client
    ask_servers(client, _LABEL, FrameKind.LEAVE, client.servers, ignore)


class _Spare:
    """This rank, until it has a place."""

    def __init__(self, current: Session) -> None:
        self._current = current
        self._here: Delivery | None = None
        self._seen: set[int] = set()
        self._others = current.dispatcher.takes[FrameKind.NEWCOMER]
        current.dispatcher.takes[FrameKind.NEWCOMER] = self._hear

    def _hear(self, frame: Delivery) -> None:
        if frame.header.option == Coming.HERE:
            self._here = frame
        elif frame.header.option == Coming.SEEN:
            self._seen.add(frame.source)
        else:
            self._others(frame)

    def await_place(self, *, evaluates: bool) -> Newcomer | None:
        """Return a place once there is one; None: there will be none."""
        leader = [self._current.client.leader]
        (given,) = self._ask(Join.WAIT, leader, {"evaluates": evaluates}, math.inf)
        if given is None:
            return None
        for each in given["taken"]:
            self._current.layout.join(Newcomer(*each))
        return Newcomer(*given["place"])

    def take(self, newcomer: Newcomer) -> bool | None:
        """Take a place; return True if training ends instead, None if it is to be asked for anew.

        Raises:
            ServerLostError: all begin anew.
        """
        current, begins, beside = self._current, None, -1
        if newcomer.role == "worker":
            found = self._beginning()
            if found is None:
                return True
            begins, beside = found
        said = {
            "place": newcomer, "begins": begins and begins.to_json(), "beside": beside,
            "servers": current.client.servers,
        }  # fmt: skip
        if None in self._ask(Join.TAKE, current.client.servers, said):
            self._ask(Join.RETRACT, current.client.servers, {})
            return None
        current.layout.join(newcomer)
        ranks = current.layout.workers if begins else current.layout.evaluators
        current.group = GroupWithoutCollectives(current.engine, ranks, newcomer.place)
        if begins is not None:
            current.clock, current.begins = begins.clock, begins.rounds
        elif current.training.ends:
            current.training.end_at(0)  # it knows when workers end
        if current.engine.page is not None:
            current.engine.page.set_role(newcomer.role)
        self._tell(newcomer)
        return False

    def _beginning(self) -> tuple[Beginning, int] | None:
        """Return where to begin, and the worker that stands still meanwhile; -1: none lives.

        None: the workers have left, and training is over.
        """
        current, peers = self._current, self._current.engine.watch.peers
        while True:
            live = [rank for rank in current.layout.workers if rank not in peers.gone]
            if not live:
                return self._where_all_were()
            asked = current.layout.chief if current.layout.chief in live else live[0]
            self._here = None
            send(current, asked, Coming.ASK)

            def is_over(asked: int = asked) -> bool:
                return asked in peers.gone or self._said_by(asked) is not None

            self._drive(is_over, math.inf)  # a step may take hours
            said = self._said_by(asked)
            if said is not None:
                current.training.begin_at(said["calls"])
                return Beginning.of_json(said["begins"]), asked

    def _said_by(self, rank: int) -> Any:
        here = self._here
        return json.loads(here.meta) if here is not None and here.source == rank else None

    def _where_all_were(self) -> tuple[Beginning, int] | None:
        answers = self._ask(Join.ALONE, self._current.client.servers, {})
        if None in answers:
            return None
        begins = [Beginning.of_json(each["begins"]) for each in answers]
        tables = {table for each in begins for table in each.rounds}
        rounds = {table: max(each.rounds.get(table, 0) for each in begins) for table in tables}
        return Beginning(max(each.clock for each in begins), rounds), -1

    def _tell(self, newcomer: Newcomer) -> None:
        """Tell all ranks, and return once all workers that live know.

        Raises:
            CommTimeoutError: some do not answer within ps.init(deadline_s=). They may not know who
                is in a group with this rank, or with which step training ends.
        """
        current, peers = self._current, self._current.engine.watch.peers
        layout, me = current.layout, current.engine.job_rank
        for rank in sorted(layout.ranks - {me}):
            if rank not in peers.gone:
                send(current, rank, Coming.IN, packed_json(newcomer))
        workers, limit_s = {*layout.workers} - {me}, current.client.deadline_s

        def missing() -> set[int]:
            return workers - self._seen - {*peers.gone}

        if not self._drive(lambda: not missing(), limit_s, may_lose=True) and (late := missing()):
            names = ", ".join(map(current.engine.transport.label, sorted(late)))
            raise CommTimeoutError(
                f"{_LABEL}: this rank is {newcomer.role} {layout.place_of(me)} now, but {names} "
                f"did not answer within {limit_s:g} s that this is known there: it hangs, or is "
                "stopped. If it is only slow, raise the limit with ps.init(deadline_s=)",
                missing=sorted(late),
            )

    # --- waiting --------------------------------------------------------------------------------
    def _drive(
        self, is_over: Callable[[], bool], limit_s: float, *, may_lose: bool = False
    ) -> bool:
        """Return True once it is over, or a server was lost; False if that takes longer.

        Raises:
            ServerLostError: unless may_lose.
        """
        client = self._current.client
        has_ended = client.drive_until(
            lambda: is_over() or client.loss is not None, _LABEL, limit_s
        )
        loss = client.loss
        if loss is not None and not may_lose:
            raise loss.error(_LABEL)
        return has_ended

    def _ask(
        self, option: Join, servers: Sequence[int], said: Any, limit_s: float | None = None
    ) -> list[Any]:
        """Return the answers of servers, None for each that is late; limit_s: see Future.wait()."""

        def read(reply: Delivery) -> Any:
            if reply.header.status == Status.LATE:
                return None
            return json_of(reply) if reply.meta or reply.body.nbytes else {}

        body = as_body(said)
        requests = [
            Request(FrameKind.JOIN, server=server, option=option, body=body) for server in servers
        ]
        return self._current.client.gather(_LABEL, requests, read).wait(limit_s)
