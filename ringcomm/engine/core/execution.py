"""A plan, and how it goes: agree, then move; or both at once; or both in shared memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ringcomm.engine.core.agreement import agree, mismatch
from ringcomm.engine.core.call import Call
from ringcomm.engine.core.ledger import Ticket
from ringcomm.engine.core.pending import PendingOperation
from ringcomm.engine.core.selection import Selection
from ringcomm.engine.progress.task import TaskCoroutine
from ringcomm.errors import MismatchError
from ringcomm.transport.channel import Channel, Disagreement, Until, Wait
from ringcomm.transport.header import CALLS, DATA
from ringcomm.transport.node.shm import NodeTeam
from ringcomm.transport.node.steps import NodeCopy, NodeReduction
from ringcomm.transport.watch import Watch

R = TypeVar("R")

# How long who waits for an operation stays in C++ before it looks at anything else.
_LINGER_S = 1e-3
_NEVER = Until(lambda: False)


class Deferred:
    """A result that is there for a caller once it has asked for it: what comes later on its stream.

    An operation whose result this is counts as over. Each result is asked whether it is one, so
    this is no ABC, which would take its time to answer.

    Attributes:
        take: returns the result.
    """

    take: Callable[[], Any]


class AllDeferred(Deferred):
    """Several results as one list; some of them may be there."""

    def __init__(self, results: Sequence[Any]) -> None:
        self._results = results

    def take(self) -> list[Any]:
        """Return the results."""
        return [each.take() if isinstance(each, Deferred) else each for each in self._results]


@dataclass(slots=True, eq=False)
class Plan(Generic[R]):
    """A collective that this rank is ready to carry out.

    Attributes:
        call: what all ranks must agree on.
        nbytes: size of the payload, for reports.
        run: moves the payload and returns the result.
        step: all that it comes to where all ranks share memory, if that is one step.
        finish: returns the result after that step.
        agrees_first: nothing may happen before all ranks have agreed, even on what they agreed on
            before.
    """

    call: Call
    nbytes: int
    run: Callable[[Channel], Coroutine[Any, Any, R]]
    step: NodeReduction | NodeCopy | None = None
    finish: Callable[[Channel | None], R] | None = None
    agrees_first: bool = False


class Execution:
    """Turns plans into coroutines.

    Args:
        watch: the control channel.
        selection: which algorithm carries out which collective.
    """

    def __init__(self, watch: Watch, selection: Selection) -> None:
        self._watch = watch
        self._selection = selection

    def coroutines(self, work: PendingOperation, plan: Plan[Any]) -> tuple[TaskCoroutine, ...]:
        """Return how to carry out a plan: agree first, or beside it if all did so before."""
        ledger, ticket = work.ledger, work.ticket
        assert ledger is not None
        fingerprint = plan.call.fingerprint
        if work.team is not None and (ticket.name is None or ledger.is_cached(ticket)):
            return (self._meet_and_run(work, plan, fingerprint),)
        stream = ledger.cached_stream(ticket, fingerprint)
        if stream is None or work.problem is not None or plan.agrees_first:
            return (self._agree_and_run(work, plan, fingerprint),)
        run = self._run_beside(plan, self._channel(work, stream, DATA, fingerprint))
        return run, self._agree_beside(work, plan, fingerprint, stream)

    async def _meet_and_run(self, work: PendingOperation, plan: Plan[Any], fingerprint: int) -> Any:
        """Agree in shared memory, with the first thing that the operation does there."""
        ledger, ticket, team = work.ledger, work.ticket, work.team
        assert ledger is not None
        assert team is not None
        stream = ledger.proposal(ticket)
        t = self._channel(work, stream, DATA, fingerprint)
        await _take_turn(team, ticket)
        try:
            if self._selection.leaves_memory:
                await t.meet()
            result = None if work.problem is not None else await plan.run(t)
            if not t.has_met:
                await t.meet()
        except Disagreement:
            pass
        else:
            if work.problem is not None:
                raise work.problem
            return result
        finally:
            end_turn(team, ticket)
        ledger.settle(ticket, stream, None)
        raise await self._mismatch(work, plan, stream, has_moved=False)

    async def _agree_and_run(
        self, work: PendingOperation, plan: Plan[Any], fingerprint: int
    ) -> Any:
        ledger, ticket = work.ledger, work.ticket
        assert ledger is not None
        talk = self._channel(work, 0, CALLS)
        has_moved = ledger.is_cached(ticket)  # other ranks may take this for what was agreed on
        verdict = await agree(fingerprint, ledger.proposal(ticket), talk)
        is_good = verdict.is_agreed and work.problem is None
        ledger.settle(ticket, verdict.value, fingerprint if is_good else None)
        await _take_turn(work.neighbours, ticket)  # also where nothing will be done with it
        try:
            if not verdict.is_agreed:
                raise await self._mismatch(work, plan, verdict.value, has_moved=has_moved)
            if work.problem is not None:
                raise work.problem
            return await plan.run(self._channel(work, verdict.value, DATA, fingerprint))
        finally:
            end_turn(work.neighbours, ticket)

    async def _run_beside(self, plan: Plan[Any], t: Channel) -> Any:
        """Carry out what all ranks agreed on before, while they agree anew."""
        with contextlib.suppress(Disagreement):
            return await plan.run(t)
        await Wait((_NEVER,))  # the agreement that goes on beside says what is wrong

    async def _agree_beside(
        self, work: PendingOperation, plan: Plan[Any], fingerprint: int, stream: int
    ) -> None:
        """Agree while the data moves; a rank that does not agree poisons what has moved."""
        assert work.ledger is not None
        verdict = await agree(fingerprint, stream, self._channel(work, 0, CALLS))
        if not verdict.is_agreed:
            work.ledger.settle(work.ticket, stream, None)
            raise await self._mismatch(work, plan, stream, has_moved=True)

    async def _mismatch(
        self, work: PendingOperation, plan: Plan[Any], stream: int, *, has_moved: bool
    ) -> MismatchError:
        talk = self._channel(work, stream, CALLS)
        error = await mismatch(plan.call, work.ticket.number, talk, has_moved=has_moved)
        error.__cause__ = work.problem
        return error

    def _channel(
        self, work: PendingOperation, stream: int, channel: int, fingerprint: int | None = None
    ) -> Channel:
        """Return a view of the wire; with a fingerprint, of the node's memory, too."""
        assert work.ledger is not None
        slot = None if fingerprint is None else work.ledger.slot(work.ticket, stream)
        made = Channel(
            self._watch,
            work.task.key,
            work.task.members,
            context=work.ledger.context,
            stream=stream,
            channel=channel,
            phases=work.lane,
            slot=slot,
            fingerprint=fingerprint or 0,
        )
        made.linger_s = _LINGER_S if work.is_awaited else 0.0
        work.task.channels.append(made)
        return made


async def _take_turn(team: NodeTeam | None, ticket: Ticket) -> None:
    """Wait until the slot of an unnamed operation is free; a name has its own."""
    if team is not None and ticket.name is None and not team.is_turn_of(ticket.number):
        await Wait((Until(lambda: team.is_turn_of(ticket.number)),))


def end_turn(team: NodeTeam | None, ticket: Ticket) -> None:
    """Leave the slot of an unnamed operation to the next one."""
    if team is not None and ticket.name is None:
        team.end_turn(ticket.number)
