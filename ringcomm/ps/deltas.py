"""What has changed since a process looked last, a client's side: blocks, and rows."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringcomm import _core
from ringcomm.ps.changes import STAMP, Place
from ringcomm.ps.client import Ask
from ringcomm.ps.frames import Kind
from ringcomm.ps.future import Future
from ringcomm.ps.messages import READ_BLOCK, UNCHANGED, WANT_COPY, WANT_EXACT, packed_json
from ringcomm.ps.state import State

if TYPE_CHECKING:
    from ringcomm.ps.client import Client
    from ringcomm.ps.link import Delivery
    from ringcomm.ps.table import Table

Array = NDArray[Any]
Keys = NDArray[np.uint64]
_NEVER = (0, 0)  # no life has this number


@dataclass(frozen=True)
class Stamp:
    """When a process looked at a table; for it alone, to be passed as `since`.

    Attributes:
        table: its name.
        seen: of each block, or of each server's part of a hash table: how often it had changed, and
            in which life.
    """

    table: str
    seen: tuple[tuple[int, int], ...] = field(repr=False)


class Delta(NamedTuple):
    """The blocks of a dense table that have changed.

    Attributes:
        stamp: for the next pull(since=stamp).
        blocks: (where, values): which elements of the flat table, and what they are now.
    """

    stamp: Stamp
    blocks: list[tuple[slice, Array]]


class RowDelta(NamedTuple):
    """The rows of a hash table that have changed.

    Attributes:
        stamp: for the next changed(since=stamp).
        keys: shape (n,), uint64, of rows that have changed or are new.
        rows: shape (n, dim).
        erased: keys whose rows were erased or evicted; those among `keys` have come again since.
        renewed: partitions of which all rows are told: what was known of others in them is not
            valid any more; see update(). All of them if `since` was 0.
        n_partitions: of the table.
    """

    stamp: Stamp
    keys: Keys
    rows: Array
    erased: Keys
    renewed: NDArray[np.uint32]
    n_partitions: int

    def update(self, known: MutableMapping[int, Array]) -> None:
        """Let rows by key, as they were at the stamp that was passed, be what they are now."""
        for key in self._outdated(known):
            known.pop(key, None)
        for key, row in zip(self.keys.tolist(), self.rows, strict=True):
            known[key] = row

    def _outdated(self, known: MutableMapping[int, Array]) -> list[int]:
        gone: list[int] = self.erased.tolist()
        if len(self.renewed) and known:
            keys = np.fromiter(known, np.uint64, len(known))
            parts = np.empty(len(keys), np.uint32)
            _core.partition_of(keys, self.n_partitions, parts)
            gone += keys[np.isin(parts, self.renewed)].tolist()
        return gone


def pull_delta(
    table: Table, since: Stamp | int, out: Array | None, *, waits: bool = True
) -> Future[Delta]:
    """Fetch the blocks of a table that have changed; see Table.pull().

    Args:
        table: whose.
        since: see Table.pull().
        out: flat.
        waits: for rounds and slow workers, as a pull does.
    """
    n = table.n_partitions
    seen = list(_seen(f"pull[{table.name}]", table.name, since, n))
    came: dict[int, Array] = {}

    def ask(part: int, *, option: int = WANT_EXACT) -> Ask:
        first, last = table.bounds_of(part)

        def note(reply: Delivery) -> Ask | None:
            stamp, life = STAMP.unpack(reply.meta)
            version = reply.header.clock
            if reply.header.option != UNCHANGED:
                target = np.empty(last - first, table.dtype) if out is None else out[first:last]
                if reply.header.option == READ_BLOCK:
                    newest = _core.read_block(reply.body, target.view(np.uint8))
                    if newest < 0:  # updates come faster than it can be read
                        return ask(part, option=WANT_EXACT | WANT_COPY)
                    version, stamp = version + newest - stamp, newest
                else:
                    target.view(np.uint8)[:] = reply.body
                came[part] = target
            seen[part] = (stamp, life)
            table.note_version(part, version, reply.header.clock)
            return None

        return Ask(
            Kind.CHANGES,
            (table.number, part),
            clock=table.wanted(part) if waits else 0,
            option=option,
            meta=STAMP.pack(*seen[part]),
            on_reply=note,
        )

    def finish() -> Delta:
        blocks = [(slice(*table.bounds_of(part)), came[part]) for part in sorted(came)]
        return Delta(Stamp(table.name, tuple(seen)), blocks)

    client = table.client
    future = Future(client, f"pull[{table.name}]", n, finish, client.timestamp())
    client.ask([ask(part) for part in range(n)], future)
    return future


def pull_row_delta(
    client: Client,
    name: str,
    since: Stamp | int,
    *,
    number: int,
    clock: int,
    n_partitions: int,
    note_version: Callable[[int, int], object] = lambda server, version: None,
) -> Future[RowDelta]:
    """Fetch the rows of a hash table that have changed; see HashTable.changed().

    Args:
        client: of this rank.
        name: of the table.
        since: see HashTable.changed().
        number: of the table.
        clock: how much must be in the rows, see Header.
        n_partitions: of the table.
        note_version: called with each server and the version that all of its rows have at least.
    """
    n = client.n_servers
    seen = list(_seen(f"changed[{name}]", name, since, n))
    pages: list[list[State]] = [[] for _ in range(n)]

    def ask(server: int, until: int | None = None, place: Place | None = None) -> Ask:
        def note(reply: Delivery) -> Ask | None:
            page = State.unpacked(reply.body)
            arrays = {key: array.copy() for key, array in page.arrays.items()}
            if not pages[server]:
                note_version(server, reply.header.clock)
            pages[server].append(State(page.meta, arrays))
            if page.meta["next"] is None:
                return None
            return ask(server, page.meta["stamp"], Place(*page.meta["next"]))

        stamp, life = seen[server]
        said = {"stamp": stamp, "life": life, "until": until, "place": place or Place()}
        return Ask(
            Kind.CHANGES, server=server, table=number, clock=clock, meta=packed_json(said),
            on_reply=note,
        )  # fmt: skip

    def finish() -> RowDelta:
        told = [page for of_server in pages for page in of_server]
        now = tuple((each[-1].meta["stamp"], each[-1].meta["life"]) for each in pages)

        def joined(key: str) -> Array:
            return np.concatenate([page.arrays[key] for page in told])

        return RowDelta(
            Stamp(name, now), joined("keys"), joined("rows"), joined("erased"), joined("renewed"),
            n_partitions,
        )  # fmt: skip

    future = Future(client, f"changed[{name}]", n, finish, client.timestamp())
    client.ask([ask(server) for server in range(n)], future)
    return future


def _seen(label: str, table: str, since: Stamp | int, n: int) -> tuple[tuple[int, int], ...]:
    """Return what a stamp says of each of n; of another number of them it says nothing.

    Raises:
        ValueError, TypeError: it is no stamp of this table.
    """
    if isinstance(since, Stamp):
        if since.table != table:
            raise ValueError(f"{label}: since is a stamp of table {since.table!r}")
        return since.seen if len(since.seen) == n else (_NEVER,) * n
    if isinstance(since, int) and since == 0:
        return (_NEVER,) * n
    raise TypeError(f"{label}: since is {since!r}; it must be 0, or the stamp of an earlier one")
