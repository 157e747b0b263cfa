"""Decides which rank works on which part of an epoch; parts are leased one by one. Pure.

| event | what follows |
|---|---|
| take, and the rank has a lease | the same lease again: the answer was lost |
| take | a part that came back, else the next one; WAIT while others have the last; OVER |
| done, of a lease of this rank | it counts |
| done, of any other | it does not: the part came back meanwhile, or the message came twice |
| the rank gives up, leaves or dies | its lease comes back |
| take in the next epoch, this one is over | the epoch begins |
"""

from __future__ import annotations

import heapq
from typing import Any, Final

WAIT: Final = -1
OVER: Final = -2


def require_state(n: int, state: dict[str, Any]) -> None:
    """Raise TypeError or ValueError unless state() of leases of n parts may be so.

    Who passes it is told, not the rank that keeps the leases for all.
    """
    epoch, following, undone = state["epoch"], state["next"], state["undone"]
    numbers = [epoch, following, *undone] if isinstance(undone, list) else [None]
    if not all(type(each) is int for each in numbers):
        raise TypeError(
            f"WorkQueue: the state has epoch={epoch!r}, next={following!r}, undone={undone!r}; "
            "these must be numbers, and a list of numbers, of state_dict()"
        )
    are_given = len({*undone}) == len(undone) and all(0 <= each < following for each in undone)
    if epoch < 0 or not 0 <= following <= n or not are_given:
        raise ValueError(
            f"WorkQueue: the state has epoch={epoch}, next={following}, undone={undone}, and of "
            f"{n} parts the undone ones are before the next: it is damaged, or of another queue"
        )


class Leases:
    """The leases of one queue.

    Args:
        n: parts of an epoch.
        state: of state(), to go on there.

    Attributes:
        epoch: the present one.
    """

    def __init__(self, n: int, state: dict[str, Any] | None = None) -> None:
        self._n = n
        state = {"epoch": 0, "next": 0, "undone": []} if state is None else state
        self.epoch: int = state["epoch"]
        self._next: int = state["next"]
        self._back: list[int] = sorted(state["undone"])  # a heap
        self._of: dict[int, int] = {}  # by rank: its part

    @property
    def is_over(self) -> bool:
        return self._next == self._n and not (self._back or self._of)

    @property
    def holders(self) -> list[int]:
        return sorted(self._of)

    def take(self, rank: int, epoch: int) -> int:
        """Return the part that a rank works on now; WAIT or OVER if there is none."""
        if epoch > self.epoch and self.is_over:
            self.epoch, self._next = epoch, 0
        if epoch != self.epoch:
            return OVER if epoch < self.epoch else WAIT
        if rank not in self._of:
            if self._back:
                self._of[rank] = heapq.heappop(self._back)
            elif self._next < self._n:
                self._of[rank] = self._next
                self._next += 1
            else:
                return WAIT if self._of else OVER
        return self._of[rank]

    def done(self, rank: int, epoch: int, part: int) -> bool:
        """Count a part as done; return False if this rank has no lease of it."""
        if epoch != self.epoch or self._of.get(rank) != part:
            return False
        del self._of[rank]
        return True

    def leave(self, rank: int) -> None:
        if rank in self._of:
            heapq.heappush(self._back, self._of.pop(rank))

    def state(self) -> dict[str, Any]:
        """Return where the epoch stands; what is leased is not done."""
        undone = sorted([*self._back, *self._of.values()])
        return {"epoch": self.epoch, "next": self._next, "undone": undone}
