"""News for all ranks: a rank leaves, failed, gave up waiting, or broke off its operations. Pure.

In a small job, every rank sends its news to all others. In a larger job, a rank sends to the ranks
1, 2, 4, 8, ... places after it, and they pass on the news that they did not know: ceil(log2 size)
messages per rank and piece of news. If one of these ranks is dead, the next live rank gets all news
instead, so no death cuts off others. If many ranks send the same text, it is passed on in batches:
each batch lists the new ranks, as ranges.

A rank that leaves waits for all others, and passes on news meanwhile. After a failure, some ranks
may never leave, so a leaving rank rests instead: it passes on news for REST_S. Then it sends its
goodbye directly to each rank that does not rest, and passes on nothing more, except before a new
init(). The other ranks skip the resting ones, so news still reaches all ranks that do not rest.

Mostly, all ranks leave at the same time. Their goodbyes form a dissemination barrier (Hensgen,
Finkel and Manber 1988, doi:10.1007/BF01379320): once the k ranks that end with this one have
left (k = 1, 2, 4, ...), this rank sends their goodbyes to the rank k places after it. If the
barrier takes long, goodbyes are passed on like other news.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ringcomm.ranks_as_text import parts, ranges_of
from ringcomm.transport.control_header import ControlKind

DIRECT = 16  # ranks of the largest job in which every rank sends its news to all others
SOON_S, LATE_S = 0.05, 1.0  # first and longest pause before a known text is passed on again
GRACE_S = 0.2  # if all ranks leave within this time, no goodbye is passed on
_RANGES_MAX = 900  # bytes
REST_S = 1.0  # mostly, all ranks leave within this time after a failure
WAITS, RESTS = range(2)  # `key` of a LEFT
_GAVE_UP_MAX = 64  # texts of GAVE_UP passed on; a rank that gets none ends at its own deadline


class Fact(NamedTuple):
    """A piece of news that ranks send and pass on."""

    kind: ControlKind  # LEFT, FAILED, BROKE, GAVE_UP or ABSENT
    text: str  # see Kind
    about: int = 0  # the rank that failed
    key: int = 0  # key of the operation; if the kind is LEFT: WAITS or RESTS


class NewsMessage(NamedTuple):
    """A fact that comes from some ranks, for one other rank."""

    dest: int  # the receiver
    fact: Fact
    ranks: str  # the ranks from which the fact comes, as ranges: "0-15,17"
    is_round: bool = False  # the message belongs to the barrier of goodbyes


@dataclass
class _Edge:
    """A rank to which this rank sends, and how much of the log it was sent."""

    distance: int
    dest: int
    n_sent: int = 0  # entries of the log that were sent


class News:
    """The news that one rank sends: its own, and the news that it passes on.

    Args:
        rank: this rank.
        size: number of ranks of the job.

    Attributes:
        due_at: the time of the next message, in seconds of the caller's clock.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._is_direct = size <= DIRECT
        powers = (1 << k for k in range((size - 1).bit_length()))
        distances = range(1, size) if self._is_direct else powers
        self._edges = [_Edge(each, (rank + each) % size) for each in distances]
        self._dead: set[int] = set()
        self._resting: set[int] = set()  # other ranks that rest
        self._said: dict[Fact, set[int]] = {}
        self._log: list[tuple[Fact, Collection[int]]] = []
        self._left: dict[int, Fact] = {}
        self._n_before = 0  # how many consecutive ranks, up to and including this one, have left
        self._rounds = [] if self._is_direct else list(reversed(self._edges))
        # Slow: goodbyes come late, so they are passed on. Urgent: a new text waits for no pause.
        self._is_slow = self._is_urgent = False
        self._pass_on_at = self.due_at = math.inf
        self._passed_on_at, self._pause_s = -math.inf, SOON_S

    def say(self, fact: Fact, now: float) -> None:
        is_goodbye = fact.kind is ControlKind.LEFT and self._rank not in self._left
        is_round = is_goodbye and not self._is_direct
        who = (
            fact.about if fact.kind is ControlKind.FAILED else self._rank
        )  # any rank may report FAILED
        self.hear(fact, (who,), now, is_round=is_round, is_own=True)

    def end_of_rest(self) -> list[NewsMessage]:
        """Return this rank's goodbye, addressed to each live rank that does not rest."""
        others = set(range(self._size)) - {self._rank} - self._dead - self._resting
        rests = self._left[self._rank]
        return [NewsMessage(rank, rests, str(self._rank)) for rank in sorted(others)]

    def hear(
        self,
        fact: Fact,
        ranks: Collection[int],
        now: float,
        *,
        is_round: bool = False,
        is_own: bool = False,
    ) -> list[int]:
        """Add a fact that comes from `ranks`; return the ranks from which it is new."""
        said: Collection[int] = self._said.get(fact, ())
        new = [rank for rank in ranks if rank not in said]
        if not new:
            return new
        if fact.kind is ControlKind.LEFT:
            self._left.update(dict.fromkeys(new, fact))
            self._is_slow |= not is_round
            self.due_at = min(self.due_at, now)
            if fact.key != WAITS and not is_own:
                self._go_round(set(new), now)
        if is_own or (not self._is_direct and self._is_worth_passing_on(fact)):
            self._log.append((fact, new))
            if self._is_direct or not (said or is_round):
                self._is_urgent = True
                self._hasten(now)
            else:
                grace_s = 0.0 if self._is_slow or fact.kind is not ControlKind.LEFT else GRACE_S
                self._hasten(max(now + grace_s, self._passed_on_at + self._pause_s))
        self._said.setdefault(fact, set()).update(new)
        if len(self._left.keys() | self._dead) == self._size and not self._is_direct:
            self._pass_on_at = now if self._is_slow else math.inf
        return new

    def lose(self, rank: int, now: float) -> None:
        """Record that `rank` died: the next live rank that does not rest gets all news instead."""
        self._dead.add(rank)
        for edge in self._edges:
            if edge.dest == rank and not self._is_direct:
                edge.dest, edge.n_sent = self._next_of(rank), 0
                self._hasten(now)

    def _go_round(self, ranks: set[int], now: float) -> None:
        """Note that `ranks` rest; unless this rank rests, send also to the next that does not."""
        self._resting |= ranks
        if self._rank in self._left and self._left[self._rank].key == RESTS:
            return
        for edge in [each for each in self._edges if each.dest in ranks]:
            dest = self._next_of(edge.dest)
            if all(each.dest != dest for each in self._edges):
                self._edges.append(_Edge(edge.distance, dest))
                self._hasten(now + SOON_S)  # mostly, many ranks begin to rest at the same time

    def _next_of(self, rank: int) -> int:
        """Return `rank`, or the next rank after it that is live and does not rest, or this rank."""
        while rank in self._dead or rank in self._resting:
            rank = (rank + 1) % self._size
        return rank

    def due(self, now: float) -> list[NewsMessage]:
        if now < self.due_at:
            return []
        messages = [*self._goodbyes()]
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
        if fact.kind is not ControlKind.GAVE_UP or fact in self._said:
            return True
        return sum(each.kind is ControlKind.GAVE_UP for each in self._said) < _GAVE_UP_MAX

    def _hasten(self, at: float) -> None:
        self._pass_on_at = min(self._pass_on_at, at)
        self.due_at = min(self.due_at, at)

    def _goodbyes(self) -> Iterator[NewsMessage]:
        """Yield the messages of the barrier's rounds that this rank has reached."""
        if self._rank not in self._left:
            return
        rank, size = self._rank, self._size
        while self._n_before < size and (rank - self._n_before) % size in self._left:
            self._n_before += 1
        while self._rounds and self._n_before >= self._rounds[-1].distance:
            edge = self._rounds.pop()
            words: dict[Fact, list[int]] = {}
            for before in ((rank - n) % size for n in range(edge.distance)):
                words.setdefault(self._left[before], []).append(before)
            yield from _messages(edge.dest, words, is_round=True)

    def _passed_on(self) -> Iterator[NewsMessage]:
        """Yield the entries of the log that the receivers do not have yet."""
        for edge in self._edges:
            if edge.dest in self._dead or edge.dest == self._rank:
                continue
            words: dict[Fact, list[int]] = {}
            for fact, ranks in self._log[edge.n_sent :]:
                words.setdefault(fact, []).extend(ranks)
            edge.n_sent = len(self._log)
            yield from _messages(edge.dest, words)


def _messages(
    dest: int, words: dict[Fact, list[int]], *, is_round: bool = False
) -> Iterator[NewsMessage]:
    for fact, ranks in words.items():
        for text in parts(ranges_of(ranks), _RANGES_MAX):
            yield NewsMessage(dest, fact, text, is_round)
