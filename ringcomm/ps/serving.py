"""A server: the partitions of its tables, and what clients ask of them.

Everything here runs in the thread that drives the rank. Requests of one client are carried out in
the order in which they were made; a request that must wait (a pull for a round that is not over)
holds up no other.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ringcomm._version import __version__
from ringcomm.errors import RingcommError
from ringcomm.ps import states
from ringcomm.ps.changes import Changes
from ringcomm.ps.client import error_text
from ringcomm.ps.entries import EntryRequests
from ringcomm.ps.frames import Header, Kind, Status, Step, is_one_way
from ringcomm.ps.functions import Calls, Function
from ringcomm.ps.hashed import Shard
from ringcomm.ps.link import INLINE_MAX
from ringcomm.ps.messages import (
    ENCODED_BODY,
    INITIAL,
    KNOWN_BLOCK,
    PLACE,
    READ_BLOCK,
    WANT_COPY,
    WANT_EXACT,
    PushMeta,
    packed_json,
    packed_stamp,
)
from ringcomm.ps.moving import Mover, PushAnswer
from ringcomm.ps.opening import Opener, Table
from ringcomm.ps.pauses import owner_of
from ringcomm.ps.placement import Partition, View
from ringcomm.ps.rounds import Clocks
from ringcomm.ps.row_requests import RowRequests, was_applied
from ringcomm.ps.snapshots import HOLD, PAUSE, RELEASE, STOP, Held, Moment
from ringcomm.ps.storing import Store
from ringcomm.ps.waiting import Waiters

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.dense import DensePartition
    from ringcomm.ps.link import Delivery, Link
    from ringcomm.ps.roles import Layout

_NOTHING: Final = np.empty(0, np.uint8)
LEADER: Final = 0  # the lowest server decides views


class Server:
    """What one server process does.

    Args:
        index: of this server among the servers.
        layout: who is who.
        link: the wire.
        memory: returns memory that clients on this node map.
        functions: that clients may call, by name.
    """

    def __init__(
        self,
        index: int,
        layout: Layout,
        link: Link,
        memory: Callable[[int], Bytes],
        functions: Mapping[str, Function],
    ) -> None:
        self.index = index
        self._layout = layout
        self._rank = layout.servers[index]
        self._link = link
        self.memory = memory
        self.view = View()
        self.tables: dict[int, Table] = {}
        self._clocks = Clocks(layout.workers)
        self.waiters = Waiters(self._progress, self._fail)
        self._held: dict[int, Held | Moment] = {}  # Moment: of a checkpoint
        self._stopped: set[int] = set()  # moments that rounds wait for
        self.job = uuid.uuid4().hex
        self.opener = Opener(self)
        self.mover = Mover(self)
        self.store = Store(self)
        self._entries = EntryRequests(self)
        self.left: set[int] = set()
        self.n_requests = 0
        self._nbytes_in = self._nbytes_out = 0
        self._began_at = time.monotonic()
        changes = Changes(self)
        rows = RowRequests(link, self.reply, self.wait)
        self._rows: dict[int, Callable[[Delivery, Shard], None]] = {
            Kind.PUSH: rows.push,
            Kind.PULL: rows.pull,
            Kind.ERASE: rows.erase,
            Kind.ROWS: rows.tell,
            Kind.CHANGES: changes.of_rows,
        }
        self._handlers: dict[int, Callable[[Delivery], None]] = {
            Kind.CREATE: self.opener.create,
            Kind.VIEW: self.opener.on_view,
            Kind.PUSH: self._push,
            Kind.PULL: self._pull,
            Kind.ENTER: self._entries.on_request,
            Kind.CHANGES: changes.of_block,
            Kind.CALL: Calls(self, functions).on_call,
            Kind.TICK: self._tick,
            Kind.STATS: self._stats,
            Kind.SNAPSHOT: self._snapshot,
            Kind.SAVE: self.store.on_save,
            Kind.RESTORE: self.store.on_restore,
            Kind.MOVE: self.mover.on_request,
            Kind.STATE: self._state,
            Kind.LEAVE: self._leave,
            Kind.ERASE: self._refuse,
            Kind.ROWS: self._refuse,
        }

    @property
    def is_over(self) -> bool:
        """True once all who could ask have left."""
        clients = {*self._layout.workers, *self._layout.evaluators}
        return clients <= self.left

    def on_request(self, delivery: Delivery) -> None:
        """Carry out a request; a mistake is told to who made it, and changes nothing."""
        self.n_requests += 1
        self._nbytes_in += delivery.body.nbytes
        handler = self._handlers.get(delivery.header.kind)
        try:
            if handler is None:
                raise RingcommError(
                    f"server {self.index} knows no request {delivery.header.kind}: this is "
                    f"ringcomm {__version__}"
                )
            table = self.tables.get(delivery.header.table)
            is_of_rows = delivery.header.kind not in (Kind.MOVE, Kind.ENTER)
            if table is not None and table.shard is not None and is_of_rows:
                self._serve_rows(delivery, table, table.shard)
            else:
                handler(delivery)
        except Exception as error:
            if is_one_way(delivery.header):  # nobody waits for a reply that could tell of it
                raise RingcommError(
                    f"server {self.index}: cannot do what rank {delivery.source} says with "
                    f"{_named(delivery.header)}: {type(error).__name__}: {error}. This is a defect"
                ) from error
            self._fail(delivery, error)

    def _fail(self, request: Delivery, error: Exception) -> None:
        """Tell who made a request why it was not carried out."""
        status = Status.REFUSED if isinstance(error, ValueError | KeyError) else Status.FAILED
        self.reply(request, status=status, meta=error_text(error))

    def _serve_rows(self, request: Delivery, table: Table, shard: Shard) -> None:
        handler = self._rows.get(request.header.kind)
        if handler is None:
            raise KeyError(f"hashtable[{shard.spec.name}]: knows no request {request.header.kind}")
        if request.header.kind == Kind.CHANGES:  # of what this server has, whatever moves
            handler(request, shard)
            return
        if self.mover.rows.keeps(request, shard):
            return
        if request.header.view != table.epochs.get(0, 0) and not was_applied(request, shard):
            self.mover.rows.redirect(request, table)
            return
        handler(request, shard)
        self.waiters.look_at((table.number, 0))

    def send(self, dest: int, header: Header, meta: bytes = b"", body: Bytes = _NOTHING) -> None:
        """Send a frame of this server's own to a rank; see Link.send()."""
        self._link.send(dest, header._replace(origin=self._rank), meta, body)

    def reply(
        self,
        to: Delivery,
        *,
        status: Status = Status.OK,
        meta: bytes = b"",
        body: Bytes = _NOTHING,
        clock: int = 0,
        option: int = 0,
    ) -> None:
        """Answer a request; any thread."""
        self._nbytes_out += body.nbytes // 2 if option == READ_BLOCK else body.nbytes  # of two
        header = Header(
            Kind.REPLY,
            status=status,
            view=to.header.view,
            origin=self._rank,
            sequence=to.header.sequence,
            table=to.header.table,
            partition=to.header.partition,
            clock=clock,
            option=option,
        )
        self._link.send(to.source, header, meta, body)

    # --- others ---------------------------------------------------------------------------------
    @property
    def n_servers(self) -> int:
        """How many servers there are."""
        return len(self._layout.servers)

    @property
    def leader(self) -> int:
        """The server that decides views."""
        return LEADER

    def rank_of(self, server: int) -> int:
        """Return the rank of a server."""
        return self._layout.servers[server]

    def shares_memory(self, server: int) -> bool:
        """Return True if a server maps what memory() returns."""
        return self._link.shares_memory(self._layout.servers[server])

    def clients(self) -> list[int]:
        """Return the ranks that may still ask."""
        return sorted({*self._layout.workers, *self._layout.evaluators} - self.left)

    def keep(self, table: Table, number: int, part: DensePartition) -> None:
        """Have a partition from now on."""
        table.parts[number] = part
        part.is_kept = True
        if not (table.spec.mode.has_rounds or part.segments):
            self._link.open((table.number, number), table.epochs.get(number, 0), part)

    def release(self, table: Table, number: int) -> DensePartition:
        """Have a partition no more; return it."""
        self._link.close((table.number, number))
        part = table.parts.pop(number)
        part.is_kept = False
        return part

    def live_workers(self) -> set[int]:
        """Return the workers that have not left."""
        return set(self._layout.workers) - self.left

    def _refuse(self, request: Delivery) -> None:
        """Say that a request is for hash tables."""
        raise KeyError(f"server {self.index} has no hash table {request.header.table}")

    # --- values ---------------------------------------------------------------------------------
    def part_of(self, request: Delivery) -> DensePartition | None:
        """Return the partition that a request is for; None, and say so, if another has it."""
        table = self.tables.get(request.header.table)
        if table is None:
            raise KeyError(f"server {self.index} has no table {request.header.table}")
        number = request.header.partition
        if self.mover.keeps(request):
            return None
        part = table.parts.get(number)
        if part is None or request.header.view != table.epochs.get(number, 0):
            self.redirect(request)
            return None
        return part

    def redirect(self, request: Delivery) -> None:
        """Tell who owns the partition that a request is for; it has not been carried out."""
        table, part = self.tables[request.header.table], request.header.partition
        told = {"owner": table.owners[part], "epoch": table.epochs.get(part, 0)}
        self.reply(request, status=Status.WRONG_VIEW, meta=packed_json(told))

    def _push(self, request: Delivery) -> None:
        part = self.part_of(request)
        if part is None:
            return
        header, meta = request.header, PushMeta.of(request.meta)
        if not (part.is_ready or meta.flags & INITIAL):  # the chief's values would undo it
            partition = header.table, header.partition
            self.waiters.wait(partition, 0, lambda: self._push(request), request)
            return
        if not part.is_new(header):
            self.reply(request, clock=part.version)  # it came twice, and was applied then
            return
        before = part.last_of(header.origin)
        # First: it may end a round, after which a checkpoint takes note of whose pushes are in it.
        part.note_last(header.origin, header.incarnation, header.sequence)
        try:
            part.push(header.origin, header.clock, meta, request.body, PushAnswer(self, request))
        except Exception:
            part.note_last(header.origin, *before)
            raise
        self.waiters.look_at((header.table, header.partition))

    def _pull(self, request: Delivery) -> None:
        """Answer with the values once enough updates are in them."""
        part = self.part_of(request)
        if part is None:
            return
        if request.header.place:
            self._send_held(request)
            return

        def answer() -> None:
            self.send_values(request, part)

        self.wait(request, part, answer)

    def wait(
        self,
        request: Delivery,
        part: DensePartition | Shard,
        answer: Callable[[], None],
        *,
        goes_along: bool = True,
    ) -> None:
        """Call answer() once enough updates are in a partition for who asks; see Waiters."""
        header, mode = request.header, part.spec.mode
        wanted = header.clock if mode.has_rounds or mode.name == "ssp" else 0
        partition = header.table, header.partition
        self.waiters.wait(partition, wanted, answer, request, goes_along=goes_along)

    def _progress(self, partition: Partition) -> float:
        """Return how far a partition has got, in what pulls wait for; see Waiters."""
        table = self.tables[partition[0]]
        part = table.shard or table.parts[partition[1]]
        if not part.is_ready:
            return -1
        if part.spec.mode.name == "ssp":
            if self.mover.rows.stands_still(partition[0]):
                return -1  # pushes are kept, and clocks are not
            return self._clocks.slowest_with(self.mover.floor(partition))
        return part.version if part.spec.mode.has_rounds else math.inf

    # --- partitions that move -------------------------------------------------------------------
    def note_owner(self, partition: Partition, owner: int, epoch: int) -> None:
        """Take note of who owns a partition now."""
        table = self.tables[partition[0]]
        if epoch > table.epochs.get(partition[1], 0):
            self.opener.give(table, partition[1], owner)
            table.epochs[partition[1]] = epoch
            self.view = self.view.with_({partition: (owner,)})

    def note_owners(self, table: Table, epoch: int, moved: Iterable[Sequence[int]]) -> None:
        """Take note of who owns partitions of a hash table from now on."""
        changes = {}
        for part, owner in moved:
            table.owners[part] = owner
            changes[table.number, part] = (owner,)
        table.epochs[0] = epoch
        self.view = self.view.with_(changes)

    def clocks_of(self, partition: Partition) -> dict[int, int]:
        """Return how many steps of each worker are in a partition for sure."""
        floor = self.mover.floor(partition)
        clocks = self._clocks.as_they_are()
        return {worker: min(clock, floor.get(worker, clock)) for worker, clock in clocks.items()}

    def send_values(self, request: Delivery, part: DensePartition, meta: bytes = b"") -> None:
        """Send a block's values, or where they are; `meta` begins with their stamp."""
        part.traffic.pulls += 1
        encoded = None if request.header.option & WANT_EXACT else part.encoded()
        if encoded is not None:
            part.traffic.nbytes += encoded.nbytes
            self.reply(request, body=encoded, clock=part.version, option=ENCODED_BODY)
            return
        nbytes = part.count * part.dtype.itemsize
        part.traffic.nbytes += nbytes
        is_small = nbytes <= INLINE_MAX
        may_look = self._link.shares_memory(request.source) and not (
            request.header.option & WANT_COPY
        )
        if may_look and not is_small:
            stamp, body = meta or packed_stamp(part.stamp), part.memory
            self.reply(request, meta=stamp, body=body, clock=part.version, option=READ_BLOCK)
            return
        values = part.values.view(np.uint8)
        body = values if is_small else values.copy()
        if may_look and not meta:
            place = PLACE.pack(self._link.place_of(part.memory), part.memory.nbytes)
            self.reply(request, meta=place, body=body, clock=part.version, option=KNOWN_BLOCK)
        else:
            self.reply(request, meta=meta, body=body, clock=part.version)

    def _send_held(self, request: Delivery) -> None:
        header = request.header
        held = self._held.get(header.place)
        if not isinstance(held, Held):
            raise KeyError(f"server {self.index} holds no snapshot {header.place}")
        body, version = held.values((header.table, header.partition))
        self.reply(request, body=body, clock=version)

    def _state(self, request: Delivery) -> None:
        """Tell a partition's values and what its updater keeps beside them; or replace them."""
        part = self.part_of(request)
        if part is None:
            return
        if request.body.nbytes:
            states.load(part, request.meta, request.body)
            self.waiters.look_at((request.header.table, request.header.partition))
            self.reply(request, clock=part.version)
        else:
            meta, body = states.packed(part)
            self.reply(request, meta=meta, body=body, clock=part.version)

    # --- workers --------------------------------------------------------------------------------
    def _tick(self, request: Delivery) -> None:
        """Note a worker's clock; or, as option 1 asks, tell when the slowest has reached one."""
        header = request.header
        if not header.option:
            before = self._clocks.slowest
            self._clocks.tick(header.origin, header.clock)
            if self._clocks.slowest != before:
                self.waiters.look_at_all()
            self.reply(request)
            return

        def answer() -> None:
            slowest = self._clocks.slowest
            if slowest == math.inf:
                self.reply(request, status=Status.LATE)
            else:
                self.reply(request, clock=int(slowest))

        self.waiters.when(lambda: self._clocks.slowest >= header.clock, answer, request)

    def _snapshot(self, request: Delivery) -> None:
        said = json.loads(request.meta)
        if said["do"] == PAUSE:
            self.mover.pause(said["id"], lambda: self._tell_tables(request), said["patience_s"])
        elif said["do"] == STOP:
            self.reply(request, meta=packed_json(self._stop_rounds(said["id"])))
        elif said["do"] == RELEASE:
            if (held := self._held.pop(said["id"], None)) is not None:
                held.release()
            if not said.get("is_taken"):
                self.store.drop(said["id"])
            self._let_rounds_end({said["id"]})
            if said["moves"]:
                self.mover.release(said["id"])
            self.reply(request, meta=b"{}")
        elif said["do"] == HOLD:

            def done(is_whole: bool) -> None:
                self.reply(request, meta=packed_json({"is_whole": is_whole}))

            rounds = {int(number): version for number, version in said["rounds"].items()}
            moment: Held | Moment
            if said["save_to"] is None:
                moment = Held(said["id"], self.tables, rounds, self.memory, done)
            else:
                moment = self.store.take(said["id"], said["save_to"], rounds, done)
            self._held[said["id"]] = moment
            self._let_rounds_end({said["id"]})
        else:
            raise ValueError(f"ps.snapshot: cannot {said['do']!r}")

    def _stop_rounds(self, number: int) -> dict[str, int]:
        """Let rounds end no more, until a moment is held; return how many have, by table.

        Else training that is fast would be ahead of every moment that a client chooses.
        """
        told = {}
        for table in self.tables.values():
            rounds = [part.rounds for part in table.held_alike() if part.rounds is not None]
            count = max((part.version for part in table.held_alike()), default=0)
            for each in rounds:
                each.limit(number, count)
            if table.spec.mode.has_rounds:
                told[str(table.number)] = count
        self._stopped.add(number)
        return told

    def hold_back(self, table: Table) -> None:
        """Let no round of a table that is new end while others may not."""
        for part in table.held_alike():
            for number in self._stopped:
                if part.rounds is not None:
                    part.rounds.limit(number, 0)

    def _let_rounds_end(self, numbers: set[int]) -> None:
        """Wait no more for moments that _stop_rounds() knows."""
        self._stopped -= numbers
        stopped = [part for table in self.tables.values() for part in table.held_alike()]
        for part in stopped:
            if part.rounds is not None:
                part.rounds.unlimit(*numbers)
        for part in stopped:
            if part.rounds is not None and numbers:
                part.advance()
        self._end_rounds(*self._held.values())
        self.waiters.look_at_all()

    def _tell_tables(self, request: Delivery) -> None:
        tables = {table.number: table.spec.to_json() for table in self.opener.known()}
        self.reply(request, body=_as_body({"job": self.job, "tables": tables}))

    def _end_rounds(self, *held: Held | Moment) -> None:
        """Let snapshots wait no more once nobody is left who could end a round, or stops it."""
        if not self._stopped and set(self._layout.workers) <= self.left:
            for each in held:
                each.take_as_they_are()

    def _leave(self, request: Delivery) -> None:
        rank = request.header.origin
        self.left.add(rank)
        self._clocks.leave(rank)
        for table in self.tables.values():
            for part in table.parts.values():
                part.leave(rank)
            if table.shard is not None:
                table.shard.leave(rank)
        self._entries.leave(rank)
        self.mover.leave(rank)
        for number in [each for each in self._held if owner_of(each) == rank]:
            self._held.pop(number).release()
            self.store.drop(number)
        self._let_rounds_end({number for number in self._stopped if owner_of(number) == rank})
        self.waiters.look_at_all()
        self.reply(request)

    def _stats(self, request: Delivery) -> None:
        tables = [table for table in self.tables.values() if table.shard is None]
        shards = {t.spec.name: t.shard for t in self.tables.values() if t.shard is not None}
        n_requests, nbytes_in = self._link.carried_out
        told = {
            "server": self.index,
            "requests": self.n_requests + n_requests,
            "seconds": time.monotonic() - self._began_at,
            "waiting": len(self.waiters),
            "queue": len(self.waiters) + self._link.n_queued,
            "nbytes_in": self._nbytes_in + nbytes_in,
            "nbytes_out": self._nbytes_out,
            "numbers": {table.spec.name: table.number for table in tables},
            "tables": {
                table.spec.name: {n: part.told() for n, part in table.parts.items()}
                for table in tables
            },
            "hashtables": {name: shard.told() for name, shard in shards.items()},
        }
        if json.loads(request.meta).get("keys"):
            told["keys"] = {
                number: {"owned": table.shard.partitions, "nbytes": table.shard.heat()}
                for number, table in self.tables.items()
                if table.shard is not None
            }
        self.reply(request, body=_as_body(told))

    @property
    def missing(self) -> Sequence[int]:
        """Workers that some pull waits for."""
        return self._clocks.behind(self._clocks.slowest + 1)


def _named(header: Header) -> str:
    kind = Kind(header.kind).name
    return f"{kind}/{Step(header.option).name}" if header.kind == Kind.MOVE else kind


def _as_body(told: Any) -> Bytes:
    """Return JSON as a body of any size."""
    return np.frombuffer(packed_json(told), np.uint8).copy()
