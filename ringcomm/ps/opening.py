"""How tables come into being: the leader places one, and all servers know it before it is used.

The leader makes its own part, tells the others (VIEW), and answers who asked once all have made
theirs. If one cannot, the table is dropped everywhere and who asked is told why.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ringcomm.errors import RingcommError
from ringcomm.ps import placement
from ringcomm.ps.client import error_text
from ringcomm.ps.dense import DensePartition
from ringcomm.ps.frames import Header, Kind, Status
from ringcomm.ps.hashed import Shard
from ringcomm.ps.messages import packed_json
from ringcomm.ps.optim import from_json
from ringcomm.ps.room import available_nbytes
from ringcomm.ps.spec import Spec

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.link import Delivery
    from ringcomm.ps.serving import Server

ADOPT, ADOPTED, DROP = 0, 1, 2  # options of Kind.VIEW
LIST = 1  # option of Kind.CREATE: tell all tables


@dataclass
class Table:
    """A table, as far as this server has it.

    Attributes:
        number: of the table in messages.
        spec: what it is.
        owners: of each partition: its server.
        epochs: of partitions that have moved: the number of the view in which they did.
        parts: partitions of this server, by number; of a dense table.
        shard: of a hash table.
    """

    number: int
    spec: Spec
    owners: list[int]
    parts: dict[int, DensePartition] = field(default_factory=dict)
    epochs: dict[int, int] = field(default_factory=dict)
    shard: Shard | None = None

    def held_alike(self) -> list[DensePartition | Shard]:
        """Return what of it has versions of its own on this server."""
        return [*self.parts.values(), *([self.shard] if self.shard is not None else [])]

    def loads(self) -> dict[int, int]:
        """Return the bytes of a dense table by server."""
        return {owner: n * self.part_nbytes for owner, n in Counter(self.owners).items()}

    @property
    def part_nbytes(self) -> int:
        """Bytes of a partition of a dense table, about."""
        if self.spec.kind != "dense":
            return 0
        return self.spec.count * np.dtype(self.spec.dtype).itemsize // len(self.owners)

    def described(self) -> dict[str, Any]:
        """Return what others need to know of it."""
        told = {"number": self.number, "spec": self.spec.to_json(), "owners": self.owners}
        return {**told, "epochs": self.epochs}


@dataclass
class _Opening:
    """A table that the leader is about to make known to all servers."""

    table: Table
    awaited: set[int]
    asked: list[Delivery]
    problems: list[str] = field(default_factory=list)


class Opener:
    """What one server does to open tables.

    Args:
        server: whose tables they are.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._by_name: dict[str, Table] = {}
        self._opening: dict[str, _Opening] = {}
        self._numbers: Final = itertools.count(1)
        self._loads: Counter[int] = Counter()  # bytes of dense tables, by server

    def known(self) -> list[Table]:
        """Return the tables that all servers know; for the leader."""
        tables = self._server.tables.values()
        return [table for table in tables if table.spec.name not in self._opening]

    # --- the leader -----------------------------------------------------------------------------
    def create(self, request: Delivery) -> None:
        """Open a table for a client; the first one makes it. Or tell which there are."""
        if request.header.option == LIST:
            self._reply(request, [table.described() for table in self.known()])
            return
        spec = Spec.of_json(json.loads(request.meta))
        if spec.name in self._opening:
            opening = self._opening[spec.name]
            opening.table.spec.require_same(spec, request.source)
            opening.asked.append(request)
            return
        known = self._by_name.get(spec.name)
        if known is not None:
            known.spec.require_same(spec, request.source)
            self._reply(request, known.described())
            return
        server = self._server
        table = Table(next(self._numbers), spec, self._place(spec))
        self._install(table)
        others = set(range(server.n_servers)) - {server.index}
        opening = self._opening[spec.name] = _Opening(table, others, [request])
        for other in others:
            header = Header(Kind.VIEW, sequence=table.number, option=ADOPT)
            server.send(server.rank_of(other), header, b"", _as_body(table.described()))
        self._open_if_known(opening)

    def _place(self, spec: Spec) -> list[int]:
        servers = list(range(self._server.n_servers))
        if spec.kind == "hash":
            return placement.place_hashed(spec.name, servers, spec.partitions)
        bounds = placement.cuts(spec.count, spec.block)
        itemsize = np.dtype(spec.dtype).itemsize
        sizes = [(b - a) * itemsize for a, b in itertools.pairwise(bounds)]
        return placement.place_dense(sizes, self._loads, servers)

    def _adopted(self, delivery: Delivery) -> None:
        """Another server knows a table now, or says why not. For the leader."""
        said = json.loads(delivery.meta)
        opening = self._opening[said["name"]]
        if said["why"]:
            opening.problems.append(f"server {said['server']}: {said['why']}")
        opening.awaited.discard(said["server"])
        self._open_if_known(opening)

    def _open_if_known(self, opening: _Opening) -> None:
        if opening.awaited:
            return
        table = opening.table
        del self._opening[table.spec.name]
        if not opening.problems:
            for request in opening.asked:
                self._reply(request, table.described())
            return
        self._forget(table.number)
        server = self._server
        for other in set(range(server.n_servers)) - {server.index}:
            header = Header(Kind.VIEW, sequence=table.number, option=DROP)
            server.send(server.rank_of(other), header)
        error = RingcommError(
            f"table[{table.spec.name}]: cannot be made: {'; '.join(opening.problems)}"
        )
        for request in opening.asked:
            server.reply(request, status=Status.FAILED, meta=error_text(error))

    # --- all servers ----------------------------------------------------------------------------
    def on_view(self, delivery: Delivery) -> None:
        """Do what a frame of Kind.VIEW says."""
        option = delivery.header.option
        if option == ADOPT:
            self._adopt(delivery)
        elif option == ADOPTED:
            self._adopted(delivery)
        else:
            self._forget(delivery.header.sequence)

    def _adopt(self, request: Delivery) -> None:
        """Take note of a table that the leader has placed; or say why it cannot be."""
        told, why = json.loads(request.body.tobytes()), ""
        try:
            self._install(Table(told["number"], Spec.of_json(told["spec"]), told["owners"]))
        except Exception as error:  # noqa: BLE001 - who opens the table is told
            why = f"{type(error).__name__}: {error}"
        server = self._server
        said = {"name": told["spec"]["name"], "server": server.index, "why": why[:2000]}
        header = Header(Kind.VIEW, sequence=told["number"], option=ADOPTED)
        server.send(request.source, header, packed_json(said))

    def _install(self, table: Table) -> None:
        spec, server = table.spec, self._server
        parts: dict[int, DensePartition] = {}
        if spec.kind == "hash":
            table.shard = Shard(spec, table.owners, server.index, server.live_workers())
        else:
            bounds = placement.cuts(spec.count, spec.block)
            self._require_room(table, bounds)
            for part, owner in enumerate(table.owners):
                if owner == server.index:
                    parts[part] = self.new_partition(table, bounds[part], bounds[part + 1])
        server.tables[table.number] = self._by_name[spec.name] = table
        changes = {(table.number, i): (owner,) for i, owner in enumerate(table.owners)}
        server.view = server.view.with_(changes)
        self._loads.update(table.loads())
        server.hold_back(table)
        for number, each in parts.items():
            server.keep(table, number, each)

    def _require_room(self, table: Table, bounds: Sequence[int]) -> None:
        """Raise RingcommError if this machine has no memory for what this server is to own."""
        spec, server = table.spec, self._server
        pairs = zip(table.owners, itertools.pairwise(bounds), strict=True)
        count = sum(stop - start for owner, (start, stop) in pairs if owner == server.index)
        n_arrays = 1 + from_json(spec.updater).n_full_slots
        nbytes, available = count * np.dtype(spec.dtype).itemsize * n_arrays, available_nbytes()
        if nbytes > available:
            raise RingcommError(
                f"table[{spec.name}]: server {server.index} on {os.uname().nodename} is to own "
                f"{nbytes} bytes of its {spec.count} elements and their updater's state, and the "
                f"machine has {available}. Use more servers on other machines, or a smaller table"
            )

    def _forget(self, number: int) -> None:
        """Drop a table that could not be made everywhere; nobody has used it."""
        table = self._server.tables.pop(number, None)
        if table is not None:
            self._loads.subtract(table.loads())
            for part in list(table.parts):
                self._server.release(table, part)
            del self._by_name[table.spec.name]

    def give(self, table: Table, part: int, owner: int) -> None:
        """Let a server own a partition of a dense table."""
        self._loads[table.owners[part]] -= table.part_nbytes
        table.owners[part] = owner
        self._loads[owner] += table.part_nbytes

    def new_partition(self, table: Table, start: int, stop: int) -> DensePartition:
        """Return a slice of a table, as it begins."""
        server = self._server
        return DensePartition(table.spec, start, stop, server.memory, server.live_workers())

    def _reply(self, request: Delivery, told: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        self._server.reply(request, body=_as_body(told))


def _as_body(told: Any) -> Bytes:
    """Return JSON as a body of any size."""
    return np.frombuffer(packed_json(told), np.uint8).copy()
