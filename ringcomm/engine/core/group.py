"""Some of the ranks of a job, numbered among themselves."""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from ringcomm.engine.core.context import EngineContext
from ringcomm.engine.core.current_engine import engine
from ringcomm.engine.core.ledger import Ledger
from ringcomm.transport.group_members import Members
from ringcomm.transport.node.shared_memory import NodeTeam
from ringcomm.transport.node.steps import Team
from ringcomm.transport.wire_team import WireTeam


class BlockingCalls(Protocol):
    def allreduce_(self, x: Any, op: Any) -> bool:
        """Carry out an unnamed allreduce_ if that is short; else only return False."""

    def run(  # noqa: PLR0917 - see ShortCalls
        self,
        kind: str,
        x: Any = None,
        op: Any = None,
        root: Any = 0,
        name: str | None = None,
        timeout_s: float | None = None,
        into: Any = None,
        more: Any = None,
    ) -> Any:
        """Carry out a collective, and return its result."""

    def is_root(self, root: Any) -> bool:
        """Return True if this rank is the root, or may be, as `root` is no int."""


class Group:
    """Ranks that communicate among themselves: pass it as `group=`.

    Collective among its members: all of them create their groups in the same order. Other ranks
    need not create them. A rank may be in any number of groups, and may start operations of
    different groups in an order of its own.

    Args:
        ranks: ranks of the default group, as rc.rank() counts them, the same on every member; their
            order numbers the members within this group.

    Attributes:
        ranks: the members, as ranks of the job. In a job with parameter servers these may be other
            numbers than those that were passed, as the default group is then the workers.
        rank: index of this process in `ranks`, None if it is not a member.
        size: number of members.

    Raises:
        ValueError: a rank does not exist, a rank occurs twice, or there is no rank.
        MismatchError: members passed the ranks in different order.
        RingcommError: its ranks have 1023 groups in use, or as many as MPI has tags for. A group
            is in use until all of its members have dropped it. Or a member, which the text names,
            has no memory for it.
    """

    rank: int | None
    team: NodeTeam | None = None  # of all members, if they share a node's memory
    node_team: NodeTeam | None = None  # of the members on this rank's node
    wire: WireTeam | None = None  # of all members, if they take steps by messages
    ledger: Ledger  # numbers its operations, in a member's process; see ledger_for()
    short_calls: BlockingCalls | None = None  # made by its first blocking call
    mail: Any = None  # a Mail, made by its first message

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
    def of_job(
        cls, ranks: Iterable[int], *, key: str = "", timeout_s: float | None = None
    ) -> Group:
        """Return a group of ranks of the job, not of the default group; see Group.

        Args:
            ranks: the members.
            key: only calls with the same key meet.
            timeout_s: how long to wait for the others; None: as operations do.
        """
        current = engine()
        group = cls.__new__(cls)
        group._create(current, _checked(ranks, current.job_size), key, timeout_s)
        return group

    def _create(
        self, engine: Any, ranks: Iterable[int], key: str = "", timeout_s: float | None = None
    ) -> None:
        self._join(engine, ranks)
        if self.rank is None:
            return
        ledger = engine.groups.agree_on(self, key, timeout_s)
        failure = None
        try:
            self._meet(engine, ledger)
        except Exception as error:  # noqa: BLE001 - a MemoryError, or what a system call says
            failure = error
        engine.groups.require_all_met(self, failure)

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
            self.node_team = node.team_or_none(ledger.context, here)
        if self.team is None:
            self.wire = WireTeam.of(engine.transport, ledger.context, self.ranks, self.node_team)

    def __repr__(self) -> str:
        return self._text

    @functools.cached_property
    def _text(self) -> str:  # part of the label of each operation
        return f"Group({list(self.ranks)})"

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a Group belongs to this process: send its ranks and make a new one")

    def ledger_for(self, engine: EngineContext) -> Ledger:
        """Return the ledger. Raises ValueError if this rank is no member, or after a new init()."""
        if self.rank is None:
            raise ValueError(
                f"rank {engine.job_rank} is not a member of {self!r}, so it cannot take part: only "
                "members may make this call"
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
    def takes_steps(self) -> Team | None:
        """The team of its steps; None if its operations only agree, and send what they send."""
        return self.team or self.wire

    @property
    def shares_memory(self) -> bool:
        """True if its ranks map each other's memory, as far as this rank knows."""
        is_one = len(set(self.ranks.nodes)) == 1 and self.size > 1
        has_node = self.engine.transport.node is not None
        return has_node and is_one and (self.team is not None or self.rank is None)

    @property
    def index(self) -> int:
        """The attribute `rank`, in a process that is a member."""
        assert self.rank is not None
        return self.rank


def _checked(ranks: Iterable[int], size: int) -> tuple[int, ...]:
    try:  # ranks may be endless, so at most size + 1 are read
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
