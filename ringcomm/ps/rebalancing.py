"""ps.rebalance(): partitions move to where they make all servers equally busy."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from ringcomm.errors import RingcommError
from ringcomm.ps.client import Ask
from ringcomm.ps.frames import Kind, Step
from ringcomm.ps.future import Future
from ringcomm.ps.job import Session, session
from ringcomm.ps.link import INLINE_MAX, Delivery
from ringcomm.ps.messages import packed_json
from ringcomm.ps.placement import Move, Partition, View
from ringcomm.ps.placement import rebalance as _plan
from ringcomm.ps.serving import LEADER
from ringcomm.ps.statistics import collect

# A request costs a server as much as so many bytes: it took 20-26 us with 1 KB and 606-857 us with
# 4 MB (measured, shared/design/ps.md).
REQUEST_NBYTES: Final = 128 << 10
_before: Final[weakref.WeakKeyDictionary[Session, dict[Partition, float]]] = (
    weakref.WeakKeyDictionary()
)


class Rebalanced(NamedTuple):
    """What a rebalance has done.

    Attributes:
        moved: partitions that have changed their server.
        load: share of the traffic that each server had, by server: of 1.
        load_after: what it would have been as they are placed now.
    """

    moved: int
    load: tuple[float, ...]
    load_after: tuple[float, ...]


def rebalance(*, slack: float = 0.1) -> Future[Rebalanced]:
    """Move partitions so that the traffic since the last rebalance would have been spread evenly.

    Any worker may call it, while all go on: a partition that moves answers a little later, and no
    push is lost or doubled. They move one by one, those of a hash table 64 at a time, for which it
    stands still until they are there; rounds go on where they were. While somebody is within
    ps.snapshot() none does.

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
    view, heat = measured(collect(current, keys=True))
    before = _before.get(current, {})
    _before[current] = heat
    recent = {partition: x - before.get(partition, 0.0) for partition, x in heat.items()}
    servers = range(current.client.n_servers)
    moves = _plan(view, recent, servers, slack)
    after = view.with_({move.partition: (move.dest,) for move in moves})
    load, load_after = shares(view, recent, servers), shares(after, recent, servers)
    return move_all(current, moves, load, load_after)


def move_all(
    current: Session,
    moves: Iterable[Move],
    load: tuple[float, ...] = (),
    load_after: tuple[float, ...] = (),
) -> Future[Rebalanced]:
    """Let partitions move, one by one; a move to where it is already is left out.

    Raises:
        RingcommError, by the future: some could not, and stayed; the text says why.
    """
    told: dict[str, Any] = {}

    def note(reply: Delivery) -> None:
        told.update(json.loads(reply.meta))

    def finish() -> Rebalanced:
        if told["problems"]:
            raise RingcommError(
                f"ps.rebalance: {told['moved']} partitions moved, and some did not: "
                + "; ".join(told["problems"])
            )
        return Rebalanced(told["moved"], load, load_after)

    text = packed_json([[*m.partition, m.source, m.dest] for m in moves])
    body = np.frombuffer(text, np.uint8)
    if body.nbytes > INLINE_MAX // 2 and current.client.shares_memory(LEADER):
        shared = current.memory(body.nbytes)
        shared[:] = body
        body = shared
    client = current.client
    future = Future(client, "rebalance", 1, finish, client.timestamp())
    ask = Ask(Kind.MOVE, server=LEADER, option=Step.ASK, body=body, on_reply=note)
    client.ask([ask], future)
    return future


def measured(told: Sequence[dict[str, Any]]) -> tuple[View, dict[Partition, float]]:
    """Return who owns what, and how busy each partition has been.

    A request to a hash table is for many partitions, and costs as much wherever they are.
    """
    chains: dict[Partition, tuple[int, ...]] = {}
    heat: dict[Partition, float] = {}
    for server, each in enumerate(told):
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
    return View(1, chains), heat


def shares(view: View, heat: dict[Partition, float], servers: Sequence[int]) -> tuple[float, ...]:
    """Return the share of the traffic that each server has, by server."""
    load = dict.fromkeys(servers, 0.0)
    for partition, chain in view.chains.items():
        load[chain[0]] += heat.get(partition, 0.0)
    total = sum(load.values()) or 1.0
    return tuple(load[server] / total for server in servers)
