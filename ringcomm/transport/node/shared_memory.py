"""The memory that the ranks of a node share."""

from __future__ import annotations

import os

from ringcomm._core import NodeMemory, Team, make_team, take, view
from ringcomm.arrays.base import Bytes
from ringcomm.transport.node import N_UNNAMED
from ringcomm.transport.node.private_memory import let_siblings_read

_MOMENT_S = 1e-3  # a few times as long as two ranks need to meet if both come at once
_APART = 0x9E40000  # about 2**28 times the golden ratio, in whole pages of up to 64 KiB


class SharedNode:
    """The memory of the ranks of one node, in memfds; C++ (csrc/shm) reads and writes it.

    At first it has only this rank's memory; adopt() adds the memory of others.

    Attributes:
        is_crowded: the node has more ranks than there are cores for this process.
        moment_s: seconds for which a thread that waits for a step does nothing else. Python code
            that runs meanwhile delays the step, mostly where ranks share cores.
        may_read: steps of later teams read private memory of the other ranks, if the system allows
            it.
    """

    may_read = False

    def __init__(self, memory: NodeMemory, rank: int, n_ranks: int) -> None:
        n_cores = len(os.sched_getaffinity(0))
        self.is_crowded = n_ranks > n_cores
        self.moment_s = _MOMENT_S * max(1.0, n_ranks / n_cores)
        self._memories = {rank: memory}
        self._rank = rank
        self._teams: dict[tuple[int, tuple[int, ...]], NodeTeam | None] = {}

    def let_read(self) -> None:
        """Read private memory of the ranks of this node, and let them read that of this rank."""
        self.may_read = True
        let_siblings_read(memory.pid for memory in self._memories.values())

    @property
    def memories(self) -> dict[int, NodeMemory]:
        """The memories of the ranks of this node, by rank."""
        return self._memories

    def shares_with(self, rank: int) -> bool:
        """Return True if a rank, which may be this one, and this one map each other's memory."""
        return rank in self._memories

    @property
    def memory(self) -> NodeMemory:
        return self._memories[self._rank]

    def memory_of(self, rank: int) -> NodeMemory:
        return self._memories[rank]

    def adopt(self, rank: int, memory: NodeMemory) -> None:
        self._memories[rank] = memory

    def team_or_none(self, context: int, members: tuple[int, ...]) -> NodeTeam | None:
        """Return the slots in which these ranks of the group `context` meet.

        None if a rank shares no memory with this one, or if this rank is the only member.
        """
        key = (context, members)
        if key not in self._teams:
            self._teams[key] = self._make_team(context, members)
        return self._teams[key]

    def _make_team(self, context: int, members: tuple[int, ...]) -> NodeTeam | None:
        if len(members) == 1 or not all(rank in self._memories for rank in members):
            return None
        memories = [self._memories[rank] for rank in members]
        me = members.index(self._rank)
        team = make_team(me, context, self.is_crowded, memories, self.may_read)
        return NodeTeam(team, self.moment_s, hash(tuple(members)) % (1 << 64))

    def clear(self, context: int) -> None:
        """Prepare a context for another group, once no rank uses the context any more."""
        for key in [key for key in self._teams if key[0] == context]:
            team = self._teams.pop(key)
            if team is not None:
                team.team.retire()
        self.memory.clear_window(context)

    def clear_all(self) -> None:
        """Prepare the contexts of all groups for the next view, once no rank uses them any more."""
        for context in {0, *(context for context, _ in self._teams)}:
            self.clear(context)

    def abandon(self) -> None:
        """Give up all operations of this rank in shared memory.

        Returns once no other rank uses this rank's registered arrays. Ranks that enter one of these
        operations later do not touch the arrays; their operation fails.
        """
        for team in list(self._teams.values()):
            if team is not None:
                team.team.abandon()

    def empty(self, nbytes: int) -> Bytes:
        """Return memory that all ranks of this node map; it is freed with its last view.

        Raises MemoryError if the arena is full.
        """
        return take(self.memory, nbytes)

    def offset_of(self, x: Bytes) -> int:
        """Return the offset of x in this rank's arena, for view(). Raises ValueError."""
        return self.memory.offset_of(x)

    def view(self, rank: int, offset: int, nbytes: int) -> Bytes:
        """Return bytes from the arena of a rank of this node. Raises ValueError."""
        return view(self._memories[rank], offset, nbytes)


def make_memory(nonce: int, n_ranks: int) -> NodeMemory:
    """Return new, untouched memory for this rank: four times its share of the machine's.

    Each rank of the host maps the memory of all, so its mappings take four times the machine's
    memory, however many ranks there are.

    The arenas of a node are mapped one behind the other. Caches that look up an address by its last
    28 bits (AMD Zen) mix up addresses that differ by a multiple of 2**28: an allreduce of 1 MiB
    took 220 us instead of 37 (measured). So the size of an arena is far from any such multiple.

    Raises OSError if the system refuses, and RuntimeError if its pages are too large.
    """
    of_machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    nbytes = min(of_machine, 4 * of_machine // n_ranks)
    return NodeMemory.create(nonce, (nbytes >> 28 << 28) + _APART)


class NodeTeam:
    """The members of a group on this node; `moment_s` as in SharedNode.

    `digest` is of the members, and part of all fingerprints. If a rank dies while a group is made,
    some members may have it, and others use its context for a new group: without the digest, a rank
    of the old one could take their steps for steps of its own.
    """

    def __init__(self, team: Team, moment_s: float, digest: int) -> None:
        self.team = team
        self.moment_s = moment_s
        self.digest = digest
        self.n_slots = N_UNNAMED
        self._turns = [slot or N_UNNAMED for slot in range(N_UNNAMED)]

    def slot(self, stream: int, slot: int | None) -> int | None:
        """See Team.slot()."""
        del stream
        return slot

    @staticmethod
    def fits(nbytes: int) -> bool:
        """See Team.fits()."""
        del nbytes
        return True

    def is_turn_of(self, place: int) -> bool:
        """Return True if the slot of the unnamed operation number `place` is free for it."""
        return self._turns[place % N_UNNAMED] == place

    def end_turn(self, place: int) -> None:
        self._turns[place % N_UNNAMED] = place + N_UNNAMED
