"""The ranks of a group, with what every operation asks of them: found once per group. Pure."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Self


class Hashed(tuple[int, ...]):
    """A tuple that computes its hash once, for keys that each operation looks up."""

    @functools.cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash


class Members(Hashed):
    """Ranks of the job that communicate among themselves, in the order of their group.

    Attributes:
        place: index of this rank among them, None if it is no member.
        nodes: of each: a number that tells its node from others.
    """

    place: int | None
    nodes: Hashed
    _nodes_of_job: Sequence[int]
    _rank: int

    @classmethod
    def of(cls, ranks: Iterable[int], rank: int, nodes: Sequence[int]) -> Self:
        """Return these ranks, as `rank` sees them.

        Args:
            ranks: of the job, each once.
            rank: of this process.
            nodes: of all ranks of the job.
        """
        if isinstance(ranks, cls):
            return ranks
        members = cls(ranks)
        members._rank, members._nodes_of_job = rank, nodes
        members.place = members.places.get(rank)
        members.nodes = Hashed(nodes[member] for member in members)
        return members

    @functools.cached_property
    def places(self) -> dict[int, int]:
        """The index of each rank."""
        return {rank: place for place, rank in enumerate(self)}

    def __contains__(self, rank: object) -> bool:
        return rank in self.places

    @functools.cached_property
    def others(self) -> tuple[int, ...]:
        """All but this rank."""
        return tuple(rank for rank in self if rank != self._rank)

    @functools.cached_property
    def _parts(self) -> dict[tuple[int, ...], Members]:
        return {}

    def part(self, places: Sequence[int]) -> Members:
        """Return those at some places."""
        key = places if isinstance(places, tuple) else tuple(places)
        if key not in self._parts:
            ranks = [self[place] for place in key]
            self._parts[key] = Members.of(ranks, self._rank, self._nodes_of_job)
        return self._parts[key]
