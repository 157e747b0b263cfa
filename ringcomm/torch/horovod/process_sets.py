"""Process sets: groups of ranks, with Horovod's name and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

from ringcomm.engine.api import collectives
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.api.require_nobody_in_join import require_nobody_in_join
from ringcomm.engine.core.engine import Engine
from ringcomm.engine.core.group import Group
from ringcomm.errors import MismatchError
from ringcomm.integers import is_integer

# As in Horovod, ranks match operations without a name by their order within a family of operations.
# So each family has its own group. Allreduce uses the process set's first group: the fastest path.
_FAMILIES: Final = ("allgather", "alltoall", "broadcast", "grouped", "reduce_scatter", "object")


class ProcessSet:
    """Ranks that run collectives among themselves; pass it to init() or add_process_set() first.

    Args:
        ranks_or_comm: ranks as hvd.rank() counts them, in any order; or an mpi4py communicator of
            the ranks. After a Comm.Split(), each rank passes its own part: all parts are added,
            and this object is the part of this rank.

    Attributes:
        process_set_id: number of the set, the same on every rank; None before the set is added and
            after it is removed.
        ranks: the members as hvd.rank() counts them, ascending; None after removal, or before a
            communicator's set is added.
        mpi_comm: the communicator; None if the process set was made from ranks. Of the global one
            that of init(comm=), in the first view of the job; None without.

    In another view of an elastic job, ranks have other numbers, and other sets take the place of
    those of before: using one of them is a ValueError.
    """

    def __init__(self, ranks_or_comm: Any) -> None:
        self.process_set_id: int | None = None
        self.ranks: list[int] | None = None
        self.view: int | None = None  # number of the view in which it was added
        self.mpi_comm = None if isinstance(ranks_or_comm, Iterable) else ranks_or_comm
        if self.mpi_comm is None:
            ranks = list(ranks_or_comm)
            if not all(map(is_integer, ranks)):
                raise ValueError(
                    f"ProcessSet takes ranks, ints, or an mpi4py communicator, not {ranks!r}"
                )
            self.ranks = sorted(map(int, ranks))
        elif not hasattr(self.mpi_comm, "Get_group"):
            raise ValueError(
                f"ProcessSet takes ranks or an mpi4py communicator, not {ranks_or_comm!r}"
            )

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    def __reduce__(self) -> Any:
        if self is global_process_set:
            return "global_process_set"
        if self.process_set_id is None:
            return ProcessSet, (self.resolve(),)
        return _with_ranks, (self.resolve(),)

    def size(self) -> int:
        """Return the number of ranks of this set."""
        return len(self._known_ranks())

    def rank(self) -> int:
        """Return the index of this process in `ranks`, -1 if it is no member."""
        ranks, mine = self._known_ranks(), engine().rank
        return ranks.index(mine) if mine in ranks else -1

    def included(self) -> bool:
        """Return True if this process is a member."""
        return engine().rank in self._known_ranks()

    @property
    def group(self) -> Group:
        """The engine's group of these ranks."""
        return self.group_for("allreduce")

    @classmethod
    def require(cls, given: object) -> None:
        """Raise TypeError if `given` is not a process set."""
        if not isinstance(given, cls):
            raise TypeError(
                f"process_set must be a hvd.ProcessSet, not {given!r}. hvd.add_process_set(ranks), "
                "called on all ranks, makes one"
            )

    def group_for(self, family: str) -> Group:
        """Return the group in which operations of this family are matched by order."""
        self._known_ranks()  # _registry() waits for ranks that are no members
        return _registry().groups_of(self)[family]

    def root(self, root_rank: int) -> int:
        """Return the index in `ranks` of `root_rank`. Raises ValueError if `ranks` lacks it."""
        ranks = self._known_ranks()
        if root_rank not in ranks:
            raise ValueError(f"root_rank is {root_rank}; the ranks of {self} are {list(ranks)}")
        return ranks.index(root_rank)

    def resolve(self) -> list[int]:
        """Return `ranks`; if they are not known yet, get them from the communicator."""
        if self.ranks is None and self.mpi_comm is not None:
            self.ranks = _default_ranks(engine().transport.ranks_of(self.mpi_comm))
        return list(self._known_ranks())

    def _known_ranks(self) -> Sequence[int]:
        if self is global_process_set:
            return range(engine().size)
        if self.ranks is None:
            raise ValueError(
                "this ProcessSet is not in use: it was removed, or made of a communicator and not "
                "added yet. Pass a new one to add_process_set()"
            )
        if self.view not in (None, engine().transport.view.number):
            raise ValueError(
                f"{self} is of view {self.view} of this elastic job, and ranks have other numbers "
                f"in view {engine().transport.view.number}. Add a new process set, in a function "
                "that rc.elastic.on_new_view() calls for instance, and make anew what uses it, "
                "such as a DistributedOptimizer"
            )
        return self.ranks


def _default_ranks(job_ranks: Iterable[int]) -> list[int]:
    """Return the ranks that ranks of the job have in the default group, ascending."""
    places = engine().groups.default.ranks.places
    outside = [rank for rank in job_ranks if rank not in places]
    if outside:
        raise ValueError(
            f"ProcessSet: rank {outside[0]} of the job is a parameter server or an evaluator, and "
            "the communicator contains it. Pass a communicator of workers alone"
        )
    return sorted(places[rank] for rank in job_ranks)


class _Registry(dict[ProcessSet, dict[str, Group]]):
    """The process sets that an engine uses, in the order of their ids; their groups by family."""

    def __init__(self) -> None:
        super().__init__()
        self._next_id = 0

    def with_ranks(self, ranks: Sequence[int]) -> ProcessSet | None:
        return next((each for each in self if each.resolve() == list(ranks)), None)

    def groups_of(self, which: ProcessSet) -> dict[str, Group]:
        groups = self.get(which)
        if groups is None:
            ranks = which._known_ranks()
            # A set from before the latest init() stands for the set that now has the same ranks.
            known = None if which.process_set_id is None else self.with_ranks(ranks)
            if known is None:
                raise ValueError(f"{which} is not in use: pass it to add_process_set() first")
            groups = self[known]
        return groups

    def add(self, which: ProcessSet) -> ProcessSet:
        """Give ids to a process set and the other parts of its Comm.Split(); return the set."""
        if which.view != engine().transport.view.number:
            which.view = None  # who adds it means the ranks of today
            if which.mpi_comm is not None:
                which.ranks = None  # its processes may have other numbers
        mine = tuple(which.resolve())
        parts = _agreed("add", mine, is_comm=which.mpi_comm is not None) if self else [mine]
        known = next((each for part in parts if (each := self.with_ranks(part))), None)
        if known is not None:
            raise _InUseError(known)
        for ranks in parts:
            self._number(which if ranks == mine else ProcessSet(ranks), ranks)
        return which

    def take_back(self, n: int) -> None:
        """Take all process sets but the first n out of use; they may be added later."""
        for each in list(self)[n:]:
            del self[each]
            self._next_id -= 1
            each.process_set_id = None
            if each.mpi_comm is not None:
                each.ranks = None

    def _number(self, which: ProcessSet, ranks: tuple[int, ...]) -> None:
        is_all = ranks == tuple(range(engine().size))
        group = engine().groups.default if is_all else Group(ranks)
        is_member = group.rank is not None
        groups = {family: Group(ranks) if is_member else group for family in _FAMILIES}
        self[which] = groups | {"allreduce": group}
        which.process_set_id, self._next_id = self._next_id, self._next_id + 1
        which.view = engine().transport.view.number


class _InUseError(ValueError):
    """A process set in use has these ranks already."""

    def __init__(self, known: ProcessSet) -> None:
        super().__init__(
            f"add_process_set: {known} is in use and has these ranks already: use that one"
        )


def _agreed(verb: str, ranks: tuple[int, ...], *, is_comm: bool = False) -> list[tuple[int, ...]]:
    """Return the ranks of each process set that is added or removed now. Collective.

    There is one set, unless every rank passes its part of a split communicator.
    """
    calls = collectives.allgather_object((verb, ranks, is_comm))
    must = f"{verb} a process set"
    require_nobody_in_join(f"{verb}_process_set", calls, range(len(calls)), must=must)
    other = next((rank for rank, each in enumerate(calls) if each[:2] != calls[0][:2]), None)
    if other is not None and not all(is_comm for *_, is_comm in calls):
        (first, theirs, _), (second, others, _) = calls[0], calls[other]
        raise MismatchError(
            f"{verb}_process_set: rank 0 {first}s ranks {list(theirs)}, rank {other} {second}s "
            f"{list(others)}. Every rank must add and remove the same sets in the same order"
        )
    return list(dict.fromkeys(theirs for _, theirs, _ in calls))


global_process_set: Final = ProcessSet([])
global_process_set.process_set_id = 0
_registries: WeakKeyDictionary[Engine, _Registry] = WeakKeyDictionary()


def _with_ranks(ranks: list[int]) -> ProcessSet:
    """Return the process set in use that has these ranks; called to unpickle or copy a set."""
    known = _registry().with_ranks(ranks)
    if known is None:
        raise ValueError(
            f"no process set of ranks {ranks} is in use: add_process_set({ranks}) first"
        )
    return known


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Put a process set into use, and return it. All ranks of the job add sets in the same order.

    Raises:
        ValueError: there are no ranks, a rank does not exist or is listed twice, or a process set
            in use has the same ranks (the global one has all ranks).
        MismatchError: ranks add different process sets, or some are in join().
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    return _registry().add(process_set)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Take a process set out of use. Every rank of the job calls it.

    Returns:
        False for the global process set, which stays, and for a set not in use; else True.

    Raises:
        MismatchError: ranks remove different process sets, or some are in join().
    """
    ProcessSet.require(process_set)
    registry = _registry()
    if process_set is global_process_set or process_set not in registry:
        return False
    _agreed("remove", tuple(process_set.resolve()))  # after this, no rank needs the set
    del registry[process_set]
    process_set.process_set_id = process_set.ranks = None
    return True


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """Return the ranks of each process set in use, by id."""
    return {number: each.resolve() for number, each in _by_id().items()}


def process_set_by_id(process_set_id: int) -> ProcessSet:
    """Return the process set of this id. Raises ValueError if there is none."""
    known = _by_id()
    if process_set_id not in known:
        raise ValueError(f"no process set has the id {process_set_id}; known: {list(known)}")
    return known[process_set_id]


def _by_id() -> dict[int, ProcessSet]:
    return {each.process_set_id: each for each in _registry() if each.process_set_id is not None}


def prepare(process_sets: Iterable[ProcessSet] = ()) -> None:
    """Put the global process set and these into use. Collective.

    Raises:
        ValueError: a process set has the ranks of an earlier one, or cannot be made. None of these
            is in use then.
    """
    registry = _registry()
    n_before = len(registry)
    try:
        for number, each in enumerate(process_sets):
            ProcessSet.require(each)
            if each not in registry:
                _add_entry(registry, number, each)
    except BaseException:
        registry.take_back(n_before)
        raise


def _add_entry(registry: _Registry, number: int, each: ProcessSet) -> None:
    try:
        registry.add(each)
    except _InUseError as error:
        raise ValueError(
            f"init: process_sets entry number {number} is a duplicate: {error}"
        ) from error


def _registry() -> _Registry:
    """Return this engine's registry; the first call makes the global process set's groups."""
    current = engine()
    registry = _registries.get(current)
    if registry is None:
        registry = _Registry()
        registry.add(global_process_set).ranks = list(range(current.size))
        global_process_set.mpi_comm = None  # that of init(comm=) was of the view before
        _registries[current] = registry  # only now: the groups may have failed
    return registry
