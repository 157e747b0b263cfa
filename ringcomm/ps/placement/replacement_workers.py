"""Ranks that take the places of workers and evaluators that died, as one server knows them. Pure.

| event | what follows |
|---|---|
| Awaits | the leader keeps the request until there is a place; then a reply that names it |
| Alone | a reply once no worker lives: how far all were |
| TookPlace | the newcomer counts from a given round on; if it cannot, a reply that is late |
| Retracted | it counts no more, and asks again |
| a worker leaves, or rests | training ends: no place of a worker is given any more |
| nobody is left to train | replies that are late |

The leader gives one place at a time, so a newcomer meets those that came before it.

A worker begins where another one is that stands still between two steps until all servers know it:
see ringcomm.ps.members. So no round of mode "sync" that it is to be in ends on any server before,
unless that other worker dies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, Protocol


class Newcomer(NamedTuple):
    """A rank that has taken a place.

    Attributes:
        rank: of the job.
        role: "worker" or "evaluator".
        place: the rank that died.
        number: ascends in the order in which they came.
    """

    rank: int
    role: str
    place: int
    number: int


class WorkerMembers(Protocol):
    """The ranks that take part, as of now."""

    @property
    def workers(self) -> tuple[int, ...]: ...
    @property
    def evaluators(self) -> tuple[int, ...]: ...
    @property
    def server_numbers(self) -> tuple[int, ...]: ...
    @property
    def leader(self) -> int: ...
    @property
    def waiting(self) -> tuple[int, ...]: ...  # stood by at first
    @property
    def ranks(self) -> Collection[int]: ...  # all of the job
    @property
    def n_losses(self) -> int: ...  # servers that had a place


class Beginning(NamedTuple):
    """Where a worker begins.

    Attributes:
        clock: steps that it counts as its own.
        rounds: those that are not its own, by table; 0 of a table that is not named.
    """

    clock: int
    rounds: Mapping[int, int]

    def to_json(self) -> list[Any]:
        return [self.clock, [*self.rounds.items()]]

    @classmethod
    def of_json(cls, data: list[Any]) -> Beginning:
        return cls(data[0], {int(table): n for table, n in data[1]})


class Newcomers:
    """The newcomers, and at the leader who waits for a place.

    Attributes:
        taken: those that have a place, by rank.
        began: where the workers among them began.
        fallen: ranks that died with a role, and had not left; in this order.
        is_ending: a worker has left, or rests.
        waiting: requests of ranks that wait for a place, by rank, and whether each can evaluate.
        alone: requests of newcomers that wait until no worker lives.
    """

    def __init__(self) -> None:
        self.taken: dict[int, Newcomer] = {}
        self.began: dict[int, Beginning] = {}
        self.fallen: dict[int, None] = {}
        self.is_ending = False
        self.waiting: dict[int, tuple[Any, bool]] = {}
        self.alone: list[Any] = []
        self._granted: Newcomer | None = None

    @property
    def workers(self) -> set[int]:
        return {*self.began}

    @property
    def evaluators(self) -> set[int]:
        return {rank for rank, each in self.taken.items() if each.role == "evaluator"}

    def role_of(self, rank: int, members: WorkerMembers) -> str:
        if rank in self.taken:
            return self.taken[rank].role
        return "worker" if rank in members.workers else "evaluator"

    def may_come(self, standing_by: Collection[int]) -> bool:
        """Return True if one of these ranks may train, although no worker lives."""
        return bool(standing_by) and bool(self.fallen) and not self.is_ending

    def requests(self) -> list[Any]:
        return [*(request for request, _ in self.waiting.values()), *self.alone]

    # --- places ---------------------------------------------------------------------------------
    def give(self, members: WorkerMembers) -> tuple[Any, Newcomer] | None:
        """Give a place to the lowest rank that waits, if one is free; return its request, too."""
        if self._granted is not None:
            return None
        filled = {each.place for each in self.taken.values()}
        for place in self.fallen:
            role = self.role_of(place, members)
            if place in filled or (role == "worker" and self.is_ending):
                continue
            for rank in sorted(self.waiting):
                request, evaluates = self.waiting[rank]
                if role == "worker" or evaluates:
                    del self.waiting[rank]
                    number = 1 + max((each.number for each in self.taken.values()), default=0)
                    self._granted = Newcomer(rank, role, place, number)
                    return request, self._granted
        return None

    def stand_by(self, request: Any, evaluates: bool) -> None:
        """A rank waits for a place; give() follows."""
        self.forget(request.source)
        self.waiting[request.source] = request, evaluates

    def ask_alone(self, request: Any) -> None:
        self.alone.append(request)

    # --- who comes, and who is gone -------------------------------------------------------------
    def take(self, newcomer: Newcomer, beginning: Beginning | None) -> None:
        self.taken[newcomer.rank] = newcomer
        if beginning is not None:
            self.began[newcomer.rank] = beginning
        self.forget(newcomer.rank)

    def retract(self, rank: int) -> None:
        self.taken.pop(rank, None)
        self.began.pop(rank, None)

    def forget(self, rank: int) -> None:
        self.waiting.pop(rank, None)
        self.alone = [each for each in self.alone if each.source != rank]
        if self._granted is not None and self._granted.rank == rank:
            self._granted = None

    # --- recovery and copies --------------------------------------------------------------------
    def restart(self, following: Collection[int]) -> None:
        """Forget who was on its way; `following`: ranks that do not count as workers now."""
        self.waiting.clear()
        self.alone.clear()
        self._granted = None
        self.taken = {rank: each for rank, each in self.taken.items() if rank not in following}
        self.began = {rank: Beginning(0, {}) for rank, each in self.taken.items()
                      if each.role == "worker"}  # fmt: skip

    def state(self) -> dict[str, Any]:
        """Return all but the requests that wait, as load() takes it."""
        return {
            "taken": [*self.taken.values()],
            "began": [(rank, each.to_json()) for rank, each in self.began.items()],
            "fallen": [*self.fallen],
            "is_ending": self.is_ending,
            "granted": self._granted,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.taken = {each[0]: Newcomer(*each) for each in state["taken"]}
        self.began = {rank: Beginning.of_json(each) for rank, each in state["began"]}
        self.fallen = dict.fromkeys(state["fallen"])
        self.is_ending = state["is_ending"]
        self._granted = None if state["granted"] is None else Newcomer(*state["granted"])

    def keep(self, taken: Iterable[Iterable[Any]]) -> None:
        """Know who has a place once all begin anew, as the leader says."""
        self.taken = {each.rank: each for each in (Newcomer(*each) for each in taken)}
        self.restart(())


class Present:
    """Who takes part now: the members at first, and the newcomers.

    Args:
        members: returns who takes part at first.
        newcomers: see above.
    """

    def __init__(self, members: Callable[[], WorkerMembers], newcomers: Newcomers) -> None:
        self._members, self._newcomers = members, newcomers

    @property
    def workers(self) -> tuple[int, ...]:
        """All that have been workers."""
        first, newcomers = self._members().workers, self._newcomers.workers
        return (*first, *sorted(newcomers)) if newcomers else first

    @property
    def evaluators(self) -> tuple[int, ...]:
        """All that have been evaluators."""
        first, newcomers = self._members().evaluators, self._newcomers.evaluators
        return (*first, *sorted(newcomers)) if newcomers else first

    @property
    def server_numbers(self) -> tuple[int, ...]:
        return self._members().server_numbers

    @property
    def leader(self) -> int:
        return self._members().leader

    @property
    def waiting(self) -> tuple[int, ...]:
        """The ranks that stood by at first."""
        return self._members().waiting

    @property
    def ranks(self) -> Collection[int]:
        return self._members().ranks

    @property
    def n_losses(self) -> int:
        return self._members().n_losses
