"""The state of the other ranks as known here. Pure: facts in, verdicts out; no I/O, no clock."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from ringcomm.transport.header import TEXT_MAX, cut
from ringcomm.transport.members import parts, ranges_of, ranks_in


@dataclass(frozen=True)
class Obstacle:
    """Why an operation cannot complete: the rank to blame, and how it went."""

    rank: int
    reason: str


@dataclass(frozen=True)
class GaveUp:
    """A rank's deadline passed: all ranks that still need it raise what it raised."""

    missing: tuple[int, ...]
    message: str

    def text(self) -> str:
        """Return the wire form: at most TEXT_MAX bytes, of the ranks as many as have room."""
        ranges = next(parts(ranges_of(self.missing), TEXT_MAX // 4))
        return f"{cut(self.message, TEXT_MAX // 4 * 3 - 1)}\n{ranges}"

    @classmethod
    def of_text(cls, text: str) -> GaveUp:
        """Read the wire form."""
        message, _, ranges = text.rpartition("\n")
        return cls(tuple(ranks_in(ranges)), message)


@dataclass
class PeerTable:
    """Dead, departed and waiting ranks, as far as this rank has heard.

    Attributes:
        rank: this rank.
        size: number of ranks.
        dead: process gone, or said to have failed -> reason. Never shrinks.
        left: rank -> how it left.
        absent: key of an operation -> ranks that left and will never enter it -> how they left.
        broken: rank whose engine is unusable, for it needed one that failed -> that one, and how.
        gave_up: rank -> what it raised when its deadline passed; it takes part in nothing more.
        has_lost: some rank is dead, broken or gave up.
    """

    rank: int
    size: int
    dead: dict[int, str] = field(default_factory=dict)
    left: dict[int, str] = field(default_factory=dict)
    absent: dict[int, dict[int, str]] = field(default_factory=dict)
    broken: dict[int, Obstacle] = field(default_factory=dict)
    gave_up: dict[int, GaveUp] = field(default_factory=dict)
    has_lost: bool = False
    _gone: set[int] = field(default_factory=set)
    _entered: dict[int, set[int]] = field(default_factory=dict)
    _elsewhere: dict[int, dict[int, str]] = field(default_factory=dict)
    _followed: dict[int, int] = field(default_factory=dict)

    def note_dead(self, rank: int, reason: str, *, blames: int) -> None:
        """`rank` is dead because of `blames`, itself unless it merely followed another."""
        if blames != rank:
            self._followed[rank] = blames
            reason = f"stopped because rank {blames} failed"
        self.dead.setdefault(rank, reason)
        self._gone.add(rank)
        self.has_lost = True

    def note_failed(self, rank: int, reason: str) -> None:
        """`rank` was said to have failed, with better words than a bare death has."""
        self.dead[rank] = reason
        self._gone.add(rank)
        self.has_lost = True
        self._followed.pop(rank, None)

    def note_left(self, rank: int, how: str) -> None:
        """`rank` enters no operation any more; those it has entered it completed."""
        self.left[rank] = how
        self._gone.add(rank)

    def note_absent(self, rank: int, key: int, how: str) -> None:
        """`rank` left before it entered operation `key`."""
        self.absent.setdefault(key, {})[rank] = how

    def note_broken(self, rank: int, cause: int, reason: str) -> None:
        """`rank` lives, but takes part in nothing more, because `cause` failed."""
        self.broken.setdefault(rank, Obstacle(cause, reason))
        self.has_lost = True

    def note_entered(self, rank: int, key: int) -> None:
        """`rank` has entered operation `key`."""
        self._entered.setdefault(key, set()).add(rank)
        self._elsewhere.get(key, {}).pop(rank, None)

    def note_elsewhere(self, rank: int, key: int, where: str) -> None:
        """`rank` was asked for operation `key`, which it had not entered; it was `where`."""
        self._elsewhere.setdefault(key, {})[rank] = where

    def note_gave_up(self, rank: int, gave_up: GaveUp) -> None:
        """The deadline of `rank` passed; what it said first counts."""
        self.gave_up.setdefault(rank, gave_up)
        self.has_lost = True

    def forget(self, key: int) -> None:
        """Operation `key` is over."""
        self._entered.pop(key, None)
        self._elsewhere.pop(key, None)

    def obstacle(self, key: int, members: Collection[int]) -> Obstacle | None:
        """Return why operation `key` of these ranks cannot complete, None if nothing hinders it.

        The cause is named before those who followed it, a member or not.
        """
        dead = {r: why for r, why in self.dead.items() if r in members}
        first = {self._followed.get(r, r) for r in dead}
        causes = {r: why for r, why in self.dead.items() if r in first - self._followed.keys()}
        absent = self.absent.get(key, {})  # disjoint groups may have operations of one key
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
        """Return what the first of these ranks said whose deadline passed."""
        return next((said for rank, said in self.gave_up.items() if rank in members), None)

    def missing(self, key: int, members: Collection[int]) -> list[int]:
        """Return those of `members` that have not said that they entered operation `key`."""
        entered = self._entered.get(key, set())
        return [r for r in members if r != self.rank and r not in entered and r not in self.dead]

    def whereabouts(self, key: int) -> dict[int, str]:
        """Return what the ranks that were asked for operation `key` were in instead."""
        return dict(sorted(self._elsewhere.get(key, {}).items()))

    @property
    def are_all_gone(self) -> bool:
        """True once no other rank is still here."""
        return len(self._gone) == self.size - 1

    @property
    def still_here(self) -> list[int]:
        """Ranks other than this that neither left nor died."""
        return [r for r in range(self.size) if r != self.rank and r not in self._gone]
