"""ps.rebalance(): moves partitions so that all servers are equally busy."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from ringcomm.errors import RingcommError
from ringcomm.ps.client.future import Future
from ringcomm.ps.client.json_requests import ask_json, json_of, request_command
from ringcomm.ps.placement.partitions import (
    Move,
    Partition,
    PlacementView,
    plan_moves,
)
from ringcomm.ps.protocol.frame_meta import packed_json
from ringcomm.ps.protocol.frames import ServerOption
from ringcomm.ps.session import Session, session
from ringcomm.ps.statistics import counted_since

R = TypeVar("R")
# A request costs a server as much as so many bytes: it took 20-26 us with 1 KB and 606-857 us with
# 4 MB (measured).
REQUEST_NBYTES: Final = 128 << 10
_before: Final[weakref.WeakKeyDictionary[Session, dict[Partition, float]]] = (
    weakref.WeakKeyDictionary()
)


class Rebalanced(NamedTuple):
    """The result of a rebalance.

    Attributes:
        moved: partitions that have changed their server.
        load: share of the traffic that each server had, by server: of 1.
        load_after: the share that each would have had with the new placement.
    """

    moved: int
    load: tuple[float, ...]
    load_after: tuple[float, ...]


def rebalance(*, slack: float = 0.1) -> Future[Rebalanced]:
    """Move partitions so that the traffic since the last rebalance would have been spread evenly.

    Any worker may call it, while all go on: a partition that moves answers a little later, and no
    push is lost or doubled. Partitions move one by one; those of a hash table 64 at a time, and the
    table stands still meanwhile. Rounds go on where they were. Nothing moves while a rank is within
    ps.snapshot(). A hash table with ps.Evict(max_rows=) that is small stays where it is. Servers
    that run in one process, since another one died, count as one. Spares get nothing.

    Args:
        slack: a server may have this share more than the mean.

    Returns:
        A future of Rebalanced.

    Raises:
        RingcommError: this rank is within ps.snapshot().
        ValueError: slack is less than 0.
    """
    current = session()
    if current.snapshot:
        raise RingcommError("ps.rebalance: not within ps.snapshot(), while which nothing moves")
    if slack < 0:
        raise ValueError(f"ps.rebalance: slack is {slack}; it must be 0 or more")
    answers = ask_json(current.client, ServerOption.STATS, {"keys": True}).wait()
    view, heat = measured(answers)
    before = _before.get(current, {})
    _before[current] = heat
    recent = {part: counted_since(before.get(part, 0.0), x) for part, x in heat.items()}
    servers = current.client.servers
    vacant = vacant_in(answers, current.client.leader)
    heads = heads_of([n for n in servers if n not in vacant], current.layout.rank_of)
    chains = {part: chain for part, chain in view.chains.items() if chain[0] in heads}
    busy = PlacementView(view.number, {part: (heads[chain[0]],) for part, chain in chains.items()})
    moves = plan_moves(busy, recent, sorted({*heads.values()}), slack, pinned_in(answers))
    after = view.with_({move.partition: (move.dest,) for move in moves})
    load, load_after = shares(view, recent, servers), shares(after, recent, servers)
    return move_all(current, moves, load, load_after)


def vacant_in(answers: Sequence[dict[str, Any]], leader: int) -> set[int]:
    return next({*each["vacant"]} for each in answers if each["server"] == leader)


def heads_of(servers: Sequence[int], rank_of: Callable[[int], int]) -> dict[int, int]:
    """Return, for each server, the lowest that runs in the same process: they share its time."""
    heads: dict[int, int] = {}
    for server in sorted(servers):
        heads.setdefault(rank_of(server), server)
    return {server: heads[rank_of(server)] for server in servers}


def move_all(
    current: Session,
    moves: Iterable[Move],
    load: tuple[float, ...] = (),
    load_after: tuple[float, ...] = (),
) -> Future[Rebalanced]:
    """Move partitions, one by one; a move of a partition to its present server is left out.

    Raises:
        RingcommError, by the future: some could not move, and stayed; the text says why.
    """
    asked = {"command": "move", "moves": [[*m.partition, m.source, m.dest] for m in moves]}
    return ask_for_moves(
        current, "rebalance", asked, lambda n_moved: Rebalanced(n_moved, load, load_after)
    )


def ask_for_moves(
    current: Session, label: str, asked: dict[str, Any], result: Callable[[int], R]
) -> Future[R]:
    """Ask the leader for moves; return a future of result(number of partitions that have moved).

    Args:
        current: the session.
        label: of the call.
        asked: a command, see ringcomm.ps.control.commands.
        result: see above.

    Raises:
        RingcommError, by the future: some could not move; the text says why.
    """
    answers: list[dict[str, Any]] = []
    text, leader = packed_json(asked), current.client.leader
    body = current.memory_for(leader, len(text))
    body[:] = np.frombuffer(text, np.uint8)
    request = request_command(current.client, needs_tables=True, body=body)
    request.on_reply = lambda reply: answers.append(json_of(reply))

    def finish() -> R:
        n_moved, problems = answers[0]["moved"], answers[0]["problems"]
        if problems:
            raise RingcommError(
                f"ps.{label}: {n_moved} partitions moved, and some could not: "
                + "; ".join(problems)
            )
        return result(n_moved)

    return current.client.call(label, [request], finish)


def measured(answers: Sequence[dict[str, Any]]) -> tuple[PlacementView, dict[Partition, float]]:
    """Return the view, and the traffic of each partition, by the statistics of all servers.

    A request to a hash table is for many partitions, and costs as much wherever they are.
    """
    chains: dict[Partition, tuple[int, ...]] = {}
    heat: dict[Partition, float] = {}
    for each in answers:
        server = each["server"]
        for name, parts in each["tables"].items():
            number = each["numbers"][name]
            for part, traffic in parts.items():
                partition = (number, int(part))
                chains[partition] = (server,)
                n_requests = traffic["pushes"] + traffic["pulls"]
                heat[partition] = traffic["nbytes"] + REQUEST_NBYTES * n_requests
        for number, rows in each["keys"].items():
            for part, nbytes in zip(rows["owned"], rows["nbytes"], strict=True):
                partition = (int(number), part)
                chains[partition] = (server,)
                heat[partition] = nbytes
    return PlacementView(1, chains), heat


def pinned_in(answers: Sequence[dict[str, Any]]) -> set[Partition]:
    """Return the partitions that stay, by the statistics of all servers: see row_policies.Evict."""
    return {
        (int(number), part)
        for each in answers
        for number, rows in each["keys"].items()
        if rows["stays"]
        for part in rows["owned"]
    }


def shares(
    view: PlacementView, heat: dict[Partition, float], servers: Sequence[int]
) -> tuple[float, ...]:
    load = dict.fromkeys(servers, 0.0)
    for partition, chain in view.chains.items():
        load[chain[0]] += heat.get(partition, 0.0)
    total = sum(load.values()) or 1.0
    return tuple(load[server] / total for server in servers)
