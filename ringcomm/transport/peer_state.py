"""The state of the other ranks, as far as this rank knows it. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from ringcomm.ranks_as_text import parts, ranges_of, ranks_in
from ringcomm.transport.control_header import TEXT_MAX, cut


class Obstacle(NamedTuple):
    rank: int  # the rank to blame
    reason: str  # how it failed or left


class GaveUp(NamedTuple):
    """The error of a rank whose deadline passed. Ranks that still need that rank raise it, too."""

    missing: tuple[int, ...]
    message: str

    def text(self) -> str:
        """Return the wire form of at most TEXT_MAX bytes; a long text loses words and ranks."""
        ranges = next(parts(ranges_of(self.missing), TEXT_MAX // 4))
        return f"{cut(self.message, TEXT_MAX // 4 * 3 - 1)}\n{ranges}"

    @classmethod
    def of_text(cls, text: str) -> GaveUp:
        message, _, ranges = text.rpartition("\n")
        return cls(tuple(ranks_in(ranges)), message)


@dataclass
class PeerTable:
    """The ranks that died, failed, left or wait, as far as this rank knows."""

    rank: int  # this rank
    size: int
    dead: dict[int, str] = field(default_factory=dict)  # dead or failed rank -> how; only grows
    left: dict[int, str] = field(default_factory=dict)  # rank -> how it left
    # Key of an operation -> rank that left and will never enter it -> how it left.
    absent: dict[int, dict[int, str]] = field(default_factory=dict)
    # Rank that needed a failed rank, so its engine is unusable -> the failed rank, and how.
    broken: dict[int, Obstacle] = field(default_factory=dict)
    gave_up: dict[int, GaveUp] = field(default_factory=dict)  # rank -> the error at its deadline
    has_lost: bool = False  # some rank is in `dead`, `broken` or `gave_up`
    survivable: frozenset[int] = frozenset()  # ranks without which the job goes on if they die
    _gone: set[int] = field(default_factory=set)
    _entered: dict[int, set[int]] = field(default_factory=dict)
    _elsewhere: dict[int, dict[int, tuple[str, tuple[int, int] | None]]] = field(
        default_factory=dict
    )
    _followed: dict[int, int] = field(default_factory=dict)

    def note_dead(self, rank: int, reason: str, *, blames: int) -> None:
        """Note that `rank` died because `blames` failed; `blames` may be `rank` itself."""
        if blames != rank:
            self._followed[rank] = blames
            reason = f"stopped because rank {blames} failed"
        self.dead.setdefault(rank, reason)
        self._gone.add(rank)
        self.has_lost = True

    def note_failed(self, rank: int, reason: str) -> None:
        """Note that `rank` failed, as a rank announced; replace the reason of a mere death."""
        self.dead[rank] = reason
        self._gone.add(rank)
        self.has_lost = True
        self._followed.pop(rank, None)

    def note_left(self, rank: int, how: str) -> None:
        """Note that `rank` enters no operation any more, and completed all that it had entered."""
        self.left[rank] = how
        self._gone.add(rank)

    def note_absent(self, rank: int, key: int, how: str) -> None:
        """Note that `rank` left before it entered operation `key`."""
        self.absent.setdefault(key, {})[rank] = how

    def note_broken(self, rank: int, cause: int, reason: str) -> None:
        """Note that `rank` lives but takes part in no operation any more: `cause` failed."""
        self.broken.setdefault(rank, Obstacle(cause, reason))
        self.has_lost = True

    def note_entered(self, rank: int, key: int) -> None:
        self._entered.setdefault(key, set()).add(rank)
        self._elsewhere.get(key, {}).pop(rank, None)

    def note_elsewhere(
        self, rank: int, key: int, where: str, waits_in: tuple[int, int] | None = None
    ) -> None:
        """Note that `rank` has not entered operation `key`.

        `where` is the oldest operation that it is in. `waits_in` has the base and the number of the
        one that it waits for, to which this rank belongs, too; None: there is none.
        """
        self._elsewhere.setdefault(key, {})[rank] = (where, waits_in)

    def note_gave_up(self, rank: int, gave_up: GaveUp) -> None:
        """Note the error at the deadline of `rank`; only its first error counts."""
        self.gave_up.setdefault(rank, gave_up)
        self.has_lost = True

    def forget(self, key: int) -> None:
        self._entered.pop(key, None)
        self._elsewhere.pop(key, None)

    def obstacle(self, key: int, members: Collection[int]) -> Obstacle | None:
        """Return why operation `key` of these ranks cannot complete, or None if it can.

        Blames a rank that failed first, member or not, rather than the ranks that followed it.
        """
        dead = {r: why for r, why in self.dead.items() if r in members}
        first = {self._followed.get(r, r) for r in dead}
        causes = {r: why for r, why in self.dead.items() if r in first - self._followed.keys()}
        absent = self.absent.get(key, {})  # disjoint groups may have operations with the same key
        departed = {r: how for r, how in absent.items() if r in members}
        for reasons in (causes, departed):
            for rank, reason in reasons.items():
                return Obstacle(rank, departed.get(rank, reason))
        for rank in dead:
            cause = self._followed[rank]
            how = self.left.get(cause, "failed")
            return Obstacle(cause, f"{how}, and rank {rank} stopped because of it")
        return next((why for r, why in self.broken.items() if r in members), None)

    def quitter(self, members: Collection[int]) -> GaveUp | None:
        return next((said for rank, said in self.gave_up.items() if rank in members), None)

    def missing(self, key: int, members: Collection[int]) -> list[int]:
        entered = self._entered.get(key, set())
        return [r for r in members if r != self.rank and r not in entered and r not in self.dead]

    def blamed(self, key: int, members: Collection[int]) -> list[int]:
        """Return the missing ranks without those that wait in another operation, unless all do.

        These may only wait for the others.
        """
        missing, elsewhere = self.missing(key, members), self._elsewhere.get(key, {})
        busy = [r for r in missing if r in elsewhere and elsewhere[r][0]]
        return [r for r in missing if r not in busy] or missing

    def whereabouts(self, key: int) -> dict[int, str]:
        """Return, for each rank that is known not to have entered operation `key`, where it is."""
        return {rank: where for rank, (where, _) in sorted(self._elsewhere.get(key, {}).items())}

    def waits_elsewhere(self, key: int) -> list[tuple[int, int]]:
        """Return the operations in which ranks wait that have not entered operation `key`."""
        answers = self._elsewhere.get(key, {}).values()
        return [waits_in for _, waits_in in answers if waits_in is not None]

    @property
    def gone(self) -> Collection[int]:
        """The other ranks that have left or died."""
        return self._gone

    @property
    def is_fatal(self) -> bool:
        """True once a rank has died without which the job does not go on, or others because of it.

        Those may be heard of before it.
        """
        if not self.dead:
            return False
        return not self.survivable.issuperset((*self.dead, *self._followed.values()))

    def are_parted(self, members: Collection[int], *, or_left: bool = False) -> bool:
        """Return True if some of these ranks died, or left, and the job goes on without them.

        So it does if it goes on after deaths at all, and without all ranks that died.
        """
        goes_on = bool(self.survivable) and not self.is_fatal
        missing = self._gone if or_left else self.dead
        return goes_on and any(rank in missing for rank in members)

    @property
    def are_all_gone(self) -> bool:
        return len(self._gone) == self.size - 1

    @property
    def still_here(self) -> list[int]:
        return [r for r in range(self.size) if r != self.rank and r not in self._gone]
