"""The rounds of one unit: which push belongs to which, and when a round ends. Pure."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from ringcomm.ps.server.core.actions import (
    Action,
    End,
    Hold,
    Key,
    Late,
    ReleaseDone,
    RoundContribution,
)

_KEPT: Final = 4096  # rounds of a worker that may not be over in all blocks


class Release(NamedTuple):
    """A request to end the round whose mean is held, or is going to be."""

    number: int  # of the round
    request: Any
    payload: Any
    drops: bool  # the mean


class Rounds:
    """Contributions of workers to one unit, round by round.

    | state of the current round | event | what follows |
    |---|---|---|
    | open | the last contribution, or a worker leaves | End; Hold if a contribution is to be held |
    | open | a release | it waits for the mean |
    | held | a release | End, then ReleaseDone; so for each that waits |
    | held | all have left whose mean it is | End, which drops the mean |
    | open | a worker dies | its contributions are dropped; then as if it had left |
    | open, FirstOf | all that were let in are dead | End without contributions |
    | open, without contributions | no worker lives, and it is to go further | the same |
    | open, without contributions | those that live all join in later rounds | the same |
    | any | a contribution or a release of a round that is over | Late; ReleaseDone |

    While limit() stands, the unit goes no further than it says. A server that heard of a death
    before others did may have dropped what ended a round there, so it may have to go further.

    Args:
        key: of the unit.
        workers: those that contribute, while they live.
        first_of: so many are in a round, of those that were let in; None: all who contribute.

    Attributes:
        current: rounds that are over.
        without: of FirstOf, dead workers that were let in, by round: nobody waits for them.
    """

    def __init__(self, key: Key, workers: Iterable[int], first_of: int | None = None) -> None:
        self.without: Mapping[int, set[int]] = {}
        self._key = key
        self._live = set(workers)
        self._coming: dict[int, int] = {}  # workers that join: from this round on
        self._began: dict[int, int] = {}  # those that have come, too
        self._first_of = first_of
        self._came: defaultdict[int, dict[int, RoundContribution]] = defaultdict(dict)
        self._let_in: defaultdict[int, set[int]] = defaultdict(set)
        self._held: frozenset[int] | None = None  # workers whose mean waits for a release
        self._releases: list[Release] = []
        self._limits: dict[int, tuple[int, bool]] = {}
        self._goals: dict[int, tuple[int, bool]] = {}  # those limits that are to be reached
        self._has_lost = False  # a worker died, whose contributions others may have had
        self.current = 0

    def contribute(
        self, number: int, contribution: RoundContribution, *, lets_in: bool = False
    ) -> list[Action]:
        """Take a contribution to a round; lets_in: its worker was let into that round before."""
        if number < self.current or (number == self.current and self._held is not None):
            return [Late(self._key, contribution)]
        self._came[number][contribution.worker] = contribution
        if lets_in:
            self._let_in[number].add(contribution.worker)
        if self._first_of is None and len(self._came[number]) < len(self._live):
            return []  # as a rule
        return self.advance()

    def decide(self, worker: int, number: int, *, is_in: bool) -> list[Action]:
        """Count a worker's contribution to a round of FirstOf, or drop it as late."""
        if is_in:
            if number >= self.current:
                self._let_in[number].add(worker)
            return self.advance()
        came = self._came.get(number, {})
        dropped = came.pop(worker, None)
        if not came:
            self._came.pop(number, None)
        return [] if dropped is None else [Late(self._key, dropped)]

    def release(self, release: Release) -> list[Action]:
        """End the round whose mean is held; the content of the first release counts."""
        self._releases.append(release)
        return self.advance()

    def join(self, worker: int, number: int) -> list[Action]:
        """Wait for a worker from a round on; the last call counts."""
        self._live.discard(worker)
        self._coming[worker] = self._began[worker] = number
        return self.advance()

    def leave(self, worker: int) -> list[Action]:
        """Wait no more for a worker; what it has contributed counts."""
        self._live.discard(worker)
        self._coming.pop(worker, None)
        self._began.pop(worker, None)
        return self.advance()

    def die(self, worker: int) -> list[Action]:
        """Wait no more for a worker that died; it did not end the step of an open round."""
        for number in [*self._came]:
            self._came[number].pop(worker, None)
            if not self._came[number]:
                del self._came[number]
        for let_in in self._let_in.values():
            let_in.discard(worker)
        self._releases = [each for each in self._releases if each.request.header.origin != worker]
        self._has_lost = True
        return self.leave(worker)

    def limit(self, who: int, at: tuple[int, bool]) -> None:
        """Go no further than `at`, see the property of that name, until unlimit(who)."""
        self._limits[who] = at

    def reach(self, who: int, at: tuple[int, bool]) -> list[Action]:
        """Go as far as `at`, with no contributions if nobody is left to make them; see limit()."""
        self._limits[who] = self._goals[who] = at
        return self.advance()

    @property
    def is_over(self) -> bool:
        """True if workers died, and none lives that could contribute to the current round."""
        is_empty = self._held is None and self.current not in self._came
        return self._has_lost and is_empty and not (self._live or self._coming)

    def has_reached(self, at: tuple[int, bool]) -> bool:
        """Return True if the unit has come as far as `at`, or would have to hold no mean at all."""
        return self.at >= at or (at == (self.current, True) and self._complete() == [])

    def unlimit(self, *who: int) -> list[Action]:
        for each in who:
            self._limits.pop(each, None)
            self._goals.pop(each, None)
        return self.advance()

    def advance(self) -> list[Action]:
        """Return the actions that end the rounds that are complete, and may end."""
        actions: list[Action] = []
        while True:
            if self._coming:
                _let_come(self._coming, self._live, self.current)
            if self._releases:
                self._answer_releases(actions)
            may_end = _may_be((self.current + 1, False), self._limits.values())
            if self._held is None:
                came = self._complete()
                if came is None:
                    return actions
                is_held = any(each.is_held for each in came)
                if is_held:
                    may_end = _may_be((self.current, True), self._limits.values())
                if not may_end:
                    return actions
                if not came:
                    self._let_in.pop(self.current, None)
                    ended = End(self._key, self.current + 1, came, drops=True)
                    self.current += 1
                    actions.append(ended)
                    continue
                if is_held:
                    self._take(came)
                    self._held = frozenset(each.worker for each in came)
                    actions.append(Hold(self._key, self.current + 1, came))
                    continue
                self._take(came)
                ended = End(self._key, self.current + 1, came)
            else:
                due = [each for each in self._releases if each.number == self.current]
                is_deserted = self._live.isdisjoint(self._held)
                if not may_end or not (due or is_deserted):
                    return actions
                drops, factor = (due[0].drops, due[0].payload) if due else (True, None)
                ended = End(self._key, self.current + 1, [], drops, factor)
                self._held = None
            self.current += 1
            actions.append(ended)

    def _answer_releases(self, actions: list[Action]) -> None:
        over = [each for each in self._releases if each.number < self.current]
        if over:
            self._releases = [each for each in self._releases if each.number >= self.current]
            actions += [ReleaseDone(self._key, each.request) for each in over]

    def _complete(self) -> list[RoundContribution] | None:
        """Return the contributions to the current round, in worker order; None: some are missing.

        Worker order makes the sum the same whatever the order of arrival.
        """
        came = self._came.get(self.current)
        without = self.without.get(self.current, ()) if self.without else ()
        if self._goals and self.is_over and self.at < max(self._goals.values()):
            return []
        goes_by = bool(self._coming) and not self._live  # all who were to be in it have gone
        if not (came or without):
            return [] if goes_by else None
        counting = set(came or ())
        if self._first_of is not None:
            counting &= self._let_in.get(self.current, set())
            n_awaited = self._first_of - len(without)
            if len(counting) < n_awaited and not self._live <= counting:
                return None
            if not counting:
                return [] if goes_by or n_awaited <= 0 else None
        elif not self._live <= counting:
            return None
        assert came is not None
        return [came[worker] for worker in sorted(counting)] or None

    def missing(self, rank: int) -> tuple[str, set[int]] | None:
        """Return what a contribution or a release of a rank waits for, and for whom; None: nothing.

        It says the round, and the workers of whom one or all must do something.
        """
        waits = any(rank in came for came in self._came.values())
        waits = waits or any(each.request.header.origin == rank for each in self._releases)
        return self.missing_now() if waits else None

    def missing_now(self) -> tuple[str, set[int]]:
        """Return what the current round waits for, and for whom."""
        number = self.current + 1
        if self._held is not None:
            return f"the release of round {number}", {*self._held} & self._live
        absent = self._live - self._came.get(self.current, {}).keys()
        if self._limits and not absent:
            return f"a snapshot, which stops rounds at {number - 1}", set()
        if self._first_of is None:
            return f"round {number}", absent
        n_in = len(self._let_in.get(self.current, ()))
        return f"round {number}, {n_in} of {self._first_of} in", absent

    def _take(self, came: Iterable[RoundContribution]) -> None:
        """Forget these; contributions of workers that are not in the round stay for decide()."""
        waiting = self._came[self.current]
        for each in came:
            del waiting[each.worker]
        if not waiting:
            del self._came[self.current]
        self._let_in.pop(self.current, None)

    # --- moves and checkpoints ------------------------------------------------------------------
    @property
    def held(self) -> frozenset[int] | None:
        """The workers whose mean waits for its release; None if no mean does."""
        return self._held

    @property
    def at(self) -> tuple[int, bool]:
        """Number of rounds that are over, and whether the next mean is held."""
        return self.current, self._held is not None

    def pending(self) -> list[RoundContribution]:
        return [came[worker] for _, came in sorted(self._came.items()) for worker in sorted(came)]

    def requests(self) -> list[Any]:
        contributions = [each.request for each in self.pending()]
        return [*contributions, *(each.request for each in self._releases)]

    def give_back(self) -> list[Any]:
        requests = self.requests()
        self._came.clear()
        self._releases.clear()
        return requests

    def let_in(self) -> list[tuple[int, int]]:
        return [(n, worker) for n, workers in sorted(self._let_in.items()) for worker in workers]

    def resume(
        self, current: int, let_in: Iterable[Sequence[int]], held: Iterable[int] | None
    ) -> None:
        self.current = current
        for worker, first in self._began.items():
            if first > current:
                self._live.discard(worker)
                self._coming[worker] = first
        self._held = None if held is None else frozenset(held)
        for number, worker in let_in:
            self._let_in[number].add(worker)


class Entries:
    """The workers in each round of ps.FirstOf(k): the first k that ask for it.

    A worker asks once for all blocks, on whatever servers, that its gradient has a part in.

    Args:
        workers: those that may ask, while they live.
        first_of: k. Fewer are in a round if fewer live.

    Attributes:
        current: rounds whose workers are known.
        joined: of a table that shares these rounds: the one in which it began.
    """

    def __init__(self, workers: Iterable[int], first_of: int) -> None:
        self._live = set(workers)
        self._coming: dict[int, int] = {}  # workers that join: from this round on
        self._first_of = first_of
        self._in: defaultdict[int, set[int]] = defaultdict(set)
        self._rounds: dict[int, deque[int]] = {}  # of each worker: those that it was let into
        self.joined: dict[int, int] = {}  # of a later table: the round in which it began
        self.current = 0

    def ask(self, worker: int, number: int) -> bool:
        """Take a worker into a round; return False if it comes too late.

        A worker that asks again, because the answer was lost, gets the same answer.
        """
        rounds = self._rounds.setdefault(worker, deque(maxlen=_KEPT))
        if number < self.current:
            return number in rounds
        if len(self._in[number]) >= self._first_of and worker not in self._in[number]:
            return False
        if number not in rounds:
            rounds.append(number)
        self._in[number].add(worker)
        self._advance()
        return True

    def state(self) -> dict[str, Any]:
        """Return all there is to it, as load() takes it, but for who lives."""
        return {
            "current": self.current,
            "in": [(number, sorted(workers)) for number, workers in self._in.items()],
            "rounds": [(worker, [*rounds]) for worker, rounds in self._rounds.items()],
            "joined": [*self.joined.items()],
        }

    def load(self, state: dict[str, Any]) -> None:
        self.current, self.joined = state["current"], dict(state["joined"])
        self._in.update((number, {*workers}) for number, workers in state["in"])
        self._rounds = {worker: deque(rounds, _KEPT) for worker, rounds in state["rounds"]}

    def join(self, table: int) -> int:
        """Return the round in which another table begins to share these rounds."""
        return self.joined.setdefault(table, self.current)

    def come(self, worker: int, number: int) -> None:
        """Wait for a worker from a round on; the last call counts."""
        self._live.discard(worker)
        self._coming[worker] = number
        self._advance()

    def leave(self, worker: int) -> None:
        self._live.discard(worker)
        self._coming.pop(worker, None)
        self._advance()

    def die(self, worker: int) -> list[int]:
        """Wait no more for a worker; return the rounds that it was let into.

        Its places stay taken: somebody else's gradient could count in some blocks and not in others
        of which the dead worker's had come.
        """
        self.leave(worker)
        return [*self._rounds.pop(worker, ())]

    def _advance(self) -> None:
        while True:
            _let_come(self._coming, self._live, self.current)
            entered = self._in.get(self.current, set())
            if not entered and (self._live or not self._coming):
                return
            if len(entered) < self._first_of and not self._live <= entered:
                return
            self._in.pop(self.current, None)
            self.current += 1


def _may_be(at: tuple[int, bool], limits: Iterable[tuple[int, bool]]) -> bool:
    return all(at <= limit for limit in limits)


def _let_come(coming: dict[int, int], live: set[int], current: int) -> None:
    for worker in [worker for worker, number in coming.items() if number <= current]:
        del coming[worker]
        live.add(worker)


class Clocks:
    """The steps that each worker has completed, as one server knows it.

    Args:
        workers: those that count.

    Attributes:
        most: steps that any worker has completed.
    """

    def __init__(self, workers: Iterable[int]) -> None:
        self._of = dict.fromkeys(workers, 0)
        self.most = 0

    def tick(self, worker: int, clock: int) -> None:
        """A worker has completed so many steps; all that it pushed in them has been applied."""
        if worker in self._of:
            self._of[worker] = max(self._of[worker], clock)
            self.most = max(self.most, clock)

    def join(self, worker: int, clock: int) -> None:
        self._of.setdefault(worker, clock)
        self.tick(worker, clock)

    def leave(self, worker: int) -> None:
        self._of.pop(worker, None)

    @property
    def slowest(self) -> float:
        return min(self._of.values(), default=math.inf)

    def behind(self, clock: float) -> list[int]:
        return sorted(worker for worker, own in self._of.items() if own < clock)

    def all(self) -> dict[int, int]:
        """Return the clocks of those that count, in the same order on both copies of a server."""
        return dict(sorted(self._of.items()))

    def slowest_with(self, fence: Mapping[int, int]) -> float:
        if not fence:
            return self.slowest
        clocks = (min(clock, fence.get(worker, clock)) for worker, clock in self._of.items())
        return min(clocks, default=math.inf)
