"""The memory that the ranks of a node share, and what waits for its flags without the GIL."""

from __future__ import annotations

import os
from typing import Any

from ringcomm._core import Loop, NodeMemory, NodeStep, Team, make_team, take, view
from ringcomm.arrays.base import Bytes
from ringcomm.transport.node import N_UNNAMED

_MOMENT_S = 1e-3  # about what two ranks in step need to meet, with some patience
_APART = 0x9E40000  # about 2**28 times the golden ratio, in whole pages of up to 64 KiB


class SharedNode:
    """Memory that the ranks of one node share, in memfds.

    What happens in it is carried out by C++ (csrc/shm); every wait for it is a Request.

    Args:
        memory: this rank's.
        rank: this rank.
        n_ranks: how many ranks the node has.

    Attributes:
        is_crowded: the node has more ranks than this process may use cores.
        moment_s: how long who waits for a step does nothing else. Python, once it is asked, takes
            longer than a step, and more so where ranks take turns on the cores.
    """

    def __init__(self, memory: NodeMemory, rank: int, n_ranks: int) -> None:
        n_cores = len(os.sched_getaffinity(0))
        self.is_crowded = n_ranks > n_cores
        self.moment_s = _MOMENT_S * max(1.0, n_ranks / n_cores)
        self._memories = {rank: memory}
        self._rank = rank
        self._teams: dict[tuple[int, tuple[int, ...]], NodeTeam | None] = {}

    @property
    def memory(self) -> NodeMemory:
        """This rank's."""
        return self._memories[self._rank]

    def memory_of(self, rank: int) -> NodeMemory:
        """Return that of a rank of this node. Raises KeyError if it shares none."""
        return self._memories[rank]

    def adopt(self, rank: int, memory: NodeMemory) -> None:
        """Take the mapped memory of another rank of this node."""
        self._memories[rank] = memory

    def team_or_none(self, context: int, members: tuple[int, ...]) -> NodeTeam | None:
        """Return the slots in which these ranks of the group `context` meet.

        None if one of them does not share this memory, or if this rank is alone.
        """
        key = (context, members)
        if key not in self._teams:
            self._teams[key] = self._make_team(context, members)
        return self._teams[key]

    def _make_team(self, context: int, members: tuple[int, ...]) -> NodeTeam | None:
        if len(members) == 1 or not all(rank in self._memories for rank in members):
            return None
        memories = [self._memories[rank] for rank in members]
        team = make_team(members.index(self._rank), context, self.is_crowded, memories)
        return NodeTeam(team, self.moment_s)

    def clear(self, context: int) -> None:
        """Forget all of a context that no rank uses any more, for another group to have it."""
        for key in [key for key in self._teams if key[0] == context]:
            team = self._teams.pop(key)
            if team is not None:
                team.team.retire()
        self.memory.clear_window(context)

    def abandon(self) -> None:
        """Give up every operation of this rank that is under way in shared memory.

        Returns once no other rank reads or writes what this one has registered: a rank that comes
        to such an operation later touches nothing, and its operation fails.
        """
        for team in list(self._teams.values()):
            if team is not None:
                team.team.abandon()

    def empty(self, nbytes: int) -> Bytes:
        """Return memory that the ranks of this node map; freed with the last view of it.

        Raises:
            MemoryError: the arena is full.
        """
        return take(self.memory, nbytes)

    def offset_of(self, x: Bytes) -> int:
        """Return where memory of this rank is, as view() wants it. Raises ValueError."""
        return self.memory.offset_of(x)

    def view(self, rank: int, offset: int, nbytes: int) -> Bytes:
        """Return memory of a rank of this node, as mapped here. Raises ValueError."""
        return view(self._memories[rank], offset, nbytes)


def make_memory(nonce: int, n_ranks: int) -> NodeMemory:
    """Return new memory for this rank: room for its part of the machine's, four times over.

    Each rank of the host maps those of all, so that all take four times the machine's memory of its
    addresses, however many they are. None is used yet.

    The arenas of a node are mapped one behind the other. Caches that look for an address by its
    last 28 bits (AMD Zen) take places in them for one if a multiple of 2**28 lies between: an
    allreduce of 1 MiB took 220 us instead of 37 (measured). So an arena's size is far from any
    such multiple.

    Raises:
        OSError: it cannot be had.
        RuntimeError: the pages of this system are too large.
    """
    of_machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    nbytes = min(of_machine, 4 * of_machine // n_ranks)
    return NodeMemory.create(nonce, (nbytes >> 28 << 28) + _APART)


class NodeTeam:
    """The members of a group on this node.

    Args:
        team: what C++ knows of them.
        moment_s: see SharedNode.
    """

    def __init__(self, team: Team, moment_s: float) -> None:
        self.team = team
        self.moment_s = moment_s
        self._turns = [slot or N_UNNAMED for slot in range(N_UNNAMED)]

    def is_turn_of(self, place: int) -> bool:
        """Return True if the slot of the unnamed operation `place` is free for it."""
        return self._turns[place % N_UNNAMED] == place

    def end_turn(self, place: int) -> None:
        """Pass the slot on to the next operation."""
        self._turns[place % N_UNNAMED] = place + N_UNNAMED


class StepRequest:
    """Request that waits for a step in shared memory.

    Args:
        step: what C++ does.
        loop: what advances it.
        members: their ranks in the job.
        buffers: what it reads and writes; alive as long as a peer may touch it.
    """

    is_in_cpp = True
    source = -1

    def __init__(
        self, step: NodeStep, loop: Loop, members: tuple[int, ...], buffers: tuple[Any, ...]
    ) -> None:
        self.step = step
        self._loop = loop
        self._members = members
        self._buffers = buffers

    def test(self) -> bool:
        """Return True once it is over."""
        return self.step.is_over

    def cancel(self) -> None:
        """Stop it: nobody advances it, and no other rank touches its buffers any more."""
        self._loop.abandon(self.step)

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks of the job that have not come to it."""
        return tuple(
            rank for index, rank in enumerate(self._members) if not self.step.has_arrived(index)
        )
