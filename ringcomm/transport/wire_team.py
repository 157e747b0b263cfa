"""Where the ranks of a group that spans hosts meet: short payloads go along with the agreement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ringcomm._core import KnownSchedule
from ringcomm._core import WireTeam as TeamInCpp
from ringcomm.transport.tags import CALLS, DATA

if TYPE_CHECKING:
    from ringcomm._core import Schedule
    from ringcomm.transport.base import Transport
    from ringcomm.transport.group_members import Members
    from ringcomm.transport.node.shared_memory import NodeTeam
    from ringcomm.transport.node.steps import ShownByAll

# Each rank gets a few bytes of each other: with more ranks, a plain agreement is cheaper.
MOST_MEMBERS: Final = 64
_MOMENT_S: Final = 1e-3
_SLOWEST_BPS: Final = 1e9  # of a network whose messages are waited for in C++


def most_brought(size: int) -> int:
    """Return how many bytes each of so many ranks may bring with a step; 0: none takes steps."""
    return TeamInCpp.most_brought(size) if 1 < size <= MOST_MEMBERS else 0


class WireTeam:
    """The members of a group whose steps are messages; see csrc/loop/wire_step.hpp.

    A step of an operation has the tag of the operation's stream. It takes place at the same time as
    steps of `neighbours`, so an unnamed operation waits for its turn there, too.

    Attributes:
        team: the same for C++.
        moment_s: seconds for which a thread that waits for a step does nothing else.
        digest: part of all fingerprints.
        n_slots: number of unnamed operations that may be under way.
    """

    digest = 0  # messages of an earlier group have another context, or another communicator

    def __init__(
        self,
        team: TeamInCpp,
        transport: Transport,
        context: int,
        size: int,
        neighbours: NodeTeam | None,
    ) -> None:
        self.team = team
        self._transport, self._context = transport, context
        self.moment_s = _MOMENT_S
        self._most = most_brought(size)
        self.n_slots = transport.tags.n_streams // 2
        self._neighbours = neighbours

    @classmethod
    def of(
        cls, transport: Transport, context: int, members: Members, neighbours: NodeTeam | None
    ) -> WireTeam | None:
        """Return the team of a group that has this context; None if its ranks only agree."""
        if transport.runner is None or not most_brought(len(members)):
            return None
        assert members.place is not None
        tags, ranks = transport.tags, transport.wire_ranks(list(members))
        first, second = (tags.tag(context, stream, CALLS) for stream in (0, 1))
        team = TeamInCpp(
            transport.runner, ranks, members.place, first, second - first, tags.n_streams
        )
        return cls(team, transport, context, len(members), neighbours)

    def slot(self, stream: int, slot: int | None) -> int:
        """Return the slot of an operation, given its stream and its slot in shared memory."""
        del slot
        return stream

    def fits(self, nbytes: int) -> bool:
        return nbytes <= self._most

    def known_schedule(
        self,
        fingerprint: int,
        mine: tuple[bytes, int],
        expected: ShownByAll,
        schedule_and_peers: tuple[Schedule, list[int]],
        nbytes: int,
    ) -> KnownSchedule:
        """Return a call of which the payload, of `nbytes`, is moved by a schedule.

        Args:
            fingerprint: digest of the call.
            mine: header and size of what this rank shows.
            expected: the same of all ranks; empty if nothing depends on it.
            schedule_and_peers: see csrc/shm/known_call.hpp; the ranks of the job that it speaks to.
        """
        schedule, peers = schedule_and_peers
        transport, tags = self._transport, self._transport.tags
        assert transport.runner is not None
        first, second = (tags.tag(self._context, stream, DATA) for stream in (0, 1))
        return KnownSchedule(
            self.team, fingerprint ^ self.digest, mine, expected, transport.runner, schedule,
            transport.wire_ranks(peers), first, second - first,
            self.moment_s + nbytes / _SLOWEST_BPS,
        )  # fmt: skip

    def is_turn_of(self, place: int) -> bool:
        return self._neighbours is None or self._neighbours.is_turn_of(place)

    def end_turn(self, place: int) -> None:
        if self._neighbours is not None:
            self._neighbours.end_turn(place)
