"""Requests that C++ completes without Python: recorded algorithms, and what is in shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ringcomm._core import CollectiveStep, Loop, PeerMessage, Run, WireFault
from ringcomm.arrays.base import Bytes
from ringcomm.transport.base import WireRequest


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
