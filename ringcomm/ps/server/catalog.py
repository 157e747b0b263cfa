"""The tables of one server: makes and drops them, and places new ones if it leads.

See ringcomm.ps.control.commands for how a table is made on all servers, or goes.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ringcomm.errors import RingcommError
from ringcomm.ps.optim import from_json
from ringcomm.ps.placement.partitions import (
    cuts,
    place_dense,
    place_hashed,
    some_of,
)
from ringcomm.ps.placement.places import Places
from ringcomm.ps.row_policies import Evict
from ringcomm.ps.server.contents import Contents
from ringcomm.ps.server.core.actions import Close, Moved
from ringcomm.ps.server.core.core_table import ServedTable
from ringcomm.ps.server.core.unit import Applied, AppliedHere, Unit
from ringcomm.ps.server.dense.partition import DensePartition
from ringcomm.ps.server.rows.hash_shard import Shard
from ringcomm.ps.table_spec import Spec
from ringcomm.system_text import host_name, read_text

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.placement.partitions import Move
    from ringcomm.ps.roles import Layout
    from ringcomm.ps.server.core.actions import Action
    from ringcomm.ps.server.core.core import Core
    from ringcomm.ps.server.replies import Replies

# --- memory of this host --------------------------------------------------------------------------
_MEMINFO: Final = Path("/proc/meminfo")
_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")  # of a container; "max" where it has none


def available_nbytes() -> int:
    """Return the bytes of memory that this machine, or container, can give at most.

    Linux gives memory before it has it: a process that uses more is killed, and says nothing.
    """
    found = re.search(r"MemAvailable: +(\d+) kB", read_text(_MEMINFO))
    available = 1 << 63 if found is None else int(found[1]) * 1024
    try:
        limit = read_text(_LIMIT).strip()
    except OSError:
        return available
    return min(available, int(limit)) if limit.isdecimal() else available


class Catalog:
    """The tables of one server, and how they are opened.

    Args:
        index: of the server.
        layout: who is who.
        core: decides about what is in the tables.
        memory: returns memory that clients on this node map.
        replies: to clients and servers.
        perform: carries out actions.
        time_of_rows: the time by which rows age.

    Attributes:
        contents: of the tables, by number.
        on_forget: called with the number of a table that is dropped; set before the first is.
        on_restart: called when all that there is goes; likewise.
        last: number of the table that was opened last.
        last_lost: tables up to this number went when a server was lost.
        places: which servers have partitions; for the leader.
        is_copy: another server, which has the same, has seen to it that there is room for both.
    """

    on_forget: Callable[[int], object]
    on_restart: Callable[[], object]

    def __init__(
        self,
        index: int,
        layout: Layout,
        core: Core,
        *,
        memory: Callable[[int], Bytes],
        replies: Replies,
        perform: Callable[[Iterable[Action]], None],
        time_of_rows: Callable[[], float],
    ) -> None:
        self._index, self._layout, self._core = index, layout, core
        self._memory, self._replies, self._perform = memory, replies, perform
        self._time_of_rows, self.is_copy, self.last, self.last_lost = time_of_rows, False, 0, 0
        self.contents: dict[int, Contents] = {}
        self._by_name: dict[str, int] = {}
        self._loads: Counter[int] = Counter()  # bytes of dense tables, by server
        self.places = Places(layout)

    def known(self) -> dict[int, Spec]:
        """Return the tables that all servers know; for the leader."""
        tables = self._core.tables
        return {n: contents.spec for n, contents in self.contents.items() if tables[n].is_open}

    # --- the leader -----------------------------------------------------------------------------
    def begin(self, spec: Spec, opener: int) -> int:
        """Return the number of a table that a rank opens; if it is new, make this server's part.

        Raises:
            MismatchError: it is there, with another spec.
            RingcommError, MemoryError: it cannot be made.
        """
        number = self._by_name.get(spec.name)
        if number is None:
            number = self.last + 1
            self.install(number, spec, self._place(spec))
            self._core.tables[number].is_open = False
        else:
            self.contents[number].spec.require_same(spec, opener)
        self._core.tables[number].openers.add(opener)
        return number

    def _place(self, spec: Spec) -> list[int]:
        servers = self.places.taken()
        if spec.kind == "hash":
            evict = spec.policies["evict"]
            n = len(servers) if evict is None else Evict(**evict).n_servers(len(servers))
            chosen = some_of(spec.name, servers, n)
            return place_hashed(spec.name, chosen, spec.partitions)
        bounds = cuts(spec.count, spec.block)
        itemsize = np.dtype(spec.dtype).itemsize
        sizes = [(b - a) * itemsize for a, b in itertools.pairwise(bounds)]
        return place_dense(sizes, self._loads, servers)

    def displaced(self, hosts: Mapping[int, int]) -> list[Move]:
        """Return moves of what is on servers without a place; see Places.moves()."""
        vacant, moves = self.places.vacant, []
        for number, spec in sorted(self.known().items()):
            owners = self._core.tables[number].owners
            if not vacant.isdisjoint(owners) and not self._stays(spec):
                moves += self.places.moves(number, owners, hosts)
        return moves

    def that_stay(self, servers: Collection[int]) -> list[str]:
        return [
            spec.name for number, spec in sorted(self.known().items())
            if not {*servers}.isdisjoint(self._core.tables[number].owners) and self._stays(spec)
        ]  # fmt: skip

    def _stays(self, spec: Spec) -> bool:
        """Return True if a hash table is to stay on few servers; see row_policies.Evict."""
        evict = None if spec.kind == "dense" else spec.policies["evict"]
        n = self.places.n_at_first
        return evict is not None and Evict(**evict).n_servers(n) < n

    def note_moved(self, action: Moved) -> None:
        nbytes = _part_nbytes(self.contents[action.key[0]].spec)
        for source, dest in action.servers:
            self._loads[source] -= nbytes
            self._loads[dest] += nbytes

    def reopen(self, users: Mapping[int, Mapping[str, tuple[int, dict[str, Any]]]]) -> None:
        """Place all tables anew on the servers that live, and make this one's part.

        Args:
            users: the tables that each rank uses: name -> old number, and the spec. They are all
                that a spare knows which is in the first server's place.
        """
        used = {name: each for tables in users.values() for name, each in tables.items()}
        specs = {spec.name: spec for _, spec in sorted(self.known().items())}
        for name, (_, text) in sorted(used.items(), key=lambda item: item[1][0]):
            specs.setdefault(name, Spec.of_json(text))
        self.last = max([self.last, *(number for number, _ in used.values())])
        self._restart()
        first = self.last + 1
        self.places.restart()
        for number, spec in enumerate(specs.values(), first):
            self.install(number, spec, self._place(spec))
            openers = {rank for rank, tables in users.items() if spec.name in tables}
            self._core.tables[number].openers |= openers

    # --- all servers ----------------------------------------------------------------------------
    def make(self, tables: Iterable[Mapping[str, Any]]) -> None:
        """Make this server's part of tables that the leader has placed."""
        for each in tables:
            self.install(each["number"], Spec.of_json(each["spec"]), each["owners"])

    def make_all(self, content: Sequence[Any]) -> None:
        """Make all tables anew, after a loss: who has a place by now, and the tables."""
        taken, tables = content
        self._restart()
        self._core.departures.keep(taken)
        self.make(tables)

    def _restart(self) -> None:
        self.last_lost = self.last
        self.on_restart()

    def clear(self) -> None:
        for number in [*self.contents]:
            self.forget(number)
        self._loads.clear()

    def install(
        self, number: int, spec: Spec, owners: list[int], *, awaits_parts: bool = False
    ) -> None:
        """Add a table to this server; awaits_parts: its partitions of a dense one are to come."""
        contents, core = Contents(spec), self._core
        if spec.kind == "hash":
            contents.shard = Shard(spec, owners, self._index, self._time_of_rows)
        elif not awaits_parts:
            bounds = cuts(spec.count, spec.block)
            self._require_room(spec, owners, bounds)
            for part, owner in enumerate(owners):
                if owner == self._index:
                    slice_ = bounds[part], bounds[part + 1]
                    contents.parts[part] = DensePartition(spec, *slice_, self._memory)
        self.last = max(self.last, number)
        self.contents[number] = contents
        self._by_name[spec.name] = number
        self._count(spec, owners, 1)
        is_dense = spec.kind == "dense"
        table = ServedTable(number, spec.name, spec.mode, is_dense, owners, spec.to_json())
        core.add_table(table)
        if contents.shard is not None:
            self.add_unit(number, 0)
        for part in contents.parts:
            self.add_unit(number, part)

    def add_unit(self, number: int, part: int) -> Unit:
        """Add a partition of a dense table, or a shard, to the core, which decides about it."""
        contents, core = self.contents[number], self._core
        applied: Applied = AppliedHere()
        is_ready = True  # what a row begins with is known from the start
        if contents.shard is None:
            applied = dense = contents.parts[part]
            is_ready = dense.is_ready
        unit = Unit(
            (number, part), contents.spec.mode, applied, core.live_workers, is_ready=is_ready
        )
        self._perform(core.add_unit(unit))
        return unit

    def _require_room(self, spec: Spec, owners: list[int], bounds: Sequence[int]) -> None:
        """Raise RingcommError if this machine has no memory for what this server is to own."""
        pairs = zip(owners, itertools.pairwise(bounds), strict=True)
        count = sum(stop - start for owner, (start, stop) in pairs if owner == self._index)
        n_arrays = 1 + from_json(spec.updater).n_full_slots
        n_arrays *= self._layout.replication
        nbytes, available = count * np.dtype(spec.dtype).itemsize * n_arrays, available_nbytes()
        if nbytes > available and not self.is_copy:
            raise RingcommError(
                f"table[{spec.name}]: server {self._index} on {host_name()} is to own "
                f"{nbytes} bytes of its {spec.count} elements and their updater's state, and the "
                f"machine has {available}. Use more servers on other machines, or a smaller table"
            )

    def forget(self, number: int) -> None:
        """Drop a table that nobody uses: it is closed, or could not be made everywhere."""
        contents = self.contents.get(number)
        if contents is not None:
            self._perform([Close((number, part)) for part in contents.parts])
            del self.contents[number]
            del self._by_name[contents.spec.name]
            self._count(contents.spec, self._core.tables[number].owners, -1)
            self._core.drop_table(number)
            self.on_forget(number)

    def _count(self, spec: Spec, owners: list[int], sign: int) -> None:
        for server, n in Counter(owners).items():
            self._loads[server] += n * sign * _part_nbytes(spec)


def _part_nbytes(spec: Spec) -> int:
    if spec.kind == "hash":
        return 0
    return spec.count * np.dtype(spec.dtype).itemsize // spec.partitions
