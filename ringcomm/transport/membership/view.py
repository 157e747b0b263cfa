"""A view: the ranks that are in the job now, and how they are numbered. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple, Self


class Changes(NamedTuple):
    """All that has happened to the processes of a job since its first view; sets only grow.

    lost: processes that have ended, or take part no more. arrived: those that have come since, and
    may be members. requests: the first of each is its number, the second how many members it wants.
    """

    lost: frozenset[int] = frozenset()
    arrived: frozenset[int] = frozenset()
    requests: frozenset[tuple[int, int]] = frozenset()

    def __or__(self, other: Changes) -> Changes:
        requests = self.requests | other.requests
        return Changes(self.lost | other.lost, self.arrived | other.arrived, requests)

    def __str__(self) -> str:
        text = f"the job has lost {len(self.lost)} ranks"
        return f"{text}, and was resized {len(self.requests)} times" if self.requests else text

    @property
    def number(self) -> int:
        return sum(map(len, self))


class View(NamedTuple):
    """The members of a job at one time. Rank r of the view is the process members[r].

    Attributes:
        number: how many processes the job has lost, and how many have arrived; so it only grows.
        members: the processes, by the ranks that they had at first. These numbers are never reused.
    """

    number: int
    members: tuple[int, ...]

    @classmethod
    def first(cls, size: int) -> Self:
        """Return the view with which a job of `size` ranks begins."""
        return cls(0, tuple(range(size)))

    def after(self, changes: Changes, waiting: Iterable[int], size: int) -> View:
        """Return the view after changes, with at most `size` members.

        A process of those that wait takes the place of a lost one, whose rank it gets. If too few
        wait, the ranks behind a lost one move up; if more do, they become the last ranks. If there
        are too many members, the last ones leave the view. Rank 0 has been in the view before: what
        programs broadcast comes from it.
        """
        n_live = len(set(self.members) - changes.lost)
        left = islice(sorted(set(waiting) - set(self.members)), max(0, size - n_live))
        members: list[int] = []
        for member in self.members:
            if member not in changes.lost:
                members.append(member)
            elif (substitute := next(left, None)) is not None:
                members.append(substitute)
        members += left
        first = next((i for i, each in enumerate(members) if each in self.members), 0)
        if first:
            members[0], members[first] = members[first], members[0]
        return View(changes.number, tuple(members[:size]))

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.members)

    def rank_of(self, member: int) -> int | None:
        """Return the rank of a process in this view, None if it is no member."""
        return self.members.index(member) if member in self.members else None
