"""ps.add_servers(), ps.remove_server(): spares get partitions, or a server gives its own away."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeVar

from ringcomm.errors import RingcommError
from ringcomm.ps.client.future import Future
from ringcomm.ps.client.json_requests import ask_json
from ringcomm.ps.placement.rebalance import ask_for_moves
from ringcomm.ps.protocol.frames import ServerOption
from ringcomm.ps.session import Session, session

R = TypeVar("R")


def add_servers(n: int = 1) -> Future[tuple[int, ...]]:
    """Let spares be servers: new tables are on them, too, and ps.rebalance() gives them a share.

    Any worker may call it, while all go on. It needs ps.init(replication=2, spares=).

    Args:
        n: how many.

    Returns:
        A future of their numbers.

    Raises:
        RingcommError: fewer spares stand by; without replication=2, spares only take the places of
            servers that died, in ps.recover(); or this rank is within ps.snapshot().
        ValueError: n is less than 1; or, by the future, another rank was faster.
    """
    n = operator.index(n)
    if n < 1:
        raise ValueError(f"ps.add_servers: n is {n}; it must be 1 or more")
    current = _session_of("ps.add_servers")
    servers = _standing_by(current)
    if len(servers) < n:
        raise RingcommError(
            f"ps.add_servers: {n} asked for, and {len(servers)} stand by. ps.init(spares=) says "
            "how many there are at first; some may have a place by now, or be dead"
        )
    added = tuple(servers[:n])
    return _ask(current, "add_servers", {"add": added}, lambda _: added)


def remove_server(number: int) -> Future[int]:
    """Let all partitions of a server move to the others; then it is a spare.

    So do those of servers that run in its process since their own died. Any worker may call it,
    while all go on: see ps.rebalance(). The process goes on to have copies of others, as spares do,
    and ends with the job. ps.add_servers() may make it a server again. It needs
    ps.init(replication=2).

    Args:
        number: of the server.

    Returns:
        A future of how many partitions have moved.

    Raises:
        ValueError, by the future: it has no partitions, or is the only server that has; or it has
            rows of a hash table with a small ps.Evict(max_rows=), which stay where they are.
        RingcommError: there is no replication=2; this rank is within ps.snapshot(); or, by the
            future, some partitions could not move yet: they follow as soon as they can.
    """
    number = operator.index(number)
    current = _session_of("ps.remove_server")
    removed = [number, *_in_its_process(current, number)]
    return _ask(current, "remove_server", {"remove": removed}, lambda n_moved: n_moved)


def _session_of(label: str) -> Session:
    current = session()
    if current.layout.replication == 1:
        raise RingcommError(
            f"{label}: it needs ps.init(replication=2). Without copies the servers change only "
            "when one dies: in ps.recover() a spare takes its place"
        )
    if current.snapshot:
        raise RingcommError(f"{label}: not within ps.snapshot(), while which nothing moves")
    _await_homes(current, label)
    return current


def _await_homes(current: Session, label: str) -> None:
    """Return once it is known where each server runs; some have to say so after a death."""
    layout = current.layout

    def homeless() -> list[int]:
        ranks = layout.ranks_of_servers()
        return [server for server, rank in ranks.items() if rank in layout.dead]

    if servers := homeless():
        current.client.wait_until(lambda: not homeless(), label, lambda: servers)


def _in_its_process(current: Session, server: int) -> list[int]:
    """Return the other servers that run in the process in which one began, if it lives.

    They began in processes that have died.
    """
    layout = current.layout
    hosts = layout.ranks_of_servers()
    if server not in hosts or hosts[server] != layout.address_of(server):
        return []
    return [each for each, rank in hosts.items() if rank == hosts[server] and each != server]


def _standing_by(current: Session) -> list[int]:
    """Return the spares, but those that have come to share a process with a server."""
    leader, hosts = current.client.leader, current.layout.ranks_of_servers()
    (answer,) = ask_json(current.client, ServerOption.STATS, {"keys": True}, [leader]).wait()
    vacant = {*answer["vacant"]}
    busy = {rank for each, rank in hosts.items() if each not in vacant}
    by_rank = {hosts[each]: each for each in sorted(vacant & hosts.keys(), reverse=True)}
    return sorted(each for rank, each in by_rank.items() if rank not in busy)


def _ask(
    current: Session, label: str, question: dict[str, Any], result: Callable[[int], R]
) -> Future[R]:
    """Ask the leader; return a future of result(number of partitions that have moved)."""
    hosts = [*current.layout.ranks_of_servers().items()]
    asked = {"command": "places", **question, "hosts": hosts}
    return ask_for_moves(current, label, asked, result)
