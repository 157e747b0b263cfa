"""Agrees on the training step at which all ranks take a command. Pure.

The rank that gets the command proposes it to the others. Each promises not to go beyond its next
step boundary before it hears at which step the command is taken. That is the first step that no
rank has completed when it promised. Ranks need not be in step, no message is sent while there is no
command, and nobody waits for data: the promises come from the progress loop, not from the program.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple


class RoundMessage(IntEnum):
    """Kinds of messages about a round."""

    PROPOSED = 0  # the text is the command
    PROMISED = 1  # `step` is the last one that the sender has completed
    AGREED = 2  # `step` is the one after which the command is taken
    # Messages about signals, which belong to no round; see stop_signals.py.
    READY = 3  # the sender takes commands, and the receiver does not
    ASKED = 4  # the sender has got a signal, and the receiver takes commands
    STOPPED = 5  # the sender has taken the command to stop


class Note(NamedTuple):
    dest: int
    phase: RoundMessage
    key: int
    step: int = 0
    text: str = ""


@dataclass
class _Round:
    text: str
    members: tuple[int, ...] = ()  # all that take it; of the rank that has proposed
    target: int | None = None
    promises: dict[int, int] = field(default_factory=dict)  # of the rank that has proposed
    tellers: set[int] = field(default_factory=set)  # ranks that have told this one of it


class ControlRounds:
    """The commands that this rank has heard of and not taken.

    Args:
        me: this rank.
    """

    def __init__(self, me: int) -> None:
        self._me = me
        self._rounds: dict[int, _Round] = {}
        self._over: set[int] = set()  # keys of rounds that this rank has heard of and taken
        self._heirs: list[int] = []  # ranks that have begun beside this one
        self._completed = 0
        self._is_at_boundary = False
        self._n_proposed = 0

    @property
    def missing(self) -> list[int]:
        mine = [e for k, e in self._rounds.items() if k >> 32 == self._me and e.target is None]
        return sorted({r for each in mine for r in each.members if r not in each.promises})

    @property
    def must_hold(self) -> bool:
        """True if this rank must not leave its step boundary: a step is not agreed on."""
        return any(each.target is None for each in self._rounds.values())

    @property
    def has_due(self) -> bool:
        return not self.must_hold and any(
            each.target is not None and each.target <= self._completed
            for each in self._rounds.values()
        )

    def knows(self, text: str) -> bool:
        return any(each.text == text for each in self._rounds.values())

    def enter(self, completed: int) -> None:
        self._completed, self._is_at_boundary = completed, True

    def catch_up(self, completed: int) -> None:
        """Count boundaries at which this rank was not, as having left them."""
        self._completed, self._is_at_boundary = completed, False

    def pass_on(self, rank: int) -> list[Note]:
        """Let a rank that begins where this one is, between two boundaries, hear what this does.

        Who has proposed a command may not have known that rank. If it did, that hears of it twice.
        """
        self._heirs.append(rank)
        notes = []
        for key, each in self._rounds.items():
            notes.append(Note(rank, RoundMessage.PROPOSED, key, text=each.text))
            if each.target is not None:
                notes.append(Note(rank, RoundMessage.AGREED, key, each.target))
        return notes

    def leave(self) -> bool:
        if self._rounds and (self.must_hold or self.has_due):
            return False
        self._is_at_boundary = False
        return True

    def propose(self, text: str, members: Sequence[int], gone: Collection[int] = ()) -> list[Note]:
        """Begin a round of these ranks, this one included; `gone` are ranks that take no part."""
        key = self._me << 32 | self._n_proposed
        self._n_proposed += 1
        self._rounds[key] = _Round(text, tuple(members), promises={self._me: self._promised})
        others = [rank for rank in members if rank != self._me and rank not in gone]
        return [
            *(Note(rank, RoundMessage.PROPOSED, key, text=text) for rank in others),
            *self.settle(gone),
        ]

    def hear(self, source: int, note: Note, gone: Collection[int] = ()) -> list[Note]:
        """Take a message of another rank; return the answers to it."""
        if note.phase == RoundMessage.PROPOSED:
            if note.key not in self._over:
                self._rounds.setdefault(note.key, _Round(note.text)).tellers.add(source)
            promise = Note(source, RoundMessage.PROMISED, note.key, self._promised)
            return [promise, *self._passed_on(note, gone)]
        known = self._rounds.get(note.key)
        if known is None:
            return []
        if note.phase == RoundMessage.AGREED:
            known.target = note.step
            return self._passed_on(note, gone)
        known.promises[source] = note.step
        return self.settle(gone)

    def settle(self, gone: Collection[int] = ()) -> list[Note]:
        """Agree on the steps of own rounds for which all ranks that are not gone have promised.

        Those of ranks that are gone, and have not agreed, are over; so are those of which nobody
        who lives would tell this rank at which step.
        """
        notes = []
        for key, each in [*self._rounds.items()]:
            is_orphan = each.tellers and each.tellers.issubset(gone)
            if each.target is None and (key >> 32 in gone or is_orphan):
                del self._rounds[key]
        for key, each in self._rounds.items():
            if key >> 32 != self._me or each.target is not None:
                continue
            if any(r not in each.promises and r not in gone for r in each.members):
                continue
            each.target = max(each.promises.values()) + 1
            others = [
                rank
                for rank in {*each.promises, *self._heirs}
                if rank != self._me and rank not in gone
            ]
            notes += [Note(rank, RoundMessage.AGREED, key, each.target) for rank in others]
        return notes

    def take_due(self) -> list[tuple[str, bool]]:
        """Return the commands to be taken at this boundary, and whether this rank proposed them.

        The order is the same on all ranks.
        """
        if self.must_hold:
            return []
        due = sorted(
            (each.target, key)
            for key, each in self._rounds.items()
            if each.target is not None and each.target <= self._completed
        )
        self._over.update(key for _, key in due)
        return [(self._rounds.pop(key).text, key >> 32 == self._me) for _, key in due]

    def _passed_on(self, note: Note, gone: Collection[int]) -> list[Note]:
        return [note._replace(dest=rank) for rank in self._heirs if rank not in gone]

    @property
    def _promised(self) -> int:
        return self._completed - self._is_at_boundary
