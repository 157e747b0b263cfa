"""A view: the ranks that are in the job now, and how they are numbered. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class View:
    """The members of a job at one time. Rank r of the view is the process members[r].

    Attributes:
        number: how many members the job has lost before; so it only grows.
        members: the processes, by their ranks in the first view. These numbers are never reused.
        incarnations: of each member, how many times it was started again.
    """

    number: int
    members: tuple[int, ...]
    incarnations: tuple[int, ...]

    @classmethod
    def first(cls, size: int) -> Self:
        """Return the view with which a job of `size` ranks begins."""
        return cls(0, tuple(range(size)), (0,) * size)

    def without(self, lost: Collection[int]) -> View:
        """Return the next view; `lost` may hold processes that are no members."""
        left = [
            (m, i) for m, i in zip(self.members, self.incarnations, strict=True) if m not in lost
        ]
        number = self.number + len(self.members) - len(left)
        return View(number, tuple(m for m, _ in left), tuple(i for _, i in left))

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.members)

    def rank_of(self, member: int) -> int | None:
        """Return the rank of a process in this view, None if it is no member."""
        return self.members.index(member) if member in self.members else None
