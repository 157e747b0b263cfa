"""The server that leads decides which partitions move, and when all moves pause. Pure.

See ringcomm.ps.server.core.migration_facade for the messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringcomm.ps.placement.partitions import Move
from ringcomm.ps.server.core.actions import Action, Key, Notify, Reply, Send
from ringcomm.ps.server.core.core_table import ServedTable

AT_ONCE = 64  # partitions of a hash table in one migration: it stands still until they are there

Message = dict[str, Any]


@dataclass
class _MoveBatch:
    """Moves that a client asked for; None: the leader itself."""

    request: Any | None
    moves: deque[Move]
    changes_places: bool = False
    n_moved: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass
class _Migration:
    """The migration under way: its batch, its unit, and which servers have yet to answer."""

    batch: _MoveBatch
    table: ServedTable
    key: Key
    moves: list[Move]
    epoch: int
    participants: tuple[int, ...]
    awaited: set[int] = field(default_factory=set)
    answers: list[Message] = field(default_factory=list)
    clocks: dict[int, int] = field(default_factory=dict)
    moved: list[tuple[int, int]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Leader:
    """Moves and pauses, as the server that leads decides them.

    Moves begin while nobody has a pause, and a pause while nothing moves. A pause that is asked for
    while moves wait for their turn lets the next of them go first, but only for so long as its
    owner says: what they wait for may be another pause, which may last.

    Args:
        servers: returns the servers that there are.
        clients: returns the ranks that may still ask.
        tables: by number.

    Attributes:
        epoch: of the migration that began last.
    """

    def __init__(
        self,
        servers: Callable[[], Collection[int]],
        clients: Callable[[], Sequence[int]],
        tables: Mapping[int, ServedTable],
    ) -> None:
        self._servers, self._clients, self._tables = servers, clients, tables
        self._batches: deque[_MoveBatch] = deque()
        self._current: _Migration | None = None
        self.epoch = 0
        self._pauses: set[int] = set()
        self._asked: dict[int, float] = {}  # pauses, and until when they let moves go first

    def ask(
        self, request: Any, moves: Iterable[Move], *, changes_places: bool = False
    ) -> list[Action]:
        """Take moves that are asked for. Raises ValueError if one is impossible."""
        batch = _MoveBatch(request, deque(moves), changes_places)
        for move in batch.moves:
            table = self._tables.get(move.partition[0])
            is_there = table is not None and 0 <= move.partition[1] < len(table.owners)
            if not is_there or move.dest not in self._servers():
                raise ValueError(f"ps.rebalance: cannot do {move}")
        self._batches.append(batch)
        return self._go_on()

    @property
    def is_quiet(self) -> bool:
        return self._current is None and not self._pauses

    @property
    def changes_places(self) -> bool:
        return any(batch.changes_places for batch in self._batches)

    def is_moving(self, key: Key) -> bool:
        return self._current is not None and self._current.key == key

    def forget(self, number: int) -> None:
        for batch in self._batches:
            batch.moves = deque(each for each in batch.moves if each.partition[0] != number)

    def pause(self, number: int, until: float, now: float) -> bool:
        """Begin a pause as soon as may be, see above; return True once it has begun.

        What is asked for again begins by look() alone: a copy of this server does not hear of
        reads, and must not begin it later than this one.
        """
        if number not in self._pauses and number not in self._asked:
            self._asked[number] = until
            self.look(now)
        return number in self._pauses

    @property
    def awaits_time(self) -> bool:
        return bool(self._asked)

    def look(self, now: float) -> None:
        if self._current is None:
            self._begin_pauses(now, moves_wait=bool(self._batches))

    def resume(self, number: int) -> list[Action]:
        self._pauses.discard(number)
        self._asked.pop(number, None)
        return self._go_on()

    def leave(self, rank: int) -> list[Action]:
        """End the moves of a rank that has left; one that is under way ends."""
        self._batches = deque(
            each for each in self._batches if each.request is None or each.request.source != rank
        )
        return self._go_on()

    def _begin_pauses(self, now: float, *, moves_wait: bool) -> None:
        due = {n for n, until in self._asked.items() if not moves_wait or now >= until}
        self._asked = {n: until for n, until in self._asked.items() if n not in due}
        self._pauses |= due

    def _go_on(self) -> list[Action]:
        actions: list[Action] = []
        while self._batches and self._current is None and not self._pauses:
            batch = self._batches[0]
            if not batch.moves:
                self._batches.popleft()
                content = {"moved": batch.n_moved, "problems": batch.problems[:5]}
                if batch.request is not None:
                    actions.append(Reply(batch.request, content=content))
                continue
            actions += self._start(batch, self._tables[batch.moves[0].partition[0]])
        return actions

    def _start(self, batch: _MoveBatch, table: ServedTable) -> list[Action]:
        """Begin the next moves of a batch that can share a view."""
        moves: dict[int, Move] = {}
        while batch.moves and batch.moves[0].partition[0] == table.number:
            move = batch.moves.popleft()
            moves[move.partition[1]] = move
            if table.is_dense or len(moves) == AT_ONCE:
                break
        due = [each for each in moves.values() if table.owners[each.partition[1]] != each.dest]
        if not due:
            return []
        key = table.key_of(due[0].partition[1])
        ends = {table.owners[due[0].partition[1]], due[0].dest} if table.is_dense else None
        self.epoch = 1 + max(self.epoch, 0, *table.epochs.values())
        participants = tuple(sorted(ends or self._servers()))
        self._current = _Migration(batch, table, key, due, self.epoch, participants)
        return self._send("freeze")

    def _send(self, what: str, **more: Any) -> list[Action]:
        assert self._current is not None
        return self._send_to(dict.fromkeys(self._current.participants, more), what)

    def _send_to(self, servers: Mapping[int, Message], what: str) -> list[Action]:
        migration = self._current
        assert migration is not None
        migration.awaited, migration.answers = set(servers), []
        message = {"do": what, "table": migration.key[0], "unit": migration.key[1]}
        return [Send(server, {**message, **more}) for server, more in servers.items()]

    def answered(self, server: int, message: Message, now: float) -> list[Action]:
        """Go on with the migration once all have answered to the last message."""
        migration = self._current
        assert migration is not None
        migration.awaited.discard(server)
        migration.answers.append(message)
        if migration.awaited:
            return []
        of = message["of"]
        if of == "freeze":
            return self._frozen(migration)
        if of == "drain":
            return self._give(migration)
        if of == "give":
            return self._given(migration)
        actions: list[Action] = [Notify(self._clients(), migration.key)] if of == "commit" else []
        self._current = None
        migration.batch.n_moved += len(migration.moved)
        migration.batch.problems += migration.problems
        self._begin_pauses(now, moves_wait=False)  # each was patient for a move
        return actions + self._go_on()

    def _frozen(self, migration: _Migration) -> list[Action]:
        for each in migration.answers:
            for worker, clock in each["clocks"]:
                migration.clocks[worker] = min(clock, migration.clocks.get(worker, clock))
        pending = {worker for each in migration.answers for worker in each["pending"]}
        gone = sorted(pending - {*self._clients()})
        if gone:  # it could not contribute again
            migration.problems.append(
                f"table {migration.table.name}: worker {gone[0]} is gone, and its part of a round "
                "waits for the others. Try again after the round"
            )
            return self._send("thaw")
        at = {tuple(each["at"]) for each in migration.answers if each["at"] is not None}
        if len(at) > 1:
            return self._send("drain", at=max(at))
        return self._give(migration)

    def _give(self, migration: _Migration) -> list[Action]:
        held = {tuple(each["held"]) for each in migration.answers if each["held"] is not None}
        if len(held) > 1:  # a worker died, and its gradient had come to some servers
            migration.problems.append(
                f"table {migration.table.name}: a worker died, and its part of a round that waits "
                "for its release is on some servers alone. Try again after the round"
            )
            return self._send("thaw")
        by_source: dict[int, list[tuple[int, int]]] = {}
        for move in migration.moves:
            owner = migration.table.owners[move.partition[1]]
            by_source.setdefault(owner, []).append((move.partition[1], move.dest))
        return self._send_to(
            {source: {"moves": moves} for source, moves in by_source.items()}, "give"
        )

    def _given(self, migration: _Migration) -> list[Action]:
        for each in migration.answers:
            migration.moved += [(part, dest) for part, dest in each["moved"]]
            migration.problems += each["problems"]
        if not migration.moved:
            return self._send("thaw")
        message = {
            "epoch": migration.epoch,
            "moved": migration.moved,
            "clocks": [*migration.clocks.items()],
        }
        return self._send_to(dict.fromkeys(sorted(self._servers()), message), "commit")
