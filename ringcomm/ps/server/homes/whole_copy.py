"""All that a server has, in pieces: for another process, which makes a server like it of them.

The first piece says which tables there are and who is gone; then comes each partition, as it moves
between servers; the last one has requests that wait, replies, and messages between homes. Reads
that wait are not among them: clients ask them again.

The rows of a table from which the policy evicts go by an order that is not part of a partition. So
the server that is copied puts them into a new shard, too: both begin alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from ringcomm.ps.partition_state import State
from ringcomm.ps.protocol.frames import HEADER_NBYTES, Header, Kind, Where, header_of, packed
from ringcomm.ps.protocol.link import Delivery
from ringcomm.ps.server.dense.block import Traffic
from ringcomm.ps.server.homes.home_link import HomeLink, Sent
from ringcomm.ps.server.homes.replication import LettersState
from ringcomm.ps.server.partition_transfer import put_rows
from ringcomm.ps.server.rows.decode_and_hold_row_pushes import RowGradient
from ringcomm.ps.server.rows.hash_shard import Shard
from ringcomm.ps.table_spec import Spec

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.server.server import Server

_READS: Final = frozenset((Kind.PULL, Kind.PULLS, Kind.STATS, Kind.MISSING))
_COUNTS: Final = ("version", "stamp", "n_admitted", "n_rejected", "n_evicted")


class Piece(NamedTuple):
    """A part of a server; is_last: no other follows."""

    state: State
    is_last: bool = False


def is_read(header: Header) -> bool:
    """Return True for a request that changes nothing, not even if it comes twice."""
    return header.kind in _READS or (header.kind == Kind.STATE and not header.n_body)


# --- the server that is copied ------------------------------------------------------------------
def may_be_copied(server: Server, link: HomeLink) -> bool:
    """Return True if all that is under way on a server are requests that its core keeps."""
    core = server.core
    if core.migration.is_under_way or not (core.moments.is_quiet and server.store.is_quiet):
        return False
    left = server.core.left
    known = {(each.source, each.header.sequence) for each in _waiting(server)}
    asked = link.answers.waiting()
    return {each for each in asked if each[0] not in left} == {
        each for each in known if each[0] not in left
    }


def _waiting(server: Server) -> list[Delivery]:
    """Return the requests that wait, as the copy may carry them out.

    There they wait, too: what one waits for is neither there, nor among the others.
    """
    core = server.core
    requests = [request for unit in core.units() for request in unit.requests()]
    requests += core.progress.requests()
    requests += [request for table in core.tables.values() for request in table.closing]
    return [each for each in requests if not is_read(each.header)]


def pieces(server: Server, link: HomeLink) -> Iterator[Piece]:
    """Yield all that a server has, which does nothing meanwhile. Raises MemoryError."""
    core, catalog = server.core, server.catalog
    gone = [sorted(each) for each in (core.left, core.dead, core.rested)]
    tables = [
        {
            **catalog.described(number), "openers": sorted(table.openers),
            "without": [(n, sorted(workers)) for n, workers in table.without.items()],
        }
        for number, table in core.tables.items()
    ]  # fmt: skip
    more = {
        "tables": tables, "last": catalog.last, "progress": core.progress.state(),
        "moves": core.migration.state(), "recovered": core.recovery.state(),
        "lost": sorted(server.layout.lost), "vacant": sorted(catalog.places.vacant),
        "job": server.job, "n_requests": server.n_requests,
    }  # fmt: skip
    shards = {n: _of_shard(server, n) for n, c in catalog.contents.items() if c.shard is not None}
    arrays = {f"hyper{n}": hyper for n, (_, hyper) in shards.items()}
    of_shards = [(n, meta) for n, (meta, _) in shards.items()]
    yield Piece(State({"gone": gone, **more, "shards": of_shards}, arrays))
    for number, contents in catalog.contents.items():
        shard, fresh = contents.shard, None
        if shard is None:
            for part in sorted(contents.parts):
                yield _of_partition(server, number, part)
            continue
        if shard.can_evict:
            owners = core.tables[number].owners
            fresh = Shard(shard.spec, owners, server.index, shard.now)
            _load_shard(fresh, *shards[number])
        for part in shard.partitions:
            piece = _of_partition(server, number, part)
            yield piece
            if fresh is not None:
                put_rows(fresh, part, State(piece.state.meta, dict(piece.state.arrays)))
        if fresh is not None:
            contents.shard = fresh
            server.store.forget(number)
    yield Piece(_rest(server, link), is_last=True)


def _of_partition(server: Server, number: int, part: int) -> Piece:
    key = server.core.tables[number].key_of(part)
    state = server.transfer.state_of(key, part)
    unit = server.core.unit_of(key)
    more = {"partition": [number, part], "fence": [*unit.fence.items()]}
    return Piece(State({**state.meta, **more}, state.arrays))


def _of_shard(server: Server, number: int) -> tuple[dict[str, Any], Any]:
    """Return what a shard has beside its partitions, and the hyper-parameters of held gradients."""
    shard, unit = server.catalog.contents[number].shard, server.core.unit_of((number, 0))
    assert shard is not None
    meta: dict[str, Any] = {name: getattr(shard, name) for name in _COUNTS}
    meta["applied"] = sorted(unit.applied_without_pending().items())
    meta["traffic"] = asdict(shard.traffic)
    meta["held"] = [(each.weight, each.clock) for each in shard.held.gradients]
    rounds = unit.rounds
    if rounds is not None:
        held = None if rounds.held is None else sorted(rounds.held)
        meta["rounds"] = [rounds.current, rounds.let_in(), held]
    hyper = [each.hyper for each in shard.held.gradients]
    return meta, np.array(hyper, np.float64)  # one row for each


def _rest(server: Server, link: HomeLink) -> State:
    waiting = [(each.source, Sent(each.header, each.meta, each.body)) for each in _waiting(server)]
    kinds = {"waiting": waiting, "replies": link.answers.replies()}
    letters = link.letters.state()
    kinds["letters"] = [(number, sent) for number, (_, sent) in enumerate(letters.unconfirmed)]
    meta: dict[str, Any] = {
        "written": [*letters.written.items()], "heard": [*letters.heard.items()],
        "numbers": [name for name, _ in letters.unconfirmed],
    }  # fmt: skip
    arrays = {}
    for name, frames in kinds.items():
        meta[name], arrays[name] = _packed(frames)
    return State(meta, arrays)


def _packed(frames: Iterable[tuple[int, Sent]]) -> tuple[list[tuple[int, int, int]], Bytes]:
    """Return numbers with the sizes of meta and body of their frames, and the frames as bytes."""
    sizes, whole = [], [np.empty(0, np.uint8)]
    for number, (header, meta, body) in frames:
        sizes.append((number, len(meta), body.nbytes))
        head = packed(header._replace(where=Where.NONE)) + meta
        whole += [np.frombuffer(head, np.uint8), body.reshape(-1).view(np.uint8)]
    return sizes, np.concatenate(whole)


# --- the copy -----------------------------------------------------------------------------------
def load(server: Server, link: HomeLink, piece: State) -> None:
    """Put a piece into a new server; in their order."""
    meta = piece.meta
    if "gone" in meta:
        server.layout.lost.update(meta["lost"])
        server.core.departures.lose(*meta["gone"])
        server.core.recovery.load(meta["recovered"])
        for each in meta["tables"]:
            number = each["number"]
            server.catalog.install(number, Spec.of_json(each["spec"]), each["owners"])
            table = server.core.tables[number]
            table.epochs.update((int(part), epoch) for part, epoch in each["epochs"].items())
            table.openers.update(each["openers"])
            table.without.update((n, {*workers}) for n, workers in each["without"])
        server.catalog.last = meta["last"]
        server.catalog.places.vacant = {*meta["vacant"]}
        server.core.migration.load(meta["moves"])
        server.core.progress.load(meta["progress"])
        server.job, server.n_requests = meta["job"], meta["n_requests"]
        for number, of_shard in meta["shards"]:
            shard, unit = server.catalog.contents[number].shard, server.core.unit_of((number, 0))
            assert shard is not None
            _load_shard(shard, of_shard, piece.arrays[f"hyper{number}"])
            for rank, sequence in of_shard["applied"]:
                unit.applied.note_last(rank, sequence)
            if unit.rounds is not None:
                unit.rounds.resume(*of_shard["rounds"])
    elif "partition" in meta:
        number, part = meta["partition"]
        server.transfer.put(number, part, piece)
        key = server.core.tables[number].key_of(part)
        server.core.unit_of(key).fence = dict(map(tuple, meta["fence"]))
    else:
        _load_rest(server, link, piece)


def _load_shard(shard: Shard, meta: dict[str, Any], hyper: Any) -> None:
    """Be a shard of which the partitions are to come."""
    for part in [*shard.partitions]:
        shard.disown(part)
    for name in _COUNTS:
        setattr(shard, name, meta[name])
    shard.traffic = Traffic.of_json(meta["traffic"])
    keys, rows = np.empty(0, np.uint64), np.empty(0, shard.dtype)
    shard.held.gradients = [
        RowGradient(weight, own.copy(), keys, rows, clock)
        for (weight, clock), own in zip(meta["held"], hyper, strict=True)
    ]


def _load_rest(server: Server, link: HomeLink, piece: State) -> None:
    meta = piece.meta
    for client, (header, text, body) in _unpacked(piece, "replies"):
        link.answers.came(client, header.sequence)
        link.answers.note(client, header.sequence, Sent(header, text, body))
    letters = [sent for _, sent in _unpacked(piece, "letters")]
    unconfirmed = [*zip(map(tuple, meta["numbers"]), letters, strict=True)]
    link.letters.load(LettersState(dict(meta["written"]), dict(meta["heard"]), unconfirmed))
    for source, (header, text, body) in _unpacked(piece, "waiting"):
        link.answers.came(source, header.sequence)
        server.on_request(Delivery(source, header, text, body))


def _unpacked(piece: State, name: str) -> Iterator[tuple[int, Sent]]:
    data, at = piece.arrays[name], 0
    for number, n_meta, n_body in piece.meta[name]:
        header = header_of(data[at : at + HEADER_NBYTES].tobytes())
        at += HEADER_NBYTES
        text, at = data[at : at + n_meta].tobytes(), at + n_meta
        body, at = data[at : at + n_body].copy(), at + n_body
        yield number, Sent(header._replace(n_body=n_body), text, body)
