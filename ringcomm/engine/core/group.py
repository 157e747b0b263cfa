"""Some of the ranks of a job, numbered among themselves."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ringcomm.engine.core.ledger import Ledger
from ringcomm.engine.executors.node import Quick
from ringcomm.transport.members import Members

if TYPE_CHECKING:
    from ringcomm.engine.core.engine import Engine
    from ringcomm.transport.node.shm import NodeTeam


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
        rank: index of this process in `ranks`, None if it is no member.
        size: number of ranks.
        team: where they meet, if they share a node's memory.
        neighbours: where those meet that are on this rank's node.
        quick: the short way of its blocking allreduces, if there is one.

    Raises:
        ValueError: a rank that does not exist, or the same one twice, or none.
        MismatchError: members passed the ranks in different order.
        RingcommError: its ranks have 1023 groups in use, or as many as MPI has tags for. A group
            is in use until all of its members have dropped it.
    """

    rank: int | None
    team: NodeTeam | None = None
    neighbours: NodeTeam | None = None
    quick: Quick | None = None

    def __init__(self, ranks: Iterable[int]) -> None:
        from ringcomm.engine.api.world import engine

        current = engine()
        members = current.world.ranks
        self._found(current, [members[rank] for rank in _checked(ranks, len(members))])

    @classmethod
    def _of_all(cls, engine: Engine) -> Group:
        """Return the group of all ranks of the job, which needs no agreement."""
        group = cls.__new__(cls)
        group._join(engine, range(engine.job_size))
        group._ledger = Ledger(0, is_first=engine.job_rank == 0)
        group._meet(engine, 0)
        return group

    @classmethod
    def of_job(cls, ranks: Iterable[int]) -> Group:
        """Return a group of these ranks of the job, whatever the default group is; see Group."""
        from ringcomm.engine.api.world import engine

        current = engine()
        group = cls.__new__(cls)
        group._found(current, _checked(ranks, current.job_size))
        return group

    def _found(self, engine: Engine, ranks: Iterable[int]) -> None:
        self._join(engine, ranks)
        if self.rank is not None:
            self._ledger = engine.found(self)
            self._meet(engine, self._ledger.context)

    def _join(self, engine: Engine, ranks: Iterable[int]) -> None:
        self.ranks = Members.of(ranks, engine.job_rank, engine.transport.nodes)
        self.size = len(self.ranks)
        self.rank = self.ranks.place
        self._engine = weakref.ref(engine)

    def _meet(self, engine: Engine, context: int) -> None:
        self.team = engine.team_of(context, self.ranks)
        self.neighbours = engine.team_of(context, self.ranks, here=True)
        self.quick = None if self.team is None else Quick(self, self._ledger, self.team)

    def __repr__(self) -> str:
        return f"Group({list(self.ranks)})"

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a Group belongs to this process: send its ranks and make it anew")

    def ledger_for(self, engine: Engine) -> Ledger:
        """Return what numbers its operations, if this process may use it.

        Raises:
            ValueError: this process is no member, or the group is of an earlier init().
        """
        if self.rank is None:
            raise ValueError(
                f"rank {engine.job_rank} is no member of {self!r}, so it cannot take part: let its "
                "members alone make this call"
            )
        if self._engine() is not engine:
            raise ValueError(f"{self!r} is of an earlier ringcomm.init(): make it anew")
        return self._ledger

    @property
    def engine(self) -> Engine:
        """What carries out its operations on this rank."""
        engine = self._engine()
        assert engine is not None
        return engine

    @property
    def engine_or_none(self) -> Engine | None:
        """`engine`; None once the init() in which the group was made is over."""
        return self._engine()

    @property
    def index(self) -> int:
        """`rank` of a member."""
        assert self.rank is not None
        return self.rank


def group_of(group: Group | None, engine: Engine) -> Group:
    """Return the group that is meant: the default one by None. Raises TypeError if it is none."""
    if group is None:
        return engine.world
    if not isinstance(group, Group):
        raise TypeError(f"group must be a ringcomm.Group or None, not {group!r}")
    return group


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
