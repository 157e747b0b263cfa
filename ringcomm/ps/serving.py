"""A server: tables and their partitions, and what clients ask of them.

Everything here runs in the thread that drives the rank. Requests of one client are carried out in
the order in which they were made; a request that must wait (a pull for a round that is not over)
holds up no other.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ringcomm._version import __version__
from ringcomm.errors import RingcommError
from ringcomm.ps import placement, states
from ringcomm.ps.client import error_text
from ringcomm.ps.dense import DensePartition
from ringcomm.ps.frames import Header, Kind, Status
from ringcomm.ps.link import INLINE_MAX
from ringcomm.ps.messages import READ_BLOCK, WANT_COPY, PushMeta, packed_json
from ringcomm.ps.placement import View
from ringcomm.ps.rounds import Clocks
from ringcomm.ps.snapshots import HOLD, RELEASE, VERSIONS, Held
from ringcomm.ps.spec import Spec

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.link import Delivery, Link
    from ringcomm.ps.roles import Layout

_NOTHING: Final = np.empty(0, np.uint8)
LEADER: Final = 0  # the lowest server decides views


@dataclass
class Table:
    """A table, as far as this server has it.

    Attributes:
        number: of the table in messages.
        spec: what it is.
        owners: of each partition: its server.
        parts: partitions of this server, by number.
    """

    number: int
    spec: Spec
    owners: list[int]
    parts: dict[int, DensePartition] = field(default_factory=dict)

    def described(self) -> dict[str, Any]:
        """Return what others need to know of it."""
        return {"number": self.number, "spec": self.spec.to_json(), "owners": self.owners}


@dataclass
class _Opening:
    """A table that the leader is about to make known to all servers."""

    table: Table
    awaited: set[int]
    asked: list[Delivery]


@dataclass(eq=False)
class Waiting:
    """A pull that cannot be answered yet.

    Attributes:
        ready: returns True once it can.
        answer: does it.
    """

    ready: Callable[[], bool]
    answer: Callable[[], None]


class Server:
    """What one server process does.

    Args:
        index: of this server among the servers.
        layout: who is who.
        link: the wire.
        memory: returns memory that clients on this node map.
    """

    def __init__(
        self, index: int, layout: Layout, link: Link, memory: Callable[[int], Bytes]
    ) -> None:
        self.index = index
        self._layout = layout
        self._rank = layout.servers[index]
        self._link = link
        self._memory = memory
        self.view = View()
        self.tables: dict[int, Table] = {}
        self._by_name: dict[str, Table] = {}
        self._opening: dict[str, _Opening] = {}
        self._clocks = Clocks(layout.workers)
        self._waiting: list[Waiting] = []
        self._applied: defaultdict[tuple[int, int], dict[int, tuple[int, int]]] = defaultdict(dict)
        self._held: dict[int, Held] = {}
        self.left: set[int] = set()
        self.n_requests = 0
        self._began_at = time.monotonic()
        self._handlers: dict[int, Callable[[Delivery], None]] = {
            Kind.CREATE: self._create,
            Kind.VIEW: self._adopt,
            Kind.PUSH: self._push,
            Kind.PULL: self._pull,
            Kind.TICK: self._tick,
            Kind.STATS: self._stats,
            Kind.SNAPSHOT: self._snapshot,
            Kind.STATE: self._state,
            Kind.LEAVE: self._leave,
        }

    @property
    def is_over(self) -> bool:
        """True once all who could ask have left."""
        clients = {*self._layout.workers, *self._layout.evaluators}
        return clients <= self.left

    def on_request(self, delivery: Delivery) -> None:
        """Carry out a request; a mistake is told to who made it, and changes nothing."""
        self.n_requests += 1
        handler = self._handlers.get(delivery.header.kind)
        try:
            if handler is None:
                raise RingcommError(
                    f"server {self.index} knows no request {delivery.header.kind}: this is "
                    f"ringcomm {__version__}"
                )
            handler(delivery)
        except Exception as error:  # noqa: BLE001 - the server lives on
            status = Status.REFUSED if isinstance(error, ValueError | KeyError) else Status.FAILED
            self._reply(delivery, status=status, meta=error_text(error))

    def _reply(
        self,
        to: Delivery,
        *,
        status: Status = Status.OK,
        meta: bytes = b"",
        body: Bytes = _NOTHING,
        clock: int = 0,
        option: int = 0,
    ) -> None:
        header = Header(
            Kind.REPLY,
            status=status,
            view=self.view.number,
            origin=self._rank,
            sequence=to.header.sequence,
            table=to.header.table,
            partition=to.header.partition,
            clock=clock,
            option=option,
        )
        self._link.send(to.source, header, meta, body)

    # --- tables ---------------------------------------------------------------------------------
    def _create(self, request: Delivery) -> None:
        """Open a table for a client; the first one makes it. For the leader."""
        spec = Spec.of_json(json.loads(request.meta))
        if spec.name in self._opening:
            opening = self._opening[spec.name]
            opening.table.spec.require_same(spec, request.source)
            opening.asked.append(request)
            return
        known = self._by_name.get(spec.name)
        if known is not None:
            known.spec.require_same(spec, request.source)
            self._reply(request, body=self._described(known))
            return
        table = Table(len(self.tables) + 1, spec, self._place(spec))
        others = set(range(len(self._layout.servers))) - {self.index}
        opening = self._opening[spec.name] = _Opening(table, others, [request])
        self._install(table)
        for server in others:
            header = Header(Kind.VIEW, origin=self._rank, sequence=table.number)
            self._link.send(self._layout.servers[server], header, b"", self._described(table))
        self._open_if_known(opening)

    def _place(self, spec: Spec) -> list[int]:
        servers = list(range(len(self._layout.servers)))
        if spec.kind == "hash":
            return placement.place_hashed(spec.name, servers, spec.partitions)
        bounds = placement.cuts(spec.count, spec.block)
        itemsize = np.dtype(spec.dtype).itemsize
        sizes = [(b - a) * itemsize for a, b in itertools.pairwise(bounds)]
        return placement.place_dense(sizes, self._loads(), servers)

    def _loads(self) -> dict[int, int]:
        loads: defaultdict[int, int] = defaultdict(int)
        for table in self.tables.values():
            if table.spec.kind == "dense":
                nbytes = table.spec.count * np.dtype(table.spec.dtype).itemsize
                for owner in table.owners:
                    loads[owner] += nbytes // len(table.owners)
        return loads

    def _install(self, table: Table) -> None:
        spec = table.spec
        self.tables[table.number] = self._by_name[spec.name] = table
        changes = {(table.number, i): (owner,) for i, owner in enumerate(table.owners)}
        self.view = self.view.with_(changes)
        bounds = placement.cuts(spec.count, spec.block)
        for part, owner in enumerate(table.owners):
            if owner == self.index:
                start, stop = bounds[part], bounds[part + 1]
                table.parts[part] = DensePartition(
                    spec, start, stop, self._memory, set(self._layout.workers) - self.left
                )

    def _adopt(self, request: Delivery) -> None:
        """Take note of a table that the leader has placed."""
        told = json.loads(request.body.tobytes())
        self._install(Table(told["number"], Spec.of_json(told["spec"]), told["owners"]))
        header = Header(Kind.VIEW, origin=self._rank, sequence=told["number"], option=1)
        self._link.send(request.source, header, packed_json({"name": told["spec"]["name"]}))

    def on_adopted(self, delivery: Delivery) -> None:
        """Another server knows a table now. For the leader."""
        opening = self._opening[json.loads(delivery.meta)["name"]]
        opening.awaited.discard(self._layout.servers.index(delivery.source))
        self._open_if_known(opening)

    def _open_if_known(self, opening: _Opening) -> None:
        if opening.awaited:
            return
        del self._opening[opening.table.spec.name]
        for request in opening.asked:
            self._reply(request, body=self._described(opening.table))

    # --- values ---------------------------------------------------------------------------------
    def _part(self, request: Delivery) -> DensePartition | None:
        """Return the partition that a request is for; None, and say so, if another has it."""
        table = self.tables.get(request.header.table)
        if table is None:
            raise KeyError(f"server {self.index} has no table {request.header.table}")
        part = table.parts.get(request.header.partition)
        if part is None:
            self._reply(request, status=Status.WRONG_VIEW, body=self._described(table))
        return part

    def _push(self, request: Delivery) -> None:
        part = self._part(request)
        if part is None:
            return
        header, meta = request.header, PushMeta.of(request.meta)
        applied = self._applied[header.table, header.partition]
        incarnation, last = applied.get(header.origin, (-1, 0))
        if header.incarnation == incarnation and header.sequence <= last:
            self._reply(request, clock=part.version)  # it came twice, and was applied then
            return

        def answer(is_applied: bool, version: int, meta: bytes = b"") -> None:
            status = Status.OK if is_applied else Status.LATE
            self._reply(request, status=status, clock=version, meta=meta)

        part.push(header.origin, header.clock, meta, request.body, answer)
        applied[header.origin] = (header.incarnation, header.sequence)
        self._look_at_waiting()

    def _pull(self, request: Delivery) -> None:
        """Answer with the values once enough updates are in them."""
        part = self._part(request)
        if part is None:
            return
        spec, wanted = part.spec, request.header.clock
        if request.header.place:
            self._send_held(request)
            return

        def ready() -> bool:
            if not part.is_ready:
                return False
            if spec.mode.name == "ssp":
                return self._clocks.slowest >= wanted
            return not spec.mode.has_rounds or part.version >= wanted

        def answer() -> None:
            self._send_values(request, part)

        self._when(ready, answer)

    def _send_values(self, request: Delivery, part: DensePartition) -> None:
        nbytes = part.count * part.dtype.itemsize
        part.traffic.pulls += 1
        part.traffic.nbytes += nbytes
        is_small = nbytes <= INLINE_MAX
        may_look = self._link.shares_memory(request.source) and not (
            request.header.option & WANT_COPY
        )
        if may_look and not is_small:
            self._reply(request, body=part.memory, clock=part.version, option=READ_BLOCK)
            return
        values = part.values.view(np.uint8)
        self._reply(request, body=values if is_small else values.copy(), clock=part.version)

    def _send_held(self, request: Delivery) -> None:
        header = request.header
        held = self._held.get(header.place)
        if held is None:
            raise KeyError(f"server {self.index} holds no snapshot {header.place}")
        body, version = held.values((header.table, header.partition))
        self._reply(request, body=body, clock=version)

    def _state(self, request: Delivery) -> None:
        """Tell a partition's values and what its updater keeps beside them; or replace them."""
        part = self._part(request)
        if part is None:
            return
        if request.body.nbytes:
            states.load(part, request.meta, request.body)
            self._reply(request, clock=part.version)
        else:
            meta, body = states.packed(part)
            self._reply(request, meta=meta, body=body, clock=part.version)

    def _when(self, ready: Callable[[], bool], answer: Callable[[], None]) -> None:
        if ready():
            answer()
        else:
            self._waiting.append(Waiting(ready, answer))

    def _look_at_waiting(self) -> None:
        due = [each for each in self._waiting if each.ready()]
        if due:
            self._waiting = [each for each in self._waiting if each not in due]
            for each in due:
                each.answer()

    # --- workers --------------------------------------------------------------------------------
    def _tick(self, request: Delivery) -> None:
        """Note a worker's clock; or, as option 1 asks, tell when the slowest has reached one."""
        header = request.header
        if not header.option:
            self._clocks.tick(header.origin, header.clock)
            self._look_at_waiting()
            self._reply(request)
            return

        def answer() -> None:
            is_over = self._clocks.slowest == math.inf
            self._reply(request, status=Status.LATE if is_over else Status.OK)

        self._when(lambda: self._clocks.slowest >= header.clock, answer)

    def _snapshot(self, request: Delivery) -> None:
        said = json.loads(request.meta)
        if said["do"] == VERSIONS:
            told = {
                str(table.number): max((p.version for p in table.parts.values()), default=0)
                for table in self.tables.values()
                if table.spec.mode.has_rounds
            }
            self._reply(request, meta=packed_json(told))
        elif said["do"] == RELEASE:
            self._held.pop(said["id"], None)
            self._reply(request, meta=b"{}")
        elif said["do"] == HOLD:

            def done(is_whole: bool) -> None:
                self._reply(request, meta=packed_json({"is_whole": is_whole}))

            rounds = {int(number): version for number, version in said["rounds"].items()}
            held = self._held[said["id"]] = Held(self.tables, rounds, self._memory, done)
            self._end_rounds(held)
        else:
            raise ValueError(f"ps.snapshot: cannot {said['do']!r}")

    def _end_rounds(self, *held: Held) -> None:
        """Let snapshots wait no more if nobody is left who could end a round."""
        if set(self._layout.workers) <= self.left:
            for each in held:
                each.take_as_they_are(self.tables)

    def _leave(self, request: Delivery) -> None:
        rank = request.header.origin
        self.left.add(rank)
        self._clocks.leave(rank)
        for table in self.tables.values():
            for part in table.parts.values():
                part.leave(rank)
        self._end_rounds(*self._held.values())
        self._look_at_waiting()
        self._reply(request)

    def _stats(self, request: Delivery) -> None:
        tables = {
            table.spec.name: {
                str(number): asdict(part.traffic) for number, part in table.parts.items()
            }
            for table in self.tables.values()
        }
        told = {
            "server": self.index,
            "requests": self.n_requests,
            "seconds": time.monotonic() - self._began_at,
            "waiting": len(self._waiting),
            "tables": tables,
        }
        self._reply(request, body=self._as_body(told))

    def _described(self, table: Table) -> Bytes:
        return self._as_body(table.described())

    def _as_body(self, told: Any) -> Bytes:
        """Return JSON as a body of any size."""
        return np.frombuffer(packed_json(told), np.uint8).copy()

    @property
    def missing(self) -> Sequence[int]:
        """Workers that some pull waits for."""
        return self._clocks.behind(self._clocks.slowest + 1)
