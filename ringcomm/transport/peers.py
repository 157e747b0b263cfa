"""What this rank knows of the others. Pure: facts in, verdicts out; no I/O, no lock, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Obstacle:
    """Why an operation cannot complete: the rank to blame, and how it went."""

    rank: int
    reason: str


@dataclass(frozen=True)
class GaveUp:
    """A rank's deadline passed: all ranks of that operation raise what it raised."""

    sequence: int
    missing: tuple[int, ...]
    message: str

    def text(self) -> str:
        """Return the wire form."""
        return ",".join(map(str, self.missing)) + "\n" + self.message

    @classmethod
    def of_text(cls, sequence: int, text: str) -> GaveUp:
        """Read the wire form."""
        ranks, _, message = text.partition("\n")
        return cls(sequence, tuple(int(r) for r in ranks.split(",") if r), message)


@dataclass
class PeerTable:
    """Dead, departed and waiting ranks, as far as this rank has heard.

    Attributes:
        rank: this rank.
        size: number of ranks.
        dead: process gone, or said to have failed -> reason. Never shrinks.
        left: rank -> (number of its last operation, how it left).
        entered: rank -> number of the latest operation it said it has entered.
        gave_up: the earliest operation in which a deadline passed, None while all are patient.
    """

    rank: int
    size: int
    dead: dict[int, str] = field(default_factory=dict)
    left: dict[int, tuple[int, str]] = field(default_factory=dict)
    entered: dict[int, int] = field(default_factory=dict)
    gave_up: GaveUp | None = None
    _followers: set[int] = field(default_factory=set)

    def note_dead(self, rank: int, reason: str, *, blames: int) -> None:
        """`rank` is dead because of `blames`, itself unless it merely followed another."""
        if blames != rank:
            self._followers.add(rank)
            reason = f"stopped because rank {blames} failed"
        self.dead.setdefault(rank, reason)

    def note_failed(self, rank: int, reason: str) -> None:
        """`rank` was said to have failed, with better words than a bare death has."""
        self.dead[rank] = reason
        self._followers.discard(rank)

    def note_left(self, rank: int, sequence: int, how: str) -> None:
        """`rank` takes part in no operation after `sequence`."""
        self.left[rank] = (sequence, how)

    def note_entered(self, rank: int, sequence: int) -> None:
        """`rank` has entered operation `sequence`."""
        self.entered[rank] = max(sequence, self.entered.get(rank, 0))

    def note_gave_up(self, gave_up: GaveUp) -> None:
        """Some rank's deadline passed; the earliest operation counts, then the first to say so."""
        if self.gave_up is None or gave_up.sequence < self.gave_up.sequence:
            self.gave_up = gave_up

    def obstacle(self, sequence: int) -> Obstacle | None:
        """Return why operation `sequence` cannot complete, None if nothing stands in its way.

        The cause is named before those who followed it. A rank that left counts only if it left
        before that operation.
        """
        causes = {r: why for r, why in self.dead.items() if r not in self._followers}
        departed = {r: how for r, (last, how) in self.left.items() if last < sequence}
        for reasons in (causes, departed, self.dead):
            for rank, reason in reasons.items():
                return Obstacle(rank, departed.get(rank, reason))
        return None

    def missing(self, sequence: int) -> list[int]:
        """Return the ranks that have not said that they entered operation `sequence`."""
        return [
            r
            for r in range(self.size)
            if r != self.rank and self.entered.get(r, -1) < sequence and r not in self.dead
        ]

    @property
    def still_here(self) -> list[int]:
        """Ranks other than this that neither left nor died."""
        return [
            r
            for r in range(self.size)
            if r != self.rank and r not in self.dead and r not in self.left
        ]
