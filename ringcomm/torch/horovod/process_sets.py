"""Process sets: Horovod's name for groups of ranks, numbered alike on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

from ringcomm.engine.api import collectives
from ringcomm.engine.api.world import engine
from ringcomm.engine.core.engine import Engine
from ringcomm.engine.core.group import Group
from ringcomm.errors import MismatchError

# Operations without a name are matched by their order among those of their kind, as in Horovod: a
# group of its own for each kind. Allreduce has the process set's own, which has the shortest way.
KINDS: Final = ("allgather", "alltoall", "broadcast", "grouped", "reducescatter", "object")


class ProcessSet:
    """Ranks that run collectives among themselves; pass it to init() or add_process_set() first.

    Args:
        ranks_or_comm: ranks, in any order; or an mpi4py communicator with those ranks. Where ranks
            pass their own parts of a split one, all parts are added, and this set is the own one.

    Attributes:
        process_set_id: the same on every rank; None until it is added, and after it is removed.
        ranks: ascending; None for a communicator until it is added, and after it is removed.
        mpi_comm: the communicator; None if it was made of ranks.
    """

    def __init__(self, ranks_or_comm: Any) -> None:
        self.process_set_id: int | None = None
        self.ranks: list[int] | None = None
        self.mpi_comm = None if isinstance(ranks_or_comm, Iterable) else ranks_or_comm
        if self.mpi_comm is None:
            ranks = list(ranks_or_comm)
            if any(isinstance(r, bool) or not isinstance(r, int) for r in ranks):
                raise ValueError(
                    f"ProcessSet takes ranks, ints, or an mpi4py communicator, not {ranks!r}"
                )
            self.ranks = sorted(ranks)
        elif not hasattr(self.mpi_comm, "Get_group"):
            raise ValueError(
                f"ProcessSet takes ranks or an mpi4py communicator, not {ranks_or_comm!r}"
            )

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    __repr__ = __str__

    def __reduce__(self) -> Any:
        if self is global_process_set:
            return _global, ()
        if self.process_set_id is None:
            return ProcessSet, (self.resolve(),)
        return _of_ranks, (self.resolve(),)

    def size(self) -> int:
        """Return the number of its ranks."""
        return len(self._known_ranks())

    def rank(self) -> int:
        """Return the index of this process among its ranks, -1 if it is not one of them."""
        ranks, mine = self._known_ranks(), engine().rank
        return ranks.index(mine) if mine in ranks else -1

    def included(self) -> bool:
        """Return True if this process is one of its ranks."""
        return engine().rank in self._known_ranks()

    @property
    def group(self) -> Group:
        """The engine's group of these ranks."""
        return self.lane("allreduce")

    @classmethod
    def require(cls, given: object) -> None:
        """Raise TypeError for what is no process set."""
        if not isinstance(given, cls):
            raise TypeError(f"process_set must be a hvd.ProcessSet, not {given!r}")

    def lane(self, kind: str) -> Group:
        """Return the group in which operations of this kind that have no name are matched."""
        return _registry().lanes(self)[kind]

    def root(self, root_rank: int) -> int:
        """Return the index of a rank of the job among these; ValueError if it is not a member."""
        ranks = self._known_ranks()
        if root_rank not in ranks:
            raise ValueError(f"root_rank is {root_rank}; the ranks of {self} are {list(ranks)}")
        return ranks.index(root_rank)

    def resolve(self) -> list[int]:
        """Return its ranks; those of a communicator are looked up."""
        if self.ranks is None and self.mpi_comm is not None:
            self.ranks = sorted(engine().transport.ranks_of(self.mpi_comm))
        return list(self._known_ranks())

    def _known_ranks(self) -> Sequence[int]:
        if self is global_process_set:
            return range(engine().size)
        if self.ranks is None:
            raise ValueError(
                "this ProcessSet is not in use: it was removed, or made of a communicator and not "
                "added yet. Pass a new one to add_process_set()"
            )
        return self.ranks


class _Registry:
    """The process sets of one engine, by id."""

    def __init__(self) -> None:
        self.sets: dict[int, ProcessSet] = {}
        self._lanes: dict[int, dict[str, Group]] = {}
        self._next_id = 0

    def lanes(self, which: ProcessSet) -> dict[str, Group]:
        """Return the groups in which operations on a process set are matched, by their kind."""
        number = which.process_set_id
        if number is not None and self.sets.get(number) is not which:  # of an earlier init()
            known = self.of_ranks(which._known_ranks())
            number = None if known is None else known.process_set_id
        if number is None:
            which._known_ranks()  # refuses one that was removed
            raise ValueError(f"{which} is not in use: pass it to add_process_set() first")
        return self._lanes[number]

    def add(self, which: ProcessSet) -> ProcessSet:
        """Number a process set, whose ranks no other one in use has, and all parts of a split."""
        mine = tuple(which.resolve())
        parts = _agreed("add", mine, is_comm=which.mpi_comm is not None) if self.sets else [mine]
        known = next((each for part in parts if (each := self.of_ranks(part))), None)
        if known is not None:
            raise _InUseError(known)
        for ranks in parts:
            self._number(which if ranks == mine else ProcessSet(ranks), ranks)
        return which

    def _number(self, which: ProcessSet, ranks: tuple[int, ...]) -> None:
        is_all = ranks == tuple(range(engine().size))
        group = engine().groups.default if is_all else Group(ranks)
        is_member = group.rank is not None
        lanes = {kind: Group(ranks) if is_member else group for kind in KINDS}
        self._lanes[self._next_id] = lanes | {"allreduce": group}
        self.sets[self._next_id] = which
        which.process_set_id, self._next_id = self._next_id, self._next_id + 1

    def has(self, which: ProcessSet) -> bool:
        """Return True if this very process set is in use."""
        number = which.process_set_id
        return number is not None and self.sets.get(number) is which

    def of_ranks(self, ranks: Sequence[int]) -> ProcessSet | None:
        """Return the one in use that has these ranks."""
        return next((each for each in self.sets.values() if each.resolve() == list(ranks)), None)

    def remove(self, which: ProcessSet) -> bool:
        """Forget a process set, and return True; False: it is the global one, or not in use."""
        number = which.process_set_id
        if not number or not self.has(which):
            return False
        _agreed("remove", tuple(which.resolve()))  # and no rank may still need it
        known = self.sets.pop(number)
        del self._lanes[number]
        known.process_set_id = known.ranks = None
        return True


class _InUseError(ValueError):
    """A process set in use has these ranks already."""

    def __init__(self, known: ProcessSet) -> None:
        super().__init__(
            f"add_process_set: {known} is in use and has these ranks already: use that one"
        )


def _agreed(verb: str, ranks: tuple[int, ...], *, is_comm: bool = False) -> list[tuple[int, ...]]:
    """Return the ranks of each set that all ranks add or remove: several of a split one."""
    calls = collectives.allgather_object((verb, ranks, is_comm))
    joined = [rank for rank, each in enumerate(calls) if each is None]  # what a stand-in gathers
    if joined:
        raise MismatchError(
            f"{verb}_process_set: ranks {joined} are in join(), and every rank must {verb} a "
            "process set. Do it before the first rank calls join(), or after join() has returned"
        )
    other = next((rank for rank, each in enumerate(calls) if each[:2] != calls[0][:2]), None)
    if other is not None and not all(is_comm for *_, is_comm in calls):
        (first, theirs, _), (second, others, _) = calls[0], calls[other]
        raise MismatchError(
            f"{verb}_process_set: rank 0 {first}s ranks {list(theirs)}, rank {other} {second}s "
            f"{list(others)}. Every rank must add and remove the same process sets in one order"
        )
    return list(dict.fromkeys(theirs for _, theirs, _ in calls))


global_process_set: Final = ProcessSet([])
global_process_set.process_set_id = 0
_registries: WeakKeyDictionary[Engine, _Registry] = WeakKeyDictionary()


def _global() -> ProcessSet:
    return global_process_set


def _of_ranks(ranks: list[int]) -> ProcessSet:
    """Return the process set in use that has these ranks: of a copy, or of what was pickled."""
    known = _registry().of_ranks(ranks)
    if known is None:
        raise ValueError(
            f"no process set of ranks {ranks} is in use: add_process_set({ranks}) first"
        )
    return known


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Put a process set into use, and return it. Every rank of the job calls it, in one order.

    Raises:
        ValueError: a rank that does not exist, or the same one twice, or none; or one in use has
            the same ranks, as the global one has all.
        MismatchError: ranks add different ones, or some are in join().
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    return _registry().add(process_set)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Take a process set out of use. Every rank calls it.

    Returns:
        False for the global one, which stays, and for one that is not in use.

    Raises:
        MismatchError: ranks remove different ones, or some are in join().
    """
    ProcessSet.require(process_set)
    return _registry().remove(process_set)


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """Return the ranks of each process set in use, by id."""
    return {number: each.resolve() for number, each in _registry().sets.items()}


def process_set_by_id(process_set_id: int) -> ProcessSet:
    """Return the process set of this id. Raises ValueError if there is none."""
    known = _registry().sets
    if process_set_id not in known:
        raise ValueError(f"no process set has the id {process_set_id}; known: {list(known)}")
    return known[process_set_id]


def prepare(process_sets: Iterable[ProcessSet] = ()) -> None:
    """Put the global process set into use, and these. Collective. ValueError: a duplicate."""
    registry, duplicates = _registry(), []
    for number, each in enumerate(process_sets):
        try:
            if not registry.has(each):
                registry.add(each)
        except _InUseError as error:
            duplicates.append(f"process_sets entry number {number} is a duplicate: {error}")
    if duplicates:
        raise ValueError(f"init: {duplicates[0]}")


def _registry() -> _Registry:
    """Return this engine's; the first call makes the groups of the global one. Collective then."""
    current = engine()
    registry = _registries.get(current)
    if registry is None:
        registry = _registries[current] = _Registry()
        registry.add(global_process_set)
        registry.sets[0].ranks = list(range(current.size))
    return registry
