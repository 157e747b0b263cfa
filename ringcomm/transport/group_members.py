"""The ranks of a group, with lookups that each operation needs; and ranks as text. Pure."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Self

_LISTED_MAX = 16  # ranks in a text; if there are more, the text has ranges


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
        """The index of each member."""
        return {rank: place for place, rank in enumerate(self)}

    def __contains__(self, rank: object) -> bool:
        return rank in self.places

    @functools.cached_property
    def others(self) -> tuple[int, ...]:
        """All members but this rank."""
        return tuple(rank for rank in self if rank != self._rank)

    @functools.cached_property
    def _parts(self) -> dict[tuple[int, ...], Members]:
        return {}

    def part(self, places: Sequence[int]) -> Members:
        """Return the members at some indices."""
        key = places if isinstance(places, tuple) else tuple(places)
        if key not in self._parts:
            self._parts[key] = Members.of([self[p] for p in key], self._rank, self._nodes_of_job)
        return self._parts[key]


def runs(ranks: Iterable[int]) -> list[range]:
    """Return the ranks as ascending ranges, as few as possible."""
    found: list[range] = []
    for rank in sorted(ranks):
        if found and found[-1].stop == rank:
            found[-1] = range(found[-1].start, rank + 1)
        elif not (found and rank in found[-1]):
            found.append(range(rank, rank + 1))
    return found


def ranges_of(ranks: Iterable[int]) -> str:
    """Return the ranks as text, such as "0-15,17"."""
    return ",".join(map(_range_text, runs(ranks)))


def parts(ranges: str, nbytes: int) -> Iterator[str]:
    """Yield a result of ranges_of() in parts of at most `nbytes`, each valid for ranks_in()."""
    while len(ranges) > nbytes:
        end = ranges.rindex(",", 0, nbytes)
        yield ranges[:end]
        ranges = ranges[end + 1 :]
    yield ranges


def ranks_in(ranges: str) -> list[int]:
    """Return the ranks of a result of ranges_of()."""
    bounds = [each.partition("-") for each in ranges.split(",") if each]
    return [rank for a, _, b in bounds for rank in range(int(a), int(b or a) + 1)]


def ranks_text(ranks: Collection[int]) -> str:
    """Return the ranks as text: "0, 1, 3", or "0-15, 17" if there are many ranks."""
    if len(ranks) <= _LISTED_MAX:
        return ", ".join(map(str, ranks))
    shown = list(map(_range_text, runs(ranks)))
    more = f", ... ({len(ranks)} in all)" if len(shown) > _LISTED_MAX else ""
    return ", ".join(shown[:_LISTED_MAX]) + more


def _range_text(run: range) -> str:
    return f"{run.start}-{run[-1]}" if len(run) > 1 else str(run.start)
