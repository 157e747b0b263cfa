"""News for all ranks: that one leaves, failed, broke off or gave up. Pure.

Among few ranks everybody tells everybody. Among more a rank tells those 1, 2, 4, 8, ... behind it,
and passes on what is new to it: ceil(log2 size) messages per rank and piece of news. Instead of one
that has died it tells the next that lives, all over again, so no death cuts off others. One that
leaves before the others have, after a failure, passes on nothing from then on: it tells everybody
itself, and those that pass news to it add the next rank. As it may begin anew, each rank that
leaves tells it so, but nothing of the goodbyes of others: nobody would receive them. What many
ranks say in the same words is sent from time to time, with the ranks as ranges.

Goodbyes mostly come from all at once: each rank waits until those before it have left, and says so
of 1, 2, 4, ... of them, a dissemination barrier (Hensgen, Finkel and Manber 1988,
doi:10.1007/BF01379320). What is not over soon is passed on like other news.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ringcomm.transport.header import Kind
from ringcomm.transport.members import parts, ranges_of

DIRECT = 16  # ranks up to which everybody tells everybody
SOON_S, LATE_S = 0.05, 1.0  # before more of the same words is passed on: at first, at most
GRACE_S = 0.2  # in which all ranks may leave, and nothing need be passed on
_RANGES_MAX = 900  # bytes
_SILENT = 1  # `key` of a LEFT: the rank passes on nothing more
_GAVE_UP_MAX = 64  # texts; who waits for yet another rank has the same deadline


class Fact(NamedTuple):
    """Words that ranks say, and pass on."""

    kind: Kind  # LEFT, FAILED, BROKE, GAVE_UP or ABSENT
    text: str  # see Kind
    about: int = 0  # the rank that failed
    key: int = 0  # of the operation; see _SILENT


class Message(NamedTuple):
    """Words of some ranks, for one other."""

    dest: int  # whom they are sent to
    fact: Fact  # the words
    ranks: str  # who says so, as ranges: "0-15,17"
    is_round: bool = False  # it belongs to the barrier of goodbyes


@dataclass
class _Edge:
    """A rank that is told: how much of the log it knows."""

    distance: int
    dest: int
    told: int = 0  # entries


class News:
    """The news of one rank, its own and those that it passes on.

    Args:
        rank: this one.
        size: of the job.

    Attributes:
        due_at: when something is to be sent, in seconds of the caller's clock.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._is_direct = size <= DIRECT
        powers = (1 << k for k in range((size - 1).bit_length()))
        distances = range(1, size) if self._is_direct else powers
        self._edges = [_Edge(each, (rank + each) % size) for each in distances]
        self._dead: set[int] = set()
        self._silent: set[int] = set()  # other ranks that pass on nothing
        self._own: list[Message] = []  # what this rank says to others itself
        self._said: dict[Fact, set[int]] = {}
        self._log: list[tuple[Fact, Collection[int]]] = []
        self._left: dict[int, Fact] = {}
        self._n_before = 0  # ranks up to this one, without a gap, that have left
        self._rounds = [] if self._is_direct else list(reversed(self._edges))
        # Goodbyes do not all come at once, so they are passed on; new words do not wait for more.
        self._is_slow = self._is_urgent = False
        self._pass_on_at = self.due_at = math.inf
        self._passed_on_at, self._pause_s = -math.inf, SOON_S

    def say(self, fact: Fact, now: float, *, is_last: bool = False) -> None:
        """Take note of what this rank says; is_last: it passes nothing on from now on."""
        if is_last and not self._is_direct:
            fact = fact._replace(key=_SILENT)
            others = set(range(self._size)) - self._dead - {self._rank}
            self._say_itself(fact, others)
        elif fact.kind is Kind.LEFT:
            self._say_itself(fact, self._silent)
        is_round = fact.kind is Kind.LEFT and not is_last and not self._is_direct
        who = fact.about if fact.kind is Kind.FAILED else self._rank  # whoever says it
        self.hear(fact, (who,), now, is_round=is_round, is_own=True)

    def hear(
        self,
        fact: Fact,
        ranks: Collection[int],
        now: float,
        *,
        is_round: bool = False,
        is_own: bool = False,
    ) -> list[int]:
        """Take note of what ranks say, see Message; return those of which it is new."""
        said: Collection[int] = self._said.get(fact, ())
        new = [rank for rank in ranks if rank not in said]
        if not new:
            return new
        if fact.kind is Kind.LEFT:
            self._left.update(dict.fromkeys(new, fact))
            self._is_slow |= not is_round
            self.due_at = min(self.due_at, now)
            if fact.key == _SILENT:
                self._bypass(set(new) - {self._rank}, now)
                if self._rank in self._left and not is_own:
                    self._say_itself(self._left[self._rank], new)
        if is_own or (not self._is_direct and self._is_worth_passing_on(fact)):
            self._log.append((fact, new))
            if self._is_direct or not (said or is_round):
                self._is_urgent = True
                self._hasten(now)
            else:
                grace_s = 0.0 if self._is_slow or fact.kind is not Kind.LEFT else GRACE_S
                self._hasten(max(now + grace_s, self._passed_on_at + self._pause_s))
        self._said.setdefault(fact, set()).update(new)
        if len(self._left) == self._size and not self._is_direct:
            self._pass_on_at = now if self._is_slow else math.inf
        return new

    def lose(self, rank: int, now: float) -> None:
        """Take note of a death: the next rank that lives is told instead."""
        self._dead.add(rank)
        for edge in self._edges:
            if edge.dest == rank and not self._is_direct:
                edge.dest, edge.told = self._next_of(rank), 0
                self._hasten(now)

    def _say_itself(self, fact: Fact, ranks: Collection[int]) -> None:
        self._own += [Message(rank, fact, str(self._rank)) for rank in sorted(ranks)]

    def _bypass(self, ranks: set[int], now: float) -> None:
        """Tell also the next rank: these hear what they are told if they begin anew, not before."""
        self._silent |= ranks
        for edge in [each for each in self._edges if each.dest in ranks]:
            dest = self._next_of(edge.dest)
            if all(each.dest != dest for each in self._edges):
                self._edges.append(_Edge(edge.distance, dest))
                self._hasten(now)

    def _next_of(self, rank: int) -> int:
        """Return the next rank that passes news on, this one if there is none."""
        while rank in self._dead or rank in self._silent:
            rank = (rank + 1) % self._size
        return rank

    def due(self, now: float) -> list[Message]:
        """Return what is to be sent now."""
        if now < self.due_at:
            return []
        messages = [*self._own, *self._goodbyes()]
        self._own = []
        if now >= self._pass_on_at:
            if not self._is_urgent:
                is_soon = now - self._passed_on_at < 2 * self._pause_s
                self._pause_s = min(2 * self._pause_s, LATE_S) if is_soon else SOON_S
                self._passed_on_at = now
            self._pass_on_at, self._is_urgent = math.inf, False
            messages += self._passed_on()
        self.due_at = self._pass_on_at
        return messages

    def _is_worth_passing_on(self, fact: Fact) -> bool:
        if fact.kind is not Kind.GAVE_UP or fact in self._said:
            return True
        return sum(each.kind is Kind.GAVE_UP for each in self._said) < _GAVE_UP_MAX

    def _hasten(self, at: float) -> None:
        self._pass_on_at = min(self._pass_on_at, at)
        self.due_at = min(self.due_at, at)

    def _goodbyes(self) -> Iterator[Message]:
        """Yield the rounds of the barrier that this rank has come to."""
        if self._rank not in self._left:
            return
        rank, size = self._rank, self._size
        while self._n_before < size and (rank - self._n_before) % size in self._left:
            self._n_before += 1
        while self._rounds and self._n_before >= self._rounds[-1].distance:
            edge = self._rounds.pop()
            if edge.dest in self._silent:
                continue
            words: dict[Fact, list[int]] = {}
            for before in ((rank - n) % size for n in range(edge.distance)):
                words.setdefault(self._left[before], []).append(before)
            yield from _messages(edge.dest, words, is_round=True)

    def _passed_on(self) -> Iterator[Message]:
        """Yield to each rank that is told what it has not been told yet."""
        for edge in self._edges:
            if edge.dest in self._dead or edge.dest == self._rank:
                continue
            words: dict[Fact, list[int]] = {}
            for fact, ranks in self._log[edge.told :]:
                if fact.kind is Kind.LEFT and edge.dest in self._silent:
                    continue
                words.setdefault(fact, []).extend(ranks)
            edge.told = len(self._log)
            yield from _messages(edge.dest, words)


def _messages(
    dest: int, words: dict[Fact, list[int]], *, is_round: bool = False
) -> Iterator[Message]:
    for fact, ranks in words.items():
        for text in parts(ranges_of(ranks), _RANGES_MAX):
            yield Message(dest, fact, text, is_round)
