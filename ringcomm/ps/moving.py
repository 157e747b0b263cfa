"""Partitions that move from server to server while everybody works; a server's side.

The leader carries out one move at a time:

    leader -> source   GIVE: requests for it that come from now on are kept
    source -> dest     TAKE: all there is to it: values, slots, whose pushes are in it, what waits
    dest   -> source   TAKEN
    source -> clients  NOTICE: who owns it now, and which of their pushes went along
                       then the requests that were kept come back: WRONG_VIEW, in order
    source -> leader   GIVEN
    client -> both     NOTED, behind all that it has sent again: the source lets go of its memory,
                       and the destination may believe this worker's clock

The number of the view in which a partition moved is its epoch. A request that names another one is
never carried out, so that none overtakes those before it on its way round.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ringcomm.ps.dense import Contribution, DensePartition, Held, Release, Traffic, numpy_dtype
from ringcomm.ps.frames import Header, Kind, Status, Step
from ringcomm.ps.link import INLINE_MAX, Delivery
from ringcomm.ps.messages import PushMeta, packed_json
from ringcomm.ps.pauses import Pauses
from ringcomm.ps.placement import Move
from ringcomm.ps.row_moving import ROWS_AT_ONCE, RowMover
from ringcomm.ps.state import State

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.opening import Table
    from ringcomm.ps.placement import Partition
    from ringcomm.ps.serving import Server

_NOTHING = np.empty(0, np.uint8)


def applied_of(part: DensePartition, *, with_pending: bool = False) -> list[tuple[int, int, int]]:
    """Return whose pushes are in a partition: rank, incarnation, the last one's sequence.

    Args:
        part: of this server.
        with_pending: also those that wait for their round.
    """
    applied = part.all_last()
    if not with_pending and part.rounds is not None:
        for _, worker, each in part.rounds.pending():
            assert isinstance(each.answer, PushAnswer)
            incarnation, last = applied[worker]
            first = each.answer.request.header.sequence
            applied[worker] = (incarnation, min(last, first - 1))
    return [(rank, *told) for rank, told in sorted(applied.items())]


def merge_applied(part: DensePartition, told: list[list[int]]) -> None:
    """Take note of whose pushes are in a partition besides those that are known."""
    for rank, incarnation, sequence in told:
        part.note_last(rank, *max(part.last_of(rank), (incarnation, sequence)))


class PushAnswer:
    """Tells who pushed what became of it; goes along when a partition moves.

    Args:
        server: that answers.
        request: the push.
    """

    __slots__ = ("request", "server")

    def __init__(self, server: Server, request: Delivery) -> None:
        self.server = server
        self.request = request

    def __call__(self, is_applied: bool, version: int, meta: bytes = b"", /) -> None:
        """Do so; see dense.Answer."""
        status = Status.OK if is_applied else Status.LATE
        self.server.reply(self.request, status=status, clock=version, meta=meta)


@dataclass
class _Batch:
    """Moves that a client asked for."""

    request: Delivery
    moves: deque[Move]
    n_moved: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass
class _Leaving:
    """A partition on its way to another server."""

    part: DensePartition
    dest: int
    epoch: int
    body: Bytes  # until it is taken
    kept: list[Delivery]


class _Retired(NamedTuple):
    """Values that clients may still be reading."""

    memory: Bytes
    readers: set[int]


class Mover:
    """What one server does when partitions move.

    Args:
        server: whose they are.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._leaving: dict[Partition, _Leaving] = {}
        self._retired: dict[tuple[Partition, int], _Retired] = {}
        self._fences: dict[Partition, dict[int, int]] = {}
        self._batches: deque[_Batch] = deque()
        self._epochs = itertools.count(1)
        self._current: _Batch | None = None  # of which a partition is moving
        self._pauses = Pauses()
        self.rows = RowMover(server)
        self._handlers: dict[int, Callable[[Delivery], None]] = {
            Step.ASK: self._ask,
            Step.GIVE: self._give,
            Step.TAKE: self._take,
            Step.TAKEN: self._taken,
            Step.GIVEN: self._given,
            Step.NOTED: self._noted,
            Step.SETTLE: self._settle,
            Step.ROWS: self.rows.on_step,
        }

    def on_request(self, request: Delivery) -> None:
        """Do what a frame of Kind.MOVE says."""
        self._handlers[request.header.option](request)

    def keeps(self, request: Delivery) -> bool:
        """Return True if a request is for a partition on its way; it is sent back later."""
        leaving = self._leaving.get((request.header.table, request.header.partition))
        if leaving is None:
            return False
        leaving.kept.append(request)
        return True

    def floor(self, partition: Partition) -> Mapping[int, int]:
        """Return what clocks are known of a partition that has moved, of workers not heard of yet.

        A worker's clock may be ahead of its pushes: they came by the server that had it before.
        """
        return self._fences.get(partition, {})

    def leave(self, rank: int) -> None:
        """Wait for nothing of a rank that has left."""
        for partition, epoch in tuple(self._retired):
            self._let_go(partition, epoch, rank)
        for fence in self._fences.values():
            fence.pop(rank, None)
        self.rows.leave(rank)
        self._batches = deque(b for b in self._batches if b.request.source != rank)
        self._pauses.leave(rank)
        self._go_on()

    # --- the leader -----------------------------------------------------------------------------
    def pause(self, number: int, then: Callable[[], None], patience_s: float) -> None:
        """Call then() once nothing moves; nothing does until release(number).

        Args:
            number: see pauses.pause_number().
            then: is to tell its owner.
            patience_s: for how long it lets moves go first that have not begun: else they would
                never have their turn beside pauses that overlap.
        """
        self._pauses.ask(number, then, time.monotonic() + patience_s)
        self.look_at_pauses()

    def look_at_pauses(self) -> None:
        """Let the pauses begin whose time has come; from time to time."""
        if self._current is None and self._pauses.are_asked:
            self._begin_pauses(moves_wait=bool(self._batches))

    def release(self, number: int) -> None:
        """End a pause, or give up one that has not begun."""
        self._pauses.end(number)
        self._go_on()

    def _ask(self, request: Delivery) -> None:
        moves = [
            Move((table, part), source, dest)
            for table, part, source, dest in json.loads(request.body.tobytes() or b"[]")
        ]
        n_servers = self._server.n_servers
        for move in moves:
            table = self._server.tables.get(move.partition[0])
            is_there = table is not None and 0 <= move.partition[1] < len(table.owners)
            if not is_there or not 0 <= move.dest < n_servers:
                raise ValueError(f"ps.rebalance: cannot do {move}")
        self._batches.append(_Batch(request, deque(moves)))
        self._go_on()

    def _go_on(self) -> None:
        while self._batches and self._current is None and self._pauses.may_move:
            batch = self._batches[0]
            if not batch.moves:
                self._batches.popleft()
                self._end(batch)
                continue
            move = batch.moves.popleft()
            table = self._server.tables[move.partition[0]]
            if table.shard is not None:
                self._move_rows(batch, table, move)
                continue
            owner = table.owners[move.partition[1]]
            if move.dest == owner:
                continue
            self._current = batch
            said = {"dest": move.dest, "epoch": next(self._epochs)}
            self._send(owner, Step.GIVE, move.partition, packed_json(said))
        self.look_at_pauses()

    def _move_rows(self, batch: _Batch, table: Table, move: Move) -> None:
        """Move partitions of a hash table, as many as come one behind the other, in one view."""
        moves = {move.partition: move}
        while len(moves) < ROWS_AT_ONCE and batch.moves:
            if batch.moves[0].partition[0] != table.number:
                break
            move = batch.moves.popleft()
            moves[move.partition] = move
        due = [each for each in moves.values() if table.owners[each.partition[1]] != each.dest]
        if due:
            self._current = batch
            self.rows.start(table, due, next(self._epochs), self._moved_rows)

    def _moved_rows(self, n_moved: int, problems: list[str]) -> None:
        batch, self._current = self._current, None
        assert batch is not None
        batch.n_moved += n_moved
        batch.problems += problems
        self._begin_pauses(moves_wait=False)  # each was patient for a move
        self._go_on()
        self._server.waiters.look_at_all()

    def _given(self, request: Delivery) -> None:
        said = json.loads(request.meta)
        batch, self._current = self._current, None
        assert batch is not None
        partition = request.header.table, request.header.partition
        if said["why"]:
            batch.problems.append(f"partition {partition}: {said['why']}")
        else:
            self._server.note_owner(partition, said["dest"], said["epoch"])
            batch.n_moved += 1
        self._begin_pauses(moves_wait=False)  # each was patient for a move
        self._go_on()
        self._server.waiters.look_at_all()

    def _begin_pauses(self, *, moves_wait: bool) -> None:
        for grant in self._pauses.begin_due(time.monotonic(), moves_wait=moves_wait):
            grant()

    def _end(self, batch: _Batch) -> None:
        told = {"moved": batch.n_moved, "problems": batch.problems[:5]}
        self._server.reply(batch.request, meta=packed_json(told))

    # --- the source -----------------------------------------------------------------------------
    def _give(self, request: Delivery) -> None:
        partition = request.header.table, request.header.partition
        said = json.loads(request.meta)
        server = self._server
        part = server.release(server.tables[partition[0]], partition[1])
        if part.rounds is not None:  # nothing moves while a client stops them: it has left
            part.rounds.unlimit_all()
            part.advance()
        try:
            body = self.staged(self._state_of(partition, part), said["dest"])
        except MemoryError as error:
            server.keep(server.tables[partition[0]], partition[1], part)
            self._tell_leader(partition, {**said, "why": f"no memory to send it: {error}"})
            return
        kept = server.waiters.take(partition)
        self._leaving[partition] = _Leaving(part, said["dest"], said["epoch"], body, kept)
        meta = packed_json({"epoch": said["epoch"]})
        self._send(said["dest"], Step.TAKE, partition, meta, body)

    def _state_of(self, partition: Partition, part: DensePartition) -> State:
        state = part.state()
        more = {
            "applied": applied_of(part, with_pending=True),
            "traffic": asdict(part.traffic),
            "is_ready": part.is_ready,
            "version": part.version,
            "clocks": list(self._server.clocks_of(partition).items()),
        }
        if part.rounds is None:
            return State({**state.meta, **more}, state.arrays)
        told, arrays = [], dict(state.arrays)
        for k, (number, worker, each) in enumerate(part.rounds.pending()):
            assert isinstance(each.answer, PushAnswer)
            push = each.answer.request
            dtype = None if each.grad is None else each.grad.dtype.name
            told.append(
                [number, worker, each.weight, dtype, each.is_held, push.source,
                 push.header.sequence]
            )  # fmt: skip
            arrays[f"hyper{k}"] = each.hyper
            arrays[f"mask{k}"] = np.frombuffer(each.mask, np.uint8)
            if each.grad is not None:
                arrays[f"grad{k}"] = np.ascontiguousarray(each.grad).view(np.uint8)
        if part.held is not None and part.held.mean is not None:
            arrays["held"] = part.held.mean
            if part.held.present is not None:
                arrays["held_present"] = part.held.present
        releases = []
        for k, (number, meta, answer) in enumerate(part.releases):
            assert isinstance(answer, PushAnswer)
            push = answer.request
            releases.append([number, meta.weight, meta.flags, push.source, push.header.sequence])
            arrays[f"release{k}"] = meta.hyper
        held_of = None if part.held is None else sorted(part.held.workers)
        more |= {"round": part.rounds.current, "pending": told, "held_of": held_of}
        more |= {"releases": releases, "entered": part.rounds.entered()}
        return State({**state.meta, **more}, arrays)

    def staged(self, state: State, dest: int) -> Bytes:
        """Return a state as bytes, where another server can read them. Raises MemoryError."""
        pieces = state.packed()
        nbytes = sum(piece.nbytes for piece in pieces)
        is_shared = nbytes > INLINE_MAX // 2 and self._server.shares_memory(dest)
        body = self._server.memory(nbytes) if is_shared else np.empty(nbytes, np.uint8)
        at = 0
        for piece in pieces:
            body[at : at + piece.nbytes] = piece
            at += piece.nbytes
        return body

    def _taken(self, request: Delivery) -> None:
        partition = request.header.table, request.header.partition
        leaving = self._leaving.pop(partition)
        server = self._server
        why = json.loads(request.meta)["why"]
        if why:
            server.keep(server.tables[partition[0]], partition[1], leaving.part)
            for worker in server.left:
                leaving.part.leave(worker)
            for kept in leaving.kept:
                server.on_request(kept)
        else:
            server.note_owner(partition, leaving.dest, leaving.epoch)
            self._fences.pop(partition, None)
            self._notify(partition, leaving)
            for kept in leaving.kept:
                server.redirect(kept)
        told = {"dest": leaving.dest, "epoch": leaving.epoch, "why": why}
        self._tell_leader(partition, told)
        server.waiters.look_at_all()

    def _notify(self, partition: Partition, leaving: _Leaving) -> None:
        went_along: dict[int, list[int]] = {}
        if leaving.part.rounds is not None:
            pending = [each.answer for _, _, each in leaving.part.rounds.pending()]
            for answer in (*pending, *(each.answer for each in leaving.part.releases)):
                assert isinstance(answer, PushAnswer)
                push = answer.request
                went_along.setdefault(push.source, []).append(push.header.sequence)
        clients = self._server.clients()
        retired = _Retired(leaving.part.memory, set(clients))
        self._retired[partition, leaving.epoch] = retired
        for rank in clients:
            said = {
                "source": self._server.index,
                "dest": leaving.dest,
                "epoch": leaving.epoch,
                "along": went_along.get(rank, []),
            }
            self._server.send(rank, _header(Step.NOTICE, partition), packed_json(said))

    def _let_go(self, partition: Partition, epoch: int, rank: int) -> None:
        retired = self._retired.get((partition, epoch))
        if retired is not None:
            retired.readers.discard(rank)
            if not retired.readers:
                del self._retired[partition, epoch]

    # --- the destination ------------------------------------------------------------------------
    def _take(self, request: Delivery) -> None:
        partition = request.header.table, request.header.partition
        why, state = "", State.unpacked(request.body)
        try:
            part = self._made(partition, state)
        except Exception as error:  # noqa: BLE001 - it stays where it was, and who asked is told
            why = f"server {self._server.index} cannot take it: {type(error).__name__}: {error}"
        else:
            self._install(partition, part, state.meta, json.loads(request.meta)["epoch"])
        meta = packed_json({"why": why})
        self._server.send(request.source, _header(Step.TAKEN, partition), meta)
        self._server.waiters.look_at_all()

    def _made(self, partition: Partition, state: State) -> DensePartition:
        server, meta = self._server, state.meta
        table = server.tables[partition[0]]
        part = server.opener.new_partition(table, meta["start"], meta["stop"])
        part.load(state)
        part.is_ready, part.version = meta["is_ready"], meta["version"]
        traffic = meta["traffic"]
        staleness = {int(missed): n for missed, n in traffic["staleness"].items()}
        part.traffic = Traffic(**{**traffic, "staleness": staleness})
        if part.rounds is not None:
            pending = [self._pending(partition, state, k) for k in range(len(meta["pending"]))]
            part.rounds.resume(meta["round"], pending, meta["entered"])
            arrays = {name: array.copy() for name, array in state.arrays.items() if "held" in name}
            if (workers := meta["held_of"]) is not None:
                part.held = Held(arrays.get("held"), frozenset(workers), arrays.get("held_present"))
            releases = range(len(meta["releases"]))
            part.releases.extend(self._released(partition, state, k) for k in releases)
        return part

    def _install(
        self, partition: Partition, part: DensePartition, meta: dict[str, Any], epoch: int
    ) -> None:
        server = self._server
        table = server.tables[partition[0]]
        server.note_owner(partition, server.index, epoch)
        merge_applied(part, meta["applied"])
        server.keep(table, partition[1], part)
        self.fence(partition, meta["clocks"])
        if part.rounds is not None:
            part.advance()  # a worker may have left meanwhile

    def _answer_to(self, partition: Partition, source: int, sequence: int) -> PushAnswer:
        """Return what answers a push that went along."""
        header = Header(
            Kind.PUSH, origin=source, sequence=sequence, table=partition[0], partition=partition[1]
        )
        return PushAnswer(self._server, Delivery(source, header, b"", _NOTHING))

    def _released(self, partition: Partition, state: State, k: int) -> Release:
        number, weight, flags, source, sequence = state.meta["releases"][k]
        meta = PushMeta(weight, 0, 0, "", flags, state.arrays[f"release{k}"].copy())
        return Release(number, meta, self._answer_to(partition, source, sequence))

    def _pending(self, partition: Partition, state: State, k: int) -> tuple[int, int, Contribution]:
        number, worker, weight, dtype, is_held, source, sequence = state.meta["pending"][k]
        answer = self._answer_to(partition, source, sequence)
        grad = None
        if dtype is not None:
            grad = state.arrays[f"grad{k}"].copy().view(numpy_dtype(dtype))
        hyper = state.arrays[f"hyper{k}"].copy()
        mask = state.arrays[f"mask{k}"].tobytes()
        return number, worker, Contribution(weight, hyper, grad, is_held, answer, mask)

    # --- both -----------------------------------------------------------------------------------
    def fence(self, partition: Partition, clocks: Iterable[Sequence[int]]) -> None:
        """Believe no more of each worker's clock until it says NOTED; see floor()."""
        left = self._server.left
        self._fences[partition] = {w: c for w, c in clocks if w not in left}

    def _noted(self, request: Delivery) -> None:
        partition = request.header.table, request.header.partition
        epoch, rank = request.header.clock, request.source
        self._let_go(partition, epoch, rank)
        table = self._server.tables[partition[0]]
        if table.shard is not None:
            self.rows.noted(partition[0], epoch, rank)
        if table.epochs.get(partition[1]) == epoch and partition in self._fences:
            self._fences[partition].pop(rank, None)
            self._server.waiters.look_at_all()

    def _settle(self, request: Delivery) -> None:
        """Answer once every request that came before has been answered, or sent back."""
        self._server.waiters.when(
            lambda: not (self._leaving or self.rows.is_busy),
            lambda: self._server.reply(request),
            request,
        )

    def _send(
        self, server: int, step: Step, partition: Partition, meta: bytes, body: Bytes = _NOTHING
    ) -> None:
        self._server.send(self._server.rank_of(server), _header(step, partition), meta, body)

    def _tell_leader(self, partition: Partition, told: dict[str, Any]) -> None:
        self._send(self._server.leader, Step.GIVEN, partition, packed_json(told))


def _header(step: Step, partition: Partition) -> Header:
    return Header(Kind.MOVE, option=step, table=partition[0], partition=partition[1])
