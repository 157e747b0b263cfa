"""All that a server has, in pieces: for another process, which makes a server like it of them.

The first piece says which tables there are and who is gone; then
comes each partition, as it moves between servers, with the requests that wait there; the last piece
has the replies. Reads that wait are not among them: clients ask them again. What each piece has is
of the moment at which it is made: see replication.py for changes meanwhile.

The rows of a table from which the policy evicts go by an order that is not part of a partition. So
the server that is copied puts them into a new shard, too: both begin alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from ringcomm.errors import RingcommError
from ringcomm.ps.control.commands import Recovered
from ringcomm.ps.partition_state import PartitionState
from ringcomm.ps.protocol.frames import (
    HEADER_NBYTES,
    CallOption,
    EntryOption,
    FrameHeader,
    FrameKind,
    ServerOption,
    Where,
    header_of,
    packed,
)
from ringcomm.ps.protocol.link import Delivery
from ringcomm.ps.server.dense.block import BlockTraffic
from ringcomm.ps.server.homes.home_link import HomeLink, Sent
from ringcomm.ps.server.homes.replication import SentUnits, Way
from ringcomm.ps.server.partition_transfer import put_rows
from ringcomm.ps.server.rows.hash_shard import Shard
from ringcomm.ps.server.rows.row_gradients import RowGradient
from ringcomm.ps.table_spec import Spec

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.server.core.actions import Key
    from ringcomm.ps.server.server import Server

_OF_UNITS: Final = frozenset((FrameKind.PUSH, FrameKind.CALL))
_READS: Final = frozenset((FrameKind.PULL, FrameKind.PULLS))
_LOOKS: Final = frozenset((ServerOption.STATS, ServerOption.MISSING))
_COUNTS: Final = ("version", "stamp", "n_outside", "n_admitted", "n_rejected", "n_evicted")


class CopyPiece(NamedTuple):
    """A part of a server; is_last: no other follows."""

    state: PartitionState
    is_last: bool = False


def is_read(header: FrameHeader) -> bool:
    """Return True for a request that changes nothing, not even if it comes twice."""
    if header.kind == FrameKind.CALL:
        return header.option == CallOption.GET_STATE
    return header.kind in _READS or (header.kind == FrameKind.SERVER and header.option in _LOOKS)


# --- the server that is copied ------------------------------------------------------------------
def way_of(header: FrameHeader, server: Server, sent: SentUnits[Key]) -> Way:
    """Return who carries out a frame that changes something, while pieces are sent."""
    is_of_round = header.kind == FrameKind.ENTER and header.option in (
        EntryOption.IN,
        EntryOption.OUT,
    )
    if header.kind in _OF_UNITS or is_of_round:
        table = server.core.tables.get(header.table)
        return Way.BOTH if table is None else sent.way_of(table.key_of(header.partition))
    return Way.BOTH if header.kind in (FrameKind.TICK, FrameKind.ENTER) else Way.LATER


def may_be_copied(server: Server, link: HomeLink) -> bool:
    """Return True if all that is under way on a server are requests that its core keeps."""
    core = server.core
    if core.migration.is_under_way or core.agreement.awaits_answers:
        return False
    if server.orders.awaits_servers:
        return False
    if not (core.move_lock.is_free and core.moments.is_quiet and server.store.is_quiet):
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
    requests = [request for unit in server.core.units() for request in unit.requests()]
    return [*_changes(requests), *_waiting_for_no_unit(server)]


def _waiting_for_no_unit(server: Server) -> list[Delivery]:
    core = server.core
    commands = [each.request for each in core.agreement.asked()]
    return _changes([*core.progress.requests(), *commands])


def _changes(requests: Iterable[Any]) -> list[Delivery]:
    return [each for each in requests if not is_read(each.header)]


def pieces(server: Server, link: HomeLink, sent: SentUnits[Key]) -> Iterator[CopyPiece]:
    """Yield all that a server has. Raises MemoryError.

    Args:
        server: takes part in no moves meanwhile, and its tables stay.
        link: its wire.
        sent: takes note of each unit.
    """
    yield CopyPiece(_what_is_of_no_unit(server))
    shards = []
    for number, contents in server.catalog.contents.items():
        if contents.shard is not None:
            shards.append((number, contents.shard))
        for part in sorted(contents.parts):
            state = _of_partition(server, number, part)
            sent.end((number, part))
            yield CopyPiece(_with_waiting(server, (number, part), state))
    for number, shard in shards:  # last, for changes of them wait from then on
        yield from _of_shard(server, number, shard, sent)
    replies, of_replies = _packed(link.answers.replies())
    meta = {"replies": replies, "outcome": link.outcome}
    yield CopyPiece(PartitionState(meta, {"replies": of_replies}), is_last=True)


def _what_is_of_no_unit(server: Server) -> PartitionState:
    core, catalog = server.core, server.catalog
    tables = [
        {
            **table.described(), "openers": sorted(table.openers),
            "without": [(n, sorted(workers)) for n, workers in table.without.items()],
        }
        for number, table in core.tables.items()
    ]  # fmt: skip
    waiting, of_waiting = _packed(map(_sent, _waiting_for_no_unit(server)))
    meta = {
        "gone": [sorted(each) for each in (core.left, core.dead, core.rested)],
        "lost": sorted(server.layout.lost), "tables": tables,
        "last": catalog.last, "last_lost": catalog.last_lost,
        "progress": core.progress.state(), "moves": core.migration.state(),
        "newcomers": core.newcomers.state(), "awaits_no_more": core.agreement.state(),
        "recovered": core.recovered, "vacant": sorted(catalog.places.vacant),
        "job": server.job, "n_requests": server.n_requests, "last_order": server.orders.last,
        "waiting": waiting,
    }  # fmt: skip
    return PartitionState(meta, {"waiting": of_waiting})


def _of_shard(
    server: Server, number: int, shard: Shard, sent: SentUnits[Key]
) -> Iterator[CopyPiece]:
    """Yield the pieces of a shard, which nothing changes from then on, until all is sent.

    Not even once it is sent: rows may be in the memory of a worker, which writes there once it has
    its reply, and that would not wait for the follower.
    """
    key, core = (number, 0), server.core
    sent.begin(key)
    meta, hyper = _apart_from_rows(server, number, shard)
    yield CopyPiece(PartitionState({"shard": number, **meta}, {"hyper": hyper}))
    fresh = None
    if shard.can_evict:
        fresh = Shard(shard.spec, core.tables[number].owners, server.index, shard.now)
        _load_shard(fresh, meta, hyper)
    for part in shard.partitions:
        state = _of_partition(server, number, part)
        yield CopyPiece(state)
        if fresh is not None:
            put_rows(fresh, part, PartitionState(state.meta, dict(state.arrays)))
    if fresh is not None:
        server.catalog.contents[number].shard = fresh
        server.store.forget(number)
    yield CopyPiece(_with_waiting(server, key, PartitionState({})))


def _of_partition(server: Server, number: int, part: int) -> PartitionState:
    key = server.core.tables[number].key_of(part)
    state = server.transfer.state_of(key, part)
    unit = server.core.unit_of(key)
    more = {"partition": [number, part], "fence": [*unit.fence.items()]}
    return PartitionState({**state.meta, **more}, state.arrays)


def _with_waiting(server: Server, key: Key, state: PartitionState) -> PartitionState:
    waiting = _changes(server.core.unit_of(key).requests())
    if not waiting:
        return state
    sizes, of_waiting = _packed(map(_sent, waiting))
    return PartitionState({**state.meta, "waiting": sizes}, {**state.arrays, "waiting": of_waiting})


def _sent(request: Delivery) -> tuple[int, Sent]:
    return request.source, Sent(request.header, request.meta, request.body)


def _apart_from_rows(server: Server, number: int, shard: Shard) -> tuple[dict[str, Any], Any]:
    """Return what a shard has beside its partitions, and the hyper-parameters of held gradients."""
    unit = server.core.unit_of((number, 0))
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


def _packed(frames: Iterable[tuple[int, Sent]]) -> tuple[list[tuple[int, int, int]], Bytes]:
    """Return numbers with the sizes of meta and body of their frames, and the frames as bytes."""
    sizes, whole = [], [np.empty(0, np.uint8)]
    for number, (header, meta, body) in frames:
        sizes.append((number, len(meta), body.nbytes))
        head = packed(header._replace(where=Where.NONE)) + meta
        whole += [np.frombuffer(head, np.uint8), body.reshape(-1).view(np.uint8)]
    return sizes, np.concatenate(whole)


# --- the copy -----------------------------------------------------------------------------------
def load(server: Server, link: HomeLink, piece: PartitionState) -> None:
    """Put a piece into a new server; in their order.

    Raises:
        RingcommError: a change that came meanwhile went otherwise here.
    """
    meta = piece.meta
    waiting = [*_unpacked(piece, "waiting")] if "waiting" in meta else []
    piece.arrays.pop("waiting", None)
    if "gone" in meta:
        _load_what_is_of_no_unit(server, piece)
    elif "shard" in meta:
        number = meta["shard"]
        shard, unit = server.catalog.contents[number].shard, server.core.unit_of((number, 0))
        assert shard is not None
        _load_shard(shard, meta, piece.arrays["hyper"])
        for rank, sequence in meta["applied"]:
            unit.applied.note_last(rank, sequence)
        if unit.rounds is not None:
            unit.rounds.resume(*meta["rounds"])
    elif "partition" in meta:
        number, part = meta["partition"]
        server.transfer.put(number, part, piece)
        key = server.core.tables[number].key_of(part)
        server.core.unit_of(key).fence = dict(map(tuple, meta["fence"]))
    elif "replies" in meta:
        link.answers.load(
            (client, header.sequence, Sent(header, text, body))
            for client, (header, text, body) in _unpacked(piece, "replies")
        )
        if link.outcome != meta["outcome"]:
            raise RingcommError(
                "while it was made, one of the two could not carry out a request, for want of "
                "memory perhaps"
            )
    for source, (header, text, body) in waiting:
        link.answers.came(source, header.sequence)
        server.on_request(Delivery(source, header, text, body))


def _load_what_is_of_no_unit(server: Server, piece: PartitionState) -> None:
    meta = piece.meta
    server.layout.lost.update(meta["lost"])
    server.core.departures.lose(*meta["gone"])
    if meta["recovered"] is not None:
        servers, said = meta["recovered"]
        server.core.recovered = Recovered(tuple(servers), said)
    server.core.agreement.load(meta["awaits_no_more"])
    server.core.departures.load_newcomers(meta["newcomers"])
    for each in meta["tables"]:
        number = each["number"]
        spec, owners = Spec.of_json(each["spec"]), each["owners"]
        server.catalog.install(number, spec, owners, awaits_parts=True)
        table = server.core.tables[number]
        table.epochs.update((int(part), epoch) for part, epoch in each["epochs"].items())
        table.openers.update(each["openers"])
        table.without.update((n, {*workers}) for n, workers in each["without"])
    server.catalog.last, server.catalog.last_lost = meta["last"], meta["last_lost"]
    server.catalog.places.vacant = {*meta["vacant"]}
    server.core.migration.load(meta["moves"])
    server.core.progress.load(meta["progress"])
    server.job, server.n_requests = meta["job"], meta["n_requests"]
    server.orders.last = meta["last_order"]


def _load_shard(shard: Shard, meta: dict[str, Any], hyper: Any) -> None:
    """Be a shard of which the partitions are to come."""
    for part in [*shard.partitions]:
        shard.disown(part)
    for name in _COUNTS:
        setattr(shard, name, meta[name])
    shard.traffic = BlockTraffic.of_json(meta["traffic"])
    keys, rows = np.empty(0, np.uint64), np.empty(0, shard.dtype)
    shard.held.gradients = [
        RowGradient(weight, own.copy(), keys, rows, clock)
        for (weight, clock), own in zip(meta["held"], hyper, strict=True)
    ]


def _unpacked(piece: PartitionState, name: str) -> Iterator[tuple[int, Sent]]:
    data, at = piece.arrays[name], 0
    for number, n_meta, n_body in piece.meta[name]:
        header = header_of(data[at : at + HEADER_NBYTES].tobytes())
        at += HEADER_NBYTES
        text, at = data[at : at + n_meta].tobytes(), at + n_meta
        body, at = data[at : at + n_body].copy(), at + n_body
        yield number, Sent(header._replace(n_body=n_body), text, body)
