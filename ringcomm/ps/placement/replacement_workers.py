"""Ranks that take the places of workers and evaluators that died, as one server knows them. Pure.

The leader gives one place at a time (ringcomm.ps.control.commands.StandBy), so a newcomer knows
those that came before it. Training ends once a worker leaves, or rests: no place of a worker is
given any more.

A worker begins where another one is that stands still between two steps until all servers know it:
see ringcomm.ps.members. So no round of mode "sync" that it is to be in ends on any server before,
unless that other worker dies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
        boundaries: step boundaries, at which commands are taken, that it counts as its own.
        steps: those of the training, over all starts of the job.
        commands: what workers have taken at their boundaries.
    """

    clock: int
    rounds: Mapping[int, int]
    boundaries: int = 0
    steps: int = 0
    commands: Sequence[str] = ()

    def to_json(self) -> list[Any]:
        counts = [self.boundaries, self.steps]
        return [self.clock, [*self.rounds.items()], *counts, [*self.commands]]

    @classmethod
    def of_json(cls, data: list[Any]) -> Beginning:
        clock, rounds, boundaries, steps, commands = data
        began = {int(table): n for table, n in rounds}
        return cls(clock, began, boundaries, steps, tuple(commands))

    @classmethod
    def behind(cls, others: Iterable[Beginning]) -> Beginning:
        """Return where somebody begins that is in no round in which one of these is."""
        clock, rounds, boundaries, steps = 0, dict[int, int](), 0, 0
        commands: Sequence[str] = ()
        for each in others:
            clock, steps = max(clock, each.clock), max(steps, each.steps)
            boundaries = max(boundaries, each.boundaries)
            commands = max(commands, each.commands, key=len)
            for table, n in each.rounds.items():
                rounds[table] = max(n, rounds.get(table, 0))
        return cls(clock, rounds, boundaries, steps, commands)


@dataclass
class Coming:
    """A rank that has been given a place, and does not train yet; for the leader.

    Attributes:
        newcomer: see above.
        beside: the worker that is to stand still meanwhile; None: not chosen yet.
        n_heard: the last request of that worker that came too late; see commands.Here.
    """

    newcomer: Newcomer
    beside: int | None = None
    n_heard: int = 0


class Newcomers:
    """The newcomers.

    Attributes:
        taken: those that have a place, by rank, in the order in which they came.
        began: where the workers among them began.
        fallen: ranks that died with a role, and had not left; in this order.
        is_ending: a worker has left, or rests.
        coming: who is on its way; at the leader.
    """

    def __init__(self) -> None:
        self.taken: dict[int, Newcomer] = {}
        self.began: dict[int, Beginning] = {}
        self.fallen: dict[int, None] = {}
        self.is_ending = False
        self.coming: Coming | None = None

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

    # --- places ---------------------------------------------------------------------------------
    def next(self, waiting: Mapping[int, bool], members: WorkerMembers) -> Newcomer | None:
        """Return who gets the first place that is free: the lowest rank that fits.

        Args:
            waiting: ranks that stand by, and whether each can evaluate.
            members: who takes part at first.
        """
        filled = {each.place for each in self.taken.values()}
        for place in self.fallen:
            role = self.role_of(place, members)
            if place in filled or (role == "worker" and self.is_ending):
                continue
            fit = [rank for rank, evaluates in waiting.items() if role == "worker" or evaluates]
            if fit:
                number = 1 + max((each.number for each in self.taken.values()), default=0)
                return Newcomer(min(fit), role, place, number)
        return None

    def first_of(self, workers: Collection[int]) -> int:
        """Return the chief of these: the lowest of those that were there first."""
        numbers = {rank: each.number for rank, each in self.taken.items()}
        return min(workers, key=lambda rank: (numbers.get(rank, 0), rank))

    # --- who comes, and who is gone -------------------------------------------------------------
    def take(self, newcomer: Newcomer, beginning: Beginning | None) -> None:
        self.taken[newcomer.rank] = newcomer
        if beginning is not None:
            self.began[newcomer.rank] = beginning

    def retract(self, rank: int) -> None:
        """Forget that a rank had a place; if it has died, nobody is to follow it."""
        self.taken.pop(rank, None)
        self.began.pop(rank, None)
        self.fallen.pop(rank, None)

    # --- recovery and copies --------------------------------------------------------------------
    def restart(self, others: Collection[int]) -> None:
        """Forget who was on its way; `others`: ranks that do not know that they have a place."""
        self.coming = None
        self.taken = {rank: each for rank, each in self.taken.items() if rank not in others}
        self.began = {rank: Beginning(0, {}) for rank, each in self.taken.items()
                      if each.role == "worker"}  # fmt: skip

    def state(self) -> dict[str, Any]:
        """Return all, as load() takes it."""
        coming = self.coming
        return {
            "taken": [*self.taken.values()],
            "began": [(rank, each.to_json()) for rank, each in self.began.items()],
            "fallen": [*self.fallen],
            "is_ending": self.is_ending,
            "coming": coming and (coming.newcomer, coming.beside, coming.n_heard),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.taken = {each[0]: Newcomer(*each) for each in state["taken"]}
        self.began = {rank: Beginning.of_json(each) for rank, each in state["began"]}
        self.fallen = dict.fromkeys(state["fallen"])
        self.is_ending = state["is_ending"]
        coming = state["coming"]
        self.coming = coming and Coming(Newcomer(*coming[0]), *coming[1:])

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
