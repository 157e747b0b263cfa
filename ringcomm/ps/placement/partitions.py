"""Which server owns which partition: the view, first places, and plans of moves. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

HASH_PARTITIONS: Final = 1024  # of a hash table
_MIX = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: neighbours in, far apart out
_MASK = (1 << 64) - 1

Partition = tuple[int, int]  # of a table: its number, and which part of it


@dataclass(frozen=True)
class PlacementView:
    """The servers of each partition. Immutable: a change is a new view with the next number.

    Attributes:
        number: of this view; rides in every message.
        chains: of each partition: its servers, the primary first.
    """

    number: int = 0
    chains: Mapping[Partition, tuple[int, ...]] = field(default_factory=dict)

    def owner(self, partition: Partition) -> int:
        return self.chains[partition][0]

    def with_(self, changes: Mapping[Partition, tuple[int, ...]]) -> PlacementView:
        return PlacementView(self.number + 1, {**self.chains, **changes})


def cuts(count: int, block: int) -> list[int]:
    """Return the bounds of the slices of a dense table, n + 1 ascending numbers from 0 to count.

    Slices are as many as needed and as equal as possible.

    Args:
        count: elements.
        block: the most elements of a slice.
    """
    n = max(1, -(-count // block))
    return [count * i // n for i in range(n + 1)]


def place_dense(
    sizes: Sequence[int], loads: Mapping[int, int], servers: Sequence[int]
) -> list[int]:
    """Return the server of each slice: the largest first, to the least loaded.

    Args:
        sizes: bytes of each slice.
        loads: bytes that servers own already.
        servers: that can own.
    """
    burden = {server: loads.get(server, 0) for server in servers}
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        best = min(servers, key=lambda server: (burden[server], server))
        burden[best] += sizes[index]
        owners[index] = best
    return owners


def some_of(table: str, servers: Sequence[int], n: int) -> list[int]:
    """Return n of the servers, for a table that is not to be on all: others for other tables."""
    return sorted(sorted(servers, key=lambda server: _digest(f"{table}/{server}"))[:n])


def place_hashed(table: str, servers: Sequence[int], n: int = HASH_PARTITIONS) -> list[int]:
    """Return the server of each partition of a hash table, by rendezvous hashing.

    A server that joins or leaves moves only what is, or was, its own.
    Source: Thaler & Ravishankar 1998, doi:10.1109/90.663936.
    """
    seeds = {server: _digest(f"{table}/{server}") for server in servers}
    return [
        max(servers, key=lambda server: (_mixed(seeds[server] ^ _mixed(index)), server))
        for index in range(n)
    ]


class Move(NamedTuple):
    """One partition that changes its server."""

    partition: Partition
    source: int
    dest: int


def plan_moves(
    view: PlacementView,
    traffic: Mapping[Partition, float],
    servers: Sequence[int],
    slack: float = 0.1,
    pinned: Collection[Partition] = (),
) -> list[Move]:
    """Return the moves that even out measured traffic, the busiest partitions first.

    Args:
        view: as it is.
        traffic: per partition, in any unit; a partition without an entry has none.
        servers: that can own.
        slack: a server may have this share more than the mean.
        pinned: partitions that stay where they are.
    """
    load = dict.fromkeys(servers, 0.0)
    owned: dict[int, list[Partition]] = {server: [] for server in servers}
    for partition, chain in sorted(view.chains.items()):
        load[chain[0]] += traffic.get(partition, 0.0)
        if partition not in pinned:
            owned[chain[0]].append(partition)
    limit = sum(load.values()) / len(servers) * (1 + slack)
    moves: list[Move] = []
    for source in sorted(servers, key=lambda server: -load[server]):
        for partition in sorted(owned[source], key=lambda p: (-traffic.get(p, 0.0), p)):
            heat = traffic.get(partition, 0.0)
            dest = min(servers, key=lambda server: (load[server], server))
            if load[source] <= limit or heat == 0:
                break
            if load[dest] + heat < load[source]:  # else it would only swap places
                load[source] -= heat
                load[dest] += heat
                moves.append(Move(partition, source, dest))
    return moves


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _mixed(x: int) -> int:
    """Return 64 bits, each of which depends on all of x (the finaliser of splitmix64)."""
    x = (x + _MIX) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
