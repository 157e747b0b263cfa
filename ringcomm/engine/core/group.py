"""Some of the ranks of a job, numbered among themselves."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from ringcomm.collectives.op import Op
from ringcomm.engine.core.context import EngineContext
from ringcomm.engine.core.current import engine
from ringcomm.engine.core.ledger import Ledger
from ringcomm.transport.members import Members
from ringcomm.transport.node.shm import NodeTeam


class ShortAllreduce(Protocol):
    """Carries out blocking allreduces without a plan; see ringcomm.engine.executors.node."""

    def allreduce_(self, x: Any, op: Op, timeout_s: float | None = None) -> bool:
        """Reduce x in place if this way is open; else do nothing and return False."""


class Group:
    """Ranks that communicate among themselves: pass it as `group=`.

    Collective among its members, which make their groups in the same order; the others need not
    call it. A member may be in any number of groups. Operations of different groups may be started
    in another order on each rank.

    Args:
        ranks: ranks of the default group, in the order in which they are numbered within this
            one; the same on every member.

    Attributes:
        ranks: those of the job that are its members.
        rank: index of this process in `ranks`, None if it is not a member.
        size: number of ranks.
        team: where they meet, if they share a node's memory.
        neighbours: where those meet that are on this rank's node.
        ledger: numbers the operations of a group that this process is in; see ledger_for().
        short_calls: the short way of its blocking allreduces, once one has come.

    Raises:
        ValueError: a rank that does not exist, or the same one twice, or none.
        MismatchError: members passed the ranks in different order.
        RingcommError: its ranks have 1023 groups in use, or as many as MPI has tags for. A group
            is in use until all of its members have dropped it.
    """

    rank: int | None
    team: NodeTeam | None = None
    neighbours: NodeTeam | None = None
    ledger: Ledger
    short_calls: ShortAllreduce | None = None

    def __init__(self, ranks: Iterable[int]) -> None:
        current = engine()
        members = current.groups.default.ranks
        self._create(current, [members[rank] for rank in _checked(ranks, len(members))])

    @classmethod
    def of_all(cls, engine: EngineContext) -> Group:
        """Return the group of all ranks of the job, which needs no agreement."""
        group = cls.__new__(cls)
        group._join(engine, range(engine.job_size))
        group._meet(engine, Ledger(0, is_first=engine.job_rank == 0, tags=engine.transport.tags))
        return group

    @classmethod
    def of_job(cls, ranks: Iterable[int]) -> Group:
        """Return a group of these ranks of the job, whatever the default group is; see Group."""
        current = engine()
        group = cls.__new__(cls)
        group._create(current, _checked(ranks, current.job_size))
        return group

    def _create(self, engine: Any, ranks: Iterable[int]) -> None:
        self._join(engine, ranks)
        if self.rank is not None:
            self._meet(engine, engine.groups.agree_on(self))

    def _join(self, engine: EngineContext, ranks: Iterable[int]) -> None:
        self.ranks = Members.of(ranks, engine.job_rank, engine.transport.nodes)
        self.size = len(self.ranks)
        self.rank = self.ranks.place
        self._engine = weakref.ref(engine)

    def _meet(self, engine: EngineContext, ledger: Ledger) -> None:
        self.ledger = ledger
        node, nodes = engine.transport.node, engine.transport.nodes
        if node is not None:
            here = tuple(rank for rank in self.ranks if nodes[rank] == nodes[engine.job_rank])
            self.team = node.team_or_none(ledger.context, self.ranks)
            self.neighbours = node.team_or_none(ledger.context, here)

    def __repr__(self) -> str:
        return f"Group({list(self.ranks)})"

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a Group belongs to this process: send its ranks and make a new one")

    def ledger_for(self, engine: EngineContext) -> Ledger:
        """Return what numbers its operations, if this process may use it.

        Raises:
            ValueError: this process is not a member, or the group is of an earlier init().
        """
        if self.rank is None:
            raise ValueError(
                f"rank {engine.job_rank} is not a member of {self!r}, so it cannot take part: let "
                "its members alone make this call"
            )
        if self._engine() is not engine:
            raise ValueError(f"{self!r} is of an earlier ringcomm.init(): make a new one")
        return self.ledger

    @property
    def engine(self) -> EngineContext:
        """The engine that carries out its operations on this rank."""
        engine = self._engine()
        assert engine is not None
        return engine

    @property
    def shares_memory(self) -> bool:
        """True if its ranks map each other's memory, as far as is known here."""
        is_one = len(set(self.ranks.nodes)) == 1 and self.size > 1
        has_node = self.engine.transport.node is not None
        return has_node and is_one and (self.team is not None or self.rank is None)

    @property
    def index(self) -> int:
        """`rank` of a member."""
        assert self.rank is not None
        return self.rank


def _checked(ranks: Iterable[int], size: int) -> tuple[int, ...]:
    try:  # one more than there are tells enough, also of what has no end
        members = tuple(operator.index(rank) for rank in itertools.islice(ranks, size + 1))
    except TypeError as error:
        raise TypeError(f"Group: ranks must be ints, one after another, not {ranks!r}") from error
    outside = [rank for rank in members if not 0 <= rank < size]
    if outside:
        raise ValueError(f"Group: there is no rank {outside[0]}; ranks are 0 to {size - 1}")
    if len(set(members)) != len(members):
        raise ValueError(f"Group: a rank appears twice in {list(members)}")
    if not members:
        raise ValueError("Group: needs at least one rank")
    return members
