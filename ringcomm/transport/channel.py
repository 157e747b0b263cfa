"""One operation's view of the wire: it sends messages, waits for them, and reduces.

Algorithms are coroutines: `await t.exchange(...)` yields requests to the progress loop
(ringcomm.engine.progress.loop), so one thread advances many operations.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, Self

from ringcomm._core import (
    CollectiveStep,
    CopyStep,
    Loop,
    PeerMessage,
    Places,
    Run,
    Schedule,
    WireFault,
    combine,
    combine_at_once,
    convert,
    divide,
)
from ringcomm.arrays.base import Bytes, Flat
from ringcomm.transport.base import ANY_SOURCE, Transport, WireRequest
from ringcomm.transport.control_header import ControlKind
from ringcomm.transport.control_messages import Letter, Watch
from ringcomm.transport.group_members import Members
from ringcomm.transport.node.steps import (
    MEET,
    Meeting,
    NodeCopy,
    NodeReduction,
    NodeWork,
    choose,
    drive,
)
from ringcomm.transport.performer import Performer, Reduction
from ringcomm.transport.tags import DATA


class PhaseRecorder(Protocol):
    def phase(self, name: str) -> AbstractContextManager[None]: ...

    def span(self, name: str, begin_ns: int, end_ns: int) -> None:
        """Record a phase that is over; times are nanoseconds of the monotonic clock."""
        ...


_UNSEEN = contextlib.nullcontext()


@dataclass
class Wait:
    """Awaitable that yields requests to the progress loop; the await ends when all are complete."""

    requests: tuple[WireRequest, ...]

    def __await__(self) -> Generator[tuple[WireRequest, ...], None, None]:
        yield self.requests


class Until:
    """Request without a message: it is complete once a function returns True."""

    def __init__(self, test: Callable[[], bool]) -> None:
        self.test = test

    def cancel(self) -> None: ...


class Disagreement(Exception):
    """The ranks of a node have entered one operation with different calls. No data has moved."""


# --- requests that C++ completes without Python ---------------------------------------------------
@dataclass(eq=False)
class Running(WireRequest):
    """Request that is complete once the whole algorithm is over."""

    run: Run
    loop: Loop  # advances `run`
    arguments: list[Bytes]  # the buffers of the algorithm, kept alive by this request
    is_in_cpp = True

    def test(self) -> bool:
        if self.run.is_over and self.run.fault:
            raise WireFault(self.run.fault)
        return self.run.is_over

    def cancel(self) -> None:
        self.loop.abandon(self.run)  # keeps for ever the requests that the algorithm has posted


class NextMove(WireRequest):
    """Request that is complete once the algorithm has made another step or is over.

    The deadline starts anew with each step, so a long operation that makes progress does not time
    out.
    """

    is_in_cpp = True

    def __init__(self, running: Running) -> None:
        self._running = running
        self._run = running.run
        self._seen = self._run.moves

    def test(self) -> bool:
        return self._running.test() or self._run.moves != self._seen


@dataclass(eq=False)
class StepRequest(WireRequest):
    """Request that waits for a step: until it is over, or is to choose, or has made a move."""

    step: CollectiveStep
    loop: Loop  # advances `step`
    members: tuple[int, ...]  # the ranks of the job that take part
    buffers: tuple[Any, ...]  # kept alive by this request
    seen: int = 0  # moves of the step that are known
    is_in_cpp = True

    def test(self) -> bool:
        step = self.step
        return step.is_over or step.is_to_choose or step.moves != self.seen

    def cancel(self) -> None:
        self.loop.abandon(self.step)  # afterwards no other rank touches the buffers

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks of the job that have not entered the step."""
        return tuple(r for i, r in enumerate(self.members) if not self.step.has_arrived(i))


@dataclass(eq=False)
class MessageRequest(WireRequest):
    """Request that waits for a message between ranks of the node."""

    message: PeerMessage
    loop: Loop  # advances `message`
    buffers: tuple[Any, ...]  # kept alive by this request
    is_in_cpp = True

    def test(self) -> bool:
        return self.message.is_over

    def cancel(self) -> None:
        self.loop.abandon(self.message)  # afterwards no other rank touches the buffers


# --- the channel ----------------------------------------------------------------------------------
class Channel(Performer):
    """Messages and reductions of one operation among the ranks of a group.

    Ranks are indices into `members`. Only the thread that drives the operation may use its channel.

    Args:
        watch: the Watch, which sends and receives control messages.
        key: key of the operation, the same on all of its ranks.
        members: the ranks of the job that form the group, in its order.
        context, stream, channel: fields of the tag of the operation's messages, see TagLayout.
        phases: recorder of the operation's phases; None: they are not recorded.
        slot: number of the operation's slot in shared memory; None: it has no slot.
        fingerprint: digest of this rank's call; ranks that share memory compare it.

    Attributes:
        awaited: ranks of the job; if all of them leave, this operation cannot complete.
        meeting: slot in which all ranks meet in shared memory; None if they do not share memory.
        has_met: all ranks have shown the same fingerprint.
        leaves_memory: messages are sent also where ranks share memory.
        linger_s: for so many seconds, only the thread that has started a step drives it.
        phase_of_steps: how the recorder is told of steps.
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
        phases: PhaseRecorder | None = None,
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
        self.leaves_memory = False
        self.linger_s = 0.0
        self.phase_of_steps = "shared memory"
        self._posted: set[WireRequest] = set()

    @property
    def nodes(self) -> tuple[int, ...]:
        return self.members.nodes

    @property
    def takes_steps(self) -> bool:
        """True if the ranks meet in shared memory for what has a step there."""
        return self.meeting is not None and not self.leaves_memory

    def among(self, ranks: Sequence[int]) -> Self:
        part = copy.copy(self)  # `_posted` is shared: abandon() of one gives up requests of both
        part.members = self.members.part(ranks)
        assert part.members.place is not None
        part.rank, part.size = part.members.place, len(ranks)
        part.meeting = part._place_of_meeting()
        return part

    def phase(self, name: str) -> AbstractContextManager[None]:
        return _UNSEEN if self._phases is None else self._phases.phase(name)

    def isend(self, data: Bytes, dest: int) -> WireRequest:
        request = self.transport.isend(data, self.members[dest], self.tag)
        self._posted.add(request)
        return request

    def irecv(self, out: Bytes, source: int) -> WireRequest:
        request = self.transport.irecv(out, self.members[source], self.tag)
        self._posted.add(request)
        return request

    async def wait(self, *requests: WireRequest) -> None:
        with self.phase("wait"):
            await Wait(requests)
        self._posted.difference_update(requests)

    async def reduce_in_node(self, what: NodeReduction) -> None:
        """Reduce in shared memory. Raises Disagreement."""
        assert self.meeting is not None
        await self.follow(what.begin(self.meeting), what)

    async def copy_in_node(self, shown: Bytes, pulls: list[tuple[int, int, Bytes]]) -> None:
        """Show `shown` to the others; each (rank, offset, out) fills `out` from the rank's `shown`.

        Raises Disagreement.
        """
        assert self.meeting is not None
        what = NodeCopy(shown, pulls)
        await self.follow(what.begin(self.meeting), what)

    async def place_and_bytes(
        self, places: Places, mine: Bytes, of_others: list[tuple[int, int, Bytes]]
    ) -> int:
        """Copy as copy_in_node() does; return the place that the first rank has given to this.

        It takes the place from its `places` once all ranks have agreed. Raises Disagreement.
        """
        assert self.meeting is not None
        what = NodeCopy(mine, of_others, places)
        step = what.begin(self.meeting)
        await self.follow(step, what)
        assert isinstance(step, CopyStep)
        return step.place

    async def meet(self) -> None:
        """Return once all ranks have entered with the same fingerprint. Raises Disagreement."""
        assert self.meeting is not None
        await self.follow(MEET.begin(self.meeting), MEET)

    @property
    def late(self) -> tuple[int, ...]:
        """Ranks of the job for which this rank waits in shared memory."""
        return tuple(
            rank
            for request in tuple(self._posted)
            if isinstance(request, StepRequest)
            for rank in request.missing
        )

    async def follow(self, step: CollectiveStep, what: NodeWork | None, *buffers: Any) -> None:
        """Return once a step of `what` is over; keep its buffers alive. Raises Disagreement."""
        with self.phase(self.phase_of_steps):
            if not drive(step, what, self.linger_s):
                request = StepRequest(step, self.transport.loop, self.members, (what, *buffers))
                self._posted.add(request)
                self.transport.loop.add(step)
                while not step.is_over:
                    await Wait((request,))  # the deadline starts anew with each move
                    request.seen = step.moves
                    choose(step, what)
                self._posted.discard(request)
        if step.fault:
            raise WireFault(self._text_of_fault(step))
        if not step.agrees:
            raise Disagreement
        self.has_met = True

    async def pass_on(self, message: PeerMessage, *buffers: Any) -> None:
        """Return once a message is over; keep its buffers alive."""
        if not message.is_over:
            request = MessageRequest(message, self.transport.loop, buffers)
            self._posted.add(request)
            self.transport.loop.add(message)
            await Wait((request,))
            self._posted.discard(request)
        if message.fault:
            raise WireFault(message.fault)

    def _text_of_fault(self, step: CollectiveStep) -> str:
        if step.quitter is None:
            return step.fault
        return f"rank {self.members[step.quitter]} has given this operation up"

    async def run(self, schedule: Schedule, arguments: list[Bytes], peers: Sequence[int]) -> None:
        """Carry out a recorded algorithm without Python; the transport must have a runner.

        `arguments` have the sizes for which the algorithm was recorded. `peers[i]` is the rank of
        the group that the schedule calls peer i.
        """
        runner = self.transport.runner
        assert runner is not None
        keeps_time = self._phases is not None
        ranks = self.transport.wire_ranks([self.members[peer] for peer in peers])
        run = runner.run(schedule, arguments, ranks, self.tag, keeps_time)
        running = Running(run, self.transport.loop, arguments)
        self._posted.add(running)
        if not (self.linger_s and run.drive(self.linger_s)):
            self.transport.loop.add(run)
        while not running.test():
            await Wait((NextMove(running),))
        self._posted.discard(running)
        if self._phases is not None:
            for phase in run.phases():
                self._phases.span(*phase)

    def scratch(self, like: Flat, count: int) -> Flat:
        return like.like(count)

    def copy(self, out: Flat, x: Flat) -> None:
        with self.phase("copy"):
            out.bytes[:] = x.bytes

    def cast(self, out: Flat, x: Flat) -> None:
        """Set out to x in out's dtype, rounded once. One of them is float32, one has 16 bits."""
        with self.phase("reduce"):
            convert(out.bytes, x.bytes, out.dtype.kernel, x.dtype.kernel)

    def combine(self, total: Flat, x: Flat, op: Reduction) -> None:
        with self.phase("reduce"):
            combine(total.bytes, x.bytes, total.dtype.kernel, op.kernel)

    def divide(self, total: Flat, divisor: int) -> None:
        with self.phase("reduce"):
            divide(total.bytes, divisor, total.dtype.kernel)

    def combine_at_once(self, out: Flat, sources: list[Flat], op: Reduction, divisor: int) -> None:
        raw = [source.bytes for source in sources]
        with self.phase("reduce"):
            combine_at_once(out.bytes, raw, out.dtype.kernel, op.kernel, divisor)

    def tell(self, dest: int, kind: ControlKind, text: str = "", **fields: Any) -> None:
        self._watch.tell(self.members[dest], kind, text, **fields)

    def expect(self, kind: ControlKind, key: int, source: int, round_: int = 0) -> Letter:
        """Return a request for what hear() returns."""
        rank = ANY_SOURCE if source == ANY_SOURCE else self.members[source]
        return self._watch.letter(kind, key, rank, round_)

    async def hear(self, kind: ControlKind, key: int, source: int, round_: int = 0) -> Letter:
        """Return the next control message of this kind about `key` from a rank of the group."""
        letter = self.expect(kind, key, source, round_)
        if not letter.test():
            await Wait((letter,))
        return letter

    def abandon(self) -> None:
        """Give up all requests after an error; the transport keeps their buffers alive."""
        self.transport.abandon(list(self._posted))
        self._posted.clear()

    def _place_of_meeting(self) -> Meeting | None:
        node = self.transport.node
        if node is None or self._slot is None:
            return None
        team = node.team_or_none(self._context, self.members)
        return None if team is None else Meeting(team, self._slot, self._fingerprint)
