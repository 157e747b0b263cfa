"""A view: the ranks in the job now, their numbers, and which may have others killed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from enum import IntEnum
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


class Eviction(IntEnum):
    """The time at which ranks that wait in vain have the others killed."""

    NOW = 0
    IF_UNHARMED = 1  # after RINGCOMM_GRACE_S, in which the others would have killed them first
    NEVER = 2  # the job ends


def eviction(missing: Set[int], members: Sequence[int], near: Set[int]) -> Eviction:
    """Return what the members that are not missing may do to those that are.

    The rule lets no two parts of a job go on: a process counts as lost only when it has ended. It
    keeps two parts that wait for each other from killing each other, so that one is left.

    More than half of the members may kill the others, and so may half of them with the first. The
    other half may do so later, if it is on the host of all that it waits for: what cannot be
    reached may be well, and cannot be killed.

    Args:
        missing: processes for which the others wait; some may be no members, such as a spare.
        members: the members that live, in the order of their ranks.
        near: the processes on this host.
    """
    waiting = [each for each in members if each not in missing]
    lead = 2 * len(waiting) - len(members)
    if lead > 0 or (lead == 0 and waiting[:1] == list(members[:1])):
        return Eviction.NOW
    return Eviction.IF_UNHARMED if lead == 0 and missing <= near else Eviction.NEVER
