"""Groups ranks by host. Pure. `nodes` has a number for each rank, the same on one host."""

from __future__ import annotations

import functools

from ringcomm.transport.group_members import Hashed


@functools.lru_cache(maxsize=256)
def hosts(nodes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host, ascending; hosts in the order of their first ranks."""
    ranks: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    return tuple(map(Hashed, ranks.values()))


@functools.lru_cache(maxsize=1024)
def host_of(rank: int, nodes: tuple[int, ...]) -> tuple[int, ...]:
    return next(host for host in hosts(nodes) if rank in host)


@functools.lru_cache(maxsize=256)
def columns(nodes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the first ranks of all hosts, then the second ranks, ..., while every host has one."""
    return tuple(map(Hashed, zip(*hosts(nodes), strict=False)))


@functools.lru_cache(maxsize=64)
def owned(nodes: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return, for each column and host, the ranks whose elements the column's rank reduces.

    The first of them is that rank. The others belong to no column.
    """
    k = len(columns(nodes))
    return tuple(tuple(host[place::k] for host in hosts(nodes)) for place in range(k))


def host_order(nodes: tuple[int, ...]) -> list[int]:
    """Return all ranks, host by host. A ring in this order enters and leaves each host once.

    A ring in rank order is half as fast if ranks alternate between hosts (measured).
    """
    return [rank for host in hosts(nodes) for rank in host]


def describe(nodes: tuple[int, ...]) -> str:
    """Return "3 hosts x 2 ranks" or the like. Different layouts have different texts."""
    by_host = hosts(nodes)
    n_ranks = [len(host) for host in by_host]
    many = f"{len(by_host)} host{'s' if len(by_host) > 1 else ''}"
    if host_order(nodes) != list(range(len(nodes))):
        place = {rank: index for index, host in enumerate(by_host) for rank in host}
        return f"{many}, ranks on hosts {' '.join(str(place[r]) for r in range(len(nodes)))}"
    if len(set(n_ranks)) == 1:
        return f"{many} x {n_ranks[0]} rank{'s' if n_ranks[0] > 1 else ''}"
    return f"{many} of {', '.join(map(str, n_ranks))} ranks"
