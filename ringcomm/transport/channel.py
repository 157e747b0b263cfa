"""One operation's view of the wire: messages among its ranks, and what it waits for.

Algorithms are coroutines: `await t.exchange(...)` hands what is waited for to whoever drives them
(ringcomm.engine.progress.loop), so one thread advances many operations.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, Self

from ringcomm import _core
from ringcomm._core import NodeStep
from ringcomm.arrays.base import Bytes, Flat
from ringcomm.transport.base import ANY_SOURCE, Request, Transport, WireFault
from ringcomm.transport.header import Kind
from ringcomm.transport.members import Members
from ringcomm.transport.node.shm import StepRequest
from ringcomm.transport.node.steps import MEET, Meeting, NodeCopy, NodeReduction
from ringcomm.transport.performer import Performer, Reduction
from ringcomm.transport.running import Running
from ringcomm.transport.tags import DATA
from ringcomm.transport.watch import Letter, Watch


class Phases(Protocol):
    """Records when an operation does what; see ringcomm.engine.progress.timeline."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context that records its block."""
        ...

    def span(self, name: str, begin_ns: int, end_ns: int) -> None:
        """Record what is over, in nanoseconds of the monotonic clock."""
        ...


_UNSEEN = contextlib.nullcontext()


@dataclass
class Wait:
    """Awaits requests: yields them to the driver, which resumes once all are complete."""

    requests: tuple[Request, ...]

    def __await__(self) -> Generator[tuple[Request, ...], None, None]:
        yield self.requests


class Until:
    """Request that is complete once test() says so: nothing is under way for it."""

    source = -1

    def __init__(self, test: Callable[[], bool]) -> None:
        self.test = test

    def cancel(self) -> None:
        """Do nothing."""


class Disagreement(Exception):
    """The ranks of a node are about to do different things in one operation. Nothing was sent."""


class Channel(Performer):
    """Messages of one operation among the ranks of a group, and what is done with them.

    Ranks here are indices into `members`. Only the thread that drives the operation may use it.

    Args:
        watch: the control channel.
        key: of the operation, the same on all of its ranks.
        members: the group's ranks of the job, in its order.
        context: of the group.
        stream: what tells this operation's messages from those of others in flight.
        channel: DATA, CALLS, P2P or GROUPS.
        phases: the timeline.
        slot: of the operation in shared memory, if it has one.
        fingerprint: of what this rank is about to do; ranks that share memory compare it.

    Attributes:
        rank: index of this rank in the group.
        size: of the group.
        awaited: ranks of the job; if all of them leave, this operation cannot complete.
        meeting: where all of them share memory; None: they do not.
        has_met: all ranks are known to be about to do the same.
        linger_s: how long a step is driven by who starts it, before others get their turn.
    """

    def __init__(
        self,
        watch: Watch,
        key: int,
        members: tuple[int, ...],
        *,
        context: int = 0,
        stream: int = 0,
        channel: int = DATA,
        phases: Phases | None = None,
        slot: int | None = None,
        fingerprint: int = 0,
    ) -> None:
        self.transport: Transport = watch.transport
        self.members = Members.of(members, self.transport.rank, self.transport.nodes)
        assert self.members.place is not None
        self.rank, self.size = self.members.place, len(members)
        self.key = key
        self.tag = self.transport.tags.tag(context, stream, channel)
        self.awaited: tuple[int, ...] = ()
        self._watch = watch
        self._phases = phases
        self._context, self._slot, self._fingerprint = context, slot, fingerprint
        self.meeting = self._place_of_meeting()
        self.has_met = False
        self.linger_s = 0.0
        self._posted: set[Request] = set()

    @property
    def nodes(self) -> tuple[int, ...]:
        """For each rank of the group, a number that identifies its node."""
        return self.members.nodes

    def among(self, ranks: Sequence[int]) -> Self:
        """Return this channel as some of its ranks see it."""
        part = copy.copy(self)  # `_posted` stays one set: abandon() of either gives up on both
        part.members = self.members.part(ranks)
        assert part.members.place is not None
        part.rank, part.size = part.members.place, len(ranks)
        part.meeting = part._place_of_meeting()
        return part

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context that puts its block on the timeline: "wait", "reduce", "copy"."""
        return _UNSEEN if self._phases is None else self._phases.phase(name)

    def isend(self, data: Bytes, dest: int) -> Request:
        """Start to send `data`, which must not change until wait() has returned."""
        request = self.transport.isend(data, self.members[dest], self.tag)
        self._posted.add(request)
        return request

    def irecv(self, out: Bytes, source: int) -> Request:
        """Start to receive exactly out.nbytes bytes."""
        request = self.transport.irecv(out, self.members[source], self.tag)
        self._posted.add(request)
        return request

    async def wait(self, *requests: Request) -> None:
        """Return when all requests are complete; the operation ends here if they never will be."""
        with self.phase("wait"):
            await Wait(requests)
        self._posted.difference_update(requests)

    async def reduce_in_node(self, what: NodeReduction) -> None:
        """Reduce in shared memory.

        Raises:
            Disagreement: a rank is about to do something else.
        """
        assert self.meeting is not None
        await self._step(what.begin(self.meeting), what)

    async def copy_in_node(self, shown: Bytes, pulls: list[tuple[int, int, Bytes]]) -> None:
        """Show `shown` to the others; fill each (rank, offset, out) with what they show.

        Raises:
            Disagreement: a rank is about to do something else.
        """
        assert self.meeting is not None
        what = NodeCopy(shown, pulls)
        await self._step(what.begin(self.meeting), what)

    async def meet(self) -> None:
        """Return when all ranks are here, and are about to do the same. Raises Disagreement."""
        assert self.meeting is not None
        await self._step(MEET.begin(self.meeting), MEET)

    @property
    def late(self) -> tuple[int, ...]:
        """Ranks of the job that have not come to where this one waits for them in shared memory."""
        return tuple(
            rank
            for request in tuple(self._posted)
            if isinstance(request, StepRequest)
            for rank in request.missing
        )

    async def follow(self, step: NodeStep, *buffers: Any) -> None:
        """Carry on with a step that was begun already. Raises Disagreement."""
        await self._step(step, *buffers)

    async def _step(self, step: NodeStep, *buffers: Any) -> None:
        assert self.meeting is not None
        with self.phase("shared memory"):
            if not step.is_over and not step.drive(self.linger_s):
                request = StepRequest(step, self.transport.loop, self.members, buffers)
                self._posted.add(request)
                self.transport.loop.add(step)
                await Wait((request,))
                self._posted.discard(request)
        if step.fault:
            raise WireFault(self._text_of_fault(step))
        if not step.agrees:
            raise Disagreement
        self.has_met = True

    def _text_of_fault(self, step: NodeStep) -> str:
        if step.quitter is None:
            return step.fault
        return f"rank {self.members[step.quitter]} has given this operation up"

    async def run(
        self, schedule: _core.Schedule, arguments: list[Bytes], peers: Sequence[int]
    ) -> None:
        """Carry out a recorded algorithm without Python; the transport must have a runner.

        Args:
            schedule: see ringcomm.collectives.recording.
            arguments: the buffers that it was recorded for, or others of the same sizes.
            peers: those that it speaks with, by its numbers for them.
        """
        runner = self.transport.runner
        assert runner is not None
        keeps_time = self._phases is not None
        ranks = [self.members[peer] for peer in peers]
        run = runner.run(schedule, arguments, ranks, self.tag, keeps_time)
        running = Running(run, self.transport.loop, arguments)
        self._posted.add(running)
        self.transport.loop.add(run)
        while not running.test():
            await Wait((running.next_move(),))
        self._posted.discard(running)
        if self._phases is not None:
            for phase in run.phases():
                self._phases.span(*phase)

    def scratch(self, like: Flat, count: int) -> Flat:
        """Return uninitialised memory."""
        return like.like(count)

    def copy(self, out: Flat, x: Flat) -> None:
        """Set out to x."""
        with self.phase("copy"):
            out.bytes[:] = x.bytes

    def combine(self, total: Flat, x: Flat, op: Reduction) -> None:
        """Set total to total op x."""
        with self.phase("reduce"):
            _core.combine(total.bytes, x.bytes, total.dtype.kernel, op.kernel)

    def divide(self, total: Flat, divisor: int) -> None:
        """Divide each element."""
        with self.phase("reduce"):
            _core.divide(total.bytes, divisor, total.dtype.kernel)

    def combine_rounded(self, out: Flat, sources: list[Flat], op: Reduction, divisor: int) -> None:
        """Set out to the sources' combination, rounded once."""
        raw = [source.bytes for source in sources]
        with self.phase("reduce"):
            _core.combine_rounded(out.bytes, raw, out.dtype.kernel, op.kernel, divisor)

    def tell(self, dest: int, kind: Kind, text: str = "", **fields: Any) -> None:
        """Send a control message to a rank of the group."""
        self._watch.tell(self.members[dest], kind, text, **fields)

    async def hear(self, kind: Kind, key: int, source: int, round_: int = 0) -> Letter:
        """Return the next control message of this kind about `key` from a rank of the group."""
        letter = self._watch.letter(
            kind, key, ANY_SOURCE if source == ANY_SOURCE else self.members[source], round_
        )
        if not letter.test():
            await Wait((letter,))
        return letter

    def abandon(self) -> None:
        """Give up on whatever is under way, after any error: its buffers must stay alive."""
        self.transport.abandon(list(self._posted))
        self._posted.clear()

    def _place_of_meeting(self) -> Meeting | None:
        node = self.transport.node
        if node is None or self._slot is None:
            return None
        team = node.team_or_none(self._context, self.members)
        return None if team is None else Meeting(team, self._slot, self._fingerprint)
