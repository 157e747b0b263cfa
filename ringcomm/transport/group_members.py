"""The ranks of a group, with lookups that each operation needs. Pure."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Self


class Hashed(tuple[int, ...]):
    """A tuple that computes its hash only once: each operation uses it as a key of dicts."""

    @functools.cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash


class Members(Hashed):
    """The ranks of the job that form a group, in its order."""

    place: int | None  # index of this rank in the group, None if it is not a member
    nodes: Hashed  # for each member, a number that identifies its node
    _nodes_of_job: Sequence[int]
    _rank: int

    @classmethod
    def of(cls, ranks: Iterable[int], rank: int, nodes: Sequence[int]) -> Self:
        """Return `ranks` as a group. This process is `rank`; rank r is on node `nodes[r]`."""
        if isinstance(ranks, cls):
            return ranks
        members = cls(ranks)
        members._rank, members._nodes_of_job = rank, nodes
        members.place = members.places.get(rank)
        members.nodes = Hashed(nodes[member] for member in members)
        return members

    @functools.cached_property
    def places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self)}

    def __contains__(self, rank: object) -> bool:
        return rank in self.places

    @functools.cached_property
    def others(self) -> tuple[int, ...]:
        return tuple(rank for rank in self if rank != self._rank)

    @functools.cached_property
    def _parts(self) -> dict[tuple[int, ...], Members]:
        return {}

    def part(self, places: Sequence[int]) -> Members:
        key = places if isinstance(places, tuple) else tuple(places)
        if key not in self._parts:
            self._parts[key] = Members.of([self[p] for p in key], self._rank, self._nodes_of_job)
        return self._parts[key]
