"""Rows that move from server to server while everybody works; the servers' side.

Some partitions of a hash table move together, in one view of the table. The leader carries it out:

    leader -> all      FREEZE: requests for the table are kept from now on
    all    -> leader   how many rounds are over, and what clocks are known
    leader -> all      DRAIN, if they differ: rounds that are over somewhere end everywhere. All
    all    -> leader   contributions to them are on their way, so nobody has to do anything for it
    leader -> sources  GIVE: which partitions go where
    source -> dest     TAKE: a partition: rows, slots, candidates, whose pushes are in it
    dest   -> source   TAKEN
    source -> leader   GIVEN
    leader -> all      COMMIT: who owns what. What was kept, what waits, and contributions to rounds
    all    -> leader   that are not over come back to who made them: WRONG_VIEW
    leader -> clients  ROWS_NOTICE: so that those hear of it who have asked nothing
    client -> all      NOTED, behind all that it has sent again: its clock may be believed

So a view begins between two rounds, on all servers at the same one, and a contribution is either
part of a round in the view it was made in, on all of them, or is split anew. If nothing can move,
THAW: what was kept is carried out as if nothing had been.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ringcomm.ps.frames import Header, Kind, Status, Step
from ringcomm.ps.messages import ASSIGN, PushMeta, packed_json
from ringcomm.ps.row_calls import packed_owners
from ringcomm.ps.row_states import RowsPartition
from ringcomm.ps.state import State

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.hashed import Shard
    from ringcomm.ps.link import Delivery
    from ringcomm.ps.opening import Table
    from ringcomm.ps.placement import Move
    from ringcomm.ps.serving import Server

_MOVE: Final = 0  # in whose name rounds stop; snapshots have higher numbers
_FAIR_S: Final = 0.5  # a client that computes for so long is not waited for
ROWS_AT_ONCE: Final = 64  # partitions: the table stands still until they are there
_NOTHING: Final = np.empty(0, np.uint8)


@dataclass
class _Migration:
    """Moves of partitions of one table, as the leader carries them out.

    Attributes:
        told: what each server has answered to the last request.
        n_awaited: servers that have not.
    """

    table: Table
    moves: list[Move]
    epoch: int
    done: Callable[[int, list[str]], None]
    told: dict[int, dict[str, Any]] = field(default_factory=dict)
    n_awaited: int = 0
    clocks: dict[int, int] = field(default_factory=dict)
    moved: list[tuple[int, int]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass
class _Frozen:
    """A table that stands still, on one server.

    Attributes:
        kept: requests, in the order in which they came.
        until: rounds that may end; None: nothing is carried out.
        origins: who has a request that is kept.
    """

    kept: list[Delivery] = field(default_factory=list)
    until: int | None = None
    origins: set[int] = field(default_factory=set)


@dataclass
class _Giving:
    """Partitions on their way from here."""

    bodies: dict[int, Bytes]  # by partition; until they are taken
    dests: dict[int, int]
    moved: list[tuple[int, int]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class RowMover:
    """What one server does when rows move.

    Args:
        server: whose they are.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._migration: _Migration | None = None
        self._frozen: dict[int, _Frozen] = {}
        self._thawing: set[int] = set()
        self._giving: dict[int, _Giving] = {}
        self._unheard: dict[
            int, set[int]
        ] = {}  # by table: clients that may send again what came back
        self._postponed: list[tuple[float, Table, Delivery]] = []  # until when, at the latest
        self._steps: dict[str, Callable[[Table, dict[str, Any], Delivery], None]] = {
            "freeze": self._freeze,
            "drain": self._drain,
            "give": self._give,
            "take": self._take,
            "taken": self._taken,
            "commit": self._commit,
            "thaw": self._thaw,
        }

    @property
    def is_busy(self) -> bool:
        """True while a table stands still here."""
        return bool(self._frozen)

    def on_step(self, request: Delivery) -> None:
        """Do what a frame of Step.ROWS says."""
        said = json.loads(request.meta)
        if said["do"] == "told":
            self._on_told(request.source, said)
        else:
            self._steps[said["do"]](self._server.tables[said["table"]], said, request)

    # --- requests -------------------------------------------------------------------------------
    def keeps(self, request: Delivery, shard: Shard) -> bool:
        """Return True if a request is for a table that stands still; it is looked at later."""
        frozen = self._frozen.get(request.header.table)
        if frozen is None or self._may_go(frozen, request, shard):
            return False
        frozen.kept.append(request)
        frozen.origins.add(request.header.origin)
        return True

    def _may_go(self, frozen: _Frozen, request: Delivery, shard: Shard) -> bool:
        header = request.header
        if frozen.until is None or header.origin in frozen.origins:
            return False
        if header.kind != Kind.PUSH or PushMeta.of(request.meta).flags & ASSIGN:
            return True
        return shard.rounds is None or header.clock < frozen.until

    def stands_still(self, table: int) -> bool:
        """Return True if pushes to a table may be kept that came before what is known else."""
        return table in self._frozen or table in self._thawing

    # --- the leader -----------------------------------------------------------------------------
    def start(
        self, table: Table, moves: list[Move], epoch: int, done: Callable[[int, list[str]], None]
    ) -> None:
        """Move partitions of a table; done(how many moved, problems)."""
        self._migration = _Migration(table, moves, epoch, done)
        self._ask("freeze")

    def _ask(self, what: str, servers: Mapping[int, dict[str, Any]] | None = None) -> None:
        migration = self._migration
        assert migration is not None
        if servers is None:
            servers = {server: {} for server in range(self._server.n_servers)}
        migration.told.clear()
        migration.n_awaited = len(servers)
        for server, more in servers.items():
            said = {"do": what, "table": migration.table.number, **more}
            self._send(self._server.rank_of(server), said)

    def _on_told(self, rank: int, said: dict[str, Any]) -> None:
        migration = self._migration
        assert migration is not None
        migration.told[rank] = said
        if len(migration.told) == migration.n_awaited:
            {
                "freeze": self._frozen_all,
                "drain": self._ask_to_give,
                "give": self._given,
                "commit": self._committed,
                "thaw": self._end,
            }[said["of"]](migration, list(migration.told.values()))

    def _frozen_all(self, migration: _Migration, told: list[dict[str, Any]]) -> None:
        for each in told:
            for worker, clock in each["clocks"]:
                migration.clocks[worker] = min(clock, migration.clocks.get(worker, clock))
        gone = sorted({w for each in told for w in each["pending"]} & self._server.left)
        rounds = [each["rounds"] for each in told]
        if gone:  # nobody could send it again
            migration.problems.append(
                f"hash table {migration.table.spec.name}: worker {gone[0]} has left, and its part "
                "of a round waits for the others. Try again after the round"
            )
            self._ask("thaw")
        elif min(rounds) < max(rounds):
            everyone = range(self._server.n_servers)
            self._ask("drain", {server: {"until": max(rounds)} for server in everyone})
        else:
            self._ask_to_give(migration, told)

    def _ask_to_give(self, migration: _Migration, _: list[dict[str, Any]]) -> None:
        by_source: dict[int, list[tuple[int, int]]] = {}
        for move in migration.moves:
            owner = migration.table.owners[move.partition[1]]
            by_source.setdefault(owner, []).append((move.partition[1], move.dest))
        self._ask("give", {source: {"moves": moves} for source, moves in by_source.items()})

    def _given(self, migration: _Migration, told: list[dict[str, Any]]) -> None:
        for each in told:
            migration.moved += [(part, dest) for part, dest in each["moved"]]
            migration.problems += each["problems"]
        if not migration.moved:
            self._ask("thaw")
            return
        said = {
            "epoch": migration.epoch,
            "moved": migration.moved,
            "clocks": list(migration.clocks.items()),
        }
        self._ask("commit", dict.fromkeys(range(self._server.n_servers), said))

    def _committed(self, migration: _Migration, told: list[dict[str, Any]]) -> None:
        table = migration.table
        header = Header(
            Kind.MOVE, option=Step.ROWS_NOTICE, table=table.number, clock=migration.epoch
        )
        meta = packed_owners(migration.epoch, table.owners)
        for rank in self._server.clients():
            self._server.send(rank, header, meta)
        self._end(migration, told)

    def _end(self, migration: _Migration, _: list[dict[str, Any]]) -> None:
        self._migration = None
        migration.done(len(migration.moved), migration.problems)

    # --- every server ---------------------------------------------------------------------------
    def _freeze(self, table: Table, _: dict[str, Any], request: Delivery) -> None:
        """Let a table stand still, once what came back from the last move had its chance.

        Else a request could come back for as long as rows move.
        """
        self._postponed.append((time.monotonic() + _FAIR_S, table, request))
        self.look_at_postponed()

    def noted(self, table: int, epoch: int, rank: int) -> None:
        """A client has sent again all that came back from the move of this epoch."""
        if self._server.tables[table].epochs.get(0, 0) == epoch:
            self._unheard.get(table, set()).discard(rank)
            self.look_at_postponed()

    def leave(self, rank: int) -> None:
        """Wait for nothing of a client that has left."""
        for unheard in self._unheard.values():
            unheard.discard(rank)
        self.look_at_postponed()

    def look_at_postponed(self) -> None:
        """Let tables stand still that now may; from time to time."""
        if not self._postponed:
            return
        now, postponed, self._postponed = time.monotonic(), self._postponed, []
        for limit, table, request in postponed:
            if self._unheard.get(table.number) and now < limit:
                self._postponed.append((limit, table, request))
            else:
                self._let_stand_still(table, request)

    def _let_stand_still(self, table: Table, request: Delivery) -> None:
        shard = table.shard
        assert shard is not None
        self._frozen[table.number] = _Frozen()
        if shard.rounds is not None:
            shard.rounds.limit(_MOVE, 0)
        pending = [] if shard.rounds is None else [w for _, w, _ in shard.rounds.pending()]
        self._tell(request, "freeze", {
            "rounds": 0 if shard.rounds is None else shard.rounds.current,
            "pending": pending,
            "clocks": list(self._server.clocks_of((table.number, 0)).items()),
        })  # fmt: skip

    def _drain(self, table: Table, said: dict[str, Any], request: Delivery) -> None:
        shard, frozen = table.shard, self._frozen[table.number]
        assert shard is not None
        frozen.until = said["until"]
        if shard.rounds is not None:
            shard.rounds.limit(_MOVE, said["until"])
        if shard.version == said["until"]:
            self._drained(frozen, request)
            return
        shard.at_version(said["until"], lambda: self._drained(frozen, request))
        kept, frozen.kept = frozen.kept, []
        frozen.origins.clear()
        for each in kept:
            self._server.on_request(each)
        shard.advance()

    def _drained(self, frozen: _Frozen, request: Delivery) -> None:
        frozen.until = None
        self._tell(request, "drain", {})

    def _commit(self, table: Table, said: dict[str, Any], request: Delivery) -> None:
        self._server.note_owners(table, said["epoch"], said["moved"])
        self._server.mover.fence((table.number, 0), said["clocks"])
        shard = table.shard
        assert shard is not None
        back = shard.give_back()
        self._unheard[table.number] = set(self._server.clients())
        for each in [*back, *self._server.waiters.take((table.number, 0))]:
            self.redirect(each, table)
        self._go_on(table)
        self._tell(request, "commit", {})

    def _thaw(self, table: Table, _: dict[str, Any], request: Delivery) -> None:
        self._go_on(table)
        self._tell(request, "thaw", {})

    def _go_on(self, table: Table) -> None:
        assert table.shard is not None
        if table.shard.rounds is not None:
            table.shard.rounds.unlimit(_MOVE)
        self._thawing.add(table.number)
        for each in self._frozen.pop(table.number).kept:
            self._server.on_request(each)
        self._thawing.discard(table.number)
        table.shard.advance()  # a worker may have left meanwhile
        self._server.waiters.look_at_all()

    def redirect(self, request: Delivery, table: Table) -> None:
        """Say who owns what; a request has not been carried out."""
        meta = packed_owners(table.epochs.get(0, 0), table.owners)
        self._server.reply(request, status=Status.WRONG_VIEW, meta=meta)

    # --- the source -----------------------------------------------------------------------------
    def _give(self, table: Table, said: dict[str, Any], request: Delivery) -> None:
        shard = table.shard
        assert shard is not None
        n_keys = shard.rows.n_keys()
        giving = self._giving[table.number] = _Giving({}, dict(said["moves"]))
        for number, dest in said["moves"]:
            part = RowsPartition(shard, number)
            state = part.state()
            meta = {"applied": part.applied(), "n_keys": int(n_keys[number])}
            try:
                body = self._server.mover.staged(State(meta, state.arrays), dest)
            except MemoryError as error:
                giving.problems.append(f"partition {number}: no memory to send it: {error}")
                continue
            giving.bodies[number] = body
            take = {"do": "take", "table": table.number, "part": number}
            self._send(self._server.rank_of(dest), take, body)
        self._tell_if_given(table)

    def _taken(self, table: Table, said: dict[str, Any], request: Delivery) -> None:
        giving, number, shard = self._giving[table.number], said["part"], table.shard
        assert shard is not None
        del giving.bodies[number]
        if said["why"]:
            giving.problems.append(f"partition {number}: {said['why']}")
        else:
            shard.disown(number)
            giving.moved.append((number, giving.dests[number]))
        self._tell_if_given(table)

    def _tell_if_given(self, table: Table) -> None:
        giving = self._giving[table.number]
        if not giving.bodies:
            del self._giving[table.number]
            told = {"moved": giving.moved, "problems": giving.problems}
            self._send(self._server.rank_of(self._server.leader), {
                "do": "told", "of": "give", **told
            })  # fmt: skip

    # --- the destination ------------------------------------------------------------------------
    def _take(self, table: Table, said: dict[str, Any], request: Delivery) -> None:
        shard, number, why = table.shard, said["part"], ""
        assert shard is not None
        part = RowsPartition(shard, number)
        try:
            state = State.unpacked(request.body)
            part.load(state)
            part.merge_applied(state.meta["applied"])
            shard.own(number, state.meta["n_keys"])
        except (MemoryError, ValueError) as error:
            shard.disown(number)
            why = f"server {self._server.index} cannot take it: {error}"
        told = {"do": "taken", "table": table.number, "part": number, "why": why}
        self._send(request.source, told)

    # --- both -----------------------------------------------------------------------------------
    def _tell(self, request: Delivery, of: str, told: dict[str, Any]) -> None:
        self._send(request.source, {"do": "told", "of": of, **told})

    def _send(self, rank: int, said: dict[str, Any], body: Bytes = _NOTHING) -> None:
        header = Header(Kind.MOVE, option=Step.ROWS)
        self._server.send(rank, header, packed_json(said), body)
