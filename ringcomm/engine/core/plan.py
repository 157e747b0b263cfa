"""The plan of a collective, and results that a caller must take()."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ringcomm._core import CollectiveStep
from ringcomm.engine.core.call import Call
from ringcomm.transport.channel import Channel
from ringcomm.transport.node.steps import NodeExchange, NodeWork

R = TypeVar("R")


class Deferred:
    """A result that callers must take(): on a GPU, their stream then waits for the operation.

    The operation counts as over before take(). This is no ABC, whose isinstance() is slow.
    """

    take: Callable[[], Any]


class AllDeferred(Deferred):
    def __init__(self, results: Sequence[Any]) -> None:
        self._results = results

    def take(self) -> list[Any]:
        return [each.take() if isinstance(each, Deferred) else each for each in self._results]


class Followed(Deferred):
    """A deferred result that is passed to a function by the first take(), once it can be read."""

    def __init__(self, result: Deferred, after: Callable[[Any], object]) -> None:
        self._result = result
        self._after: Callable[[Any], object] | None = after
        self._lock = threading.Lock()

    def take(self) -> None:
        taken = self._result.take()
        with self._lock:
            if self._after is not None:
                self._after(taken)
                self._after = None


@dataclass(slots=True, eq=False)
class Plan(Generic[R]):
    """A collective whose arguments are checked, ready to be carried out."""

    call: Call  # on which all ranks must agree
    nbytes: int  # of the payload, for reports
    run: Callable[[Channel], Coroutine[Any, Any, R]]  # moves the payload
    step: NodeWork | None = None  # does the same as run, in shared memory
    finish: Callable[[Channel | None], R] | None = None  # returns the result after the step
    agrees_first: bool = False  # waits for the agreement, even if the name was agreed on before
    rest: Callable[[Channel], Coroutine[Any, Any, R]] | None = None  # after a step that goes_on
    begun: CollectiveStep | None = None  # the step, if it has begun
    acts_through_channel: bool = False  # all that run() does to arrays is done by its Channel
    has_run: Channel | None = None  # of run(), once that has moved the payload

    @property
    def goes_on(self) -> bool:
        """True if the step, which is over, was only a part of the operation."""
        return isinstance(self.step, NodeExchange) and self.step.goes_on

    async def end(self, t: Channel) -> R:
        """Return the result after the step."""
        if self.goes_on:
            assert self.rest is not None
            return await self.rest(t)
        assert self.finish is not None
        return self.finish(t)

    async def carry_out(self, t: Channel) -> R:
        """Return the result, by the step if the ranks meet in shared memory, else by run()."""
        if self.begun is not None:
            return await self.go_on(self.begun, t)
        if self.step is None or not t.takes_steps:
            return await self.move(t)
        assert t.meeting is not None
        return await self.go_on(self.step.begin(t.meeting), t)

    async def go_on(self, step: CollectiveStep, t: Channel) -> R:
        """Return the result once a step is over; by run() if the payload did not fit."""
        await t.follow(step, self.step, self)
        return await (self.end(t) if step.is_whole else self.move(t))

    async def move(self, t: Channel) -> R:
        """Return the result, by run()."""
        result = await self.run(t)
        self.has_run = t
        return result
