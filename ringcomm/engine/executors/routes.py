"""The table of all routes of an operation, and the choice of a task's route.

Three choices follow one another: how an operation begins, how its ranks agree, and how its data
moves. For each route the table says when it is taken, and which function carries it out:

    short call             blocking, unnamed, made before with this dtype and shape
                           engine.core.engine::Engine.take_place
    short call by name     the same, under a name that was agreed on before
                           engine.core.engine::Engine.take_name
    one step               the plan is one step, its payload fits, and its turn has come
                           engine.core.engine::Engine._take_step
    conversation           send(), recv(), join(): no collective
                           engine.peers.tasks_outside_collectives::Conversations.begin
    stand-in               a collective of others, once this rank has called join()
                           engine.executors.joined_rank::plan_stand_in
    met and run            other tasks in shared memory, unnamed or with a name agreed on before
                           engine.executors.routes::Routes._meet_and_run
    met by messages        the same where ranks take steps by messages
                           engine.executors.routes::Routes._meet_by_messages
    agreed and run         other tasks: new names, and more than 64 ranks
                           engine.executors.routes::Routes._agree_and_run
    cached and run beside  a long payload of a name that was agreed on before, except on GPUs
                           engine.executors.routes::Routes._run_beside
    recorded schedule      messages, where C++ can send them
                           transport.channel::Channel.run
    Python coroutine       other messages
                           transport.channel::Channel.isend
    nccl                   arrays on GPUs, where all ranks have NCCL
                           gpu.transports.nccl::NcclTransport.phases
    ipc                    arrays on GPUs of one node
                           gpu.transports.ipc::IpcTransport.phases
    staged                 other arrays on GPUs: through host memory
                           gpu.executor.host_staging::through_host

A step takes place in shared memory; else, among at most 64 ranks, it is short messages.
A short call is one step, and a recorded schedule if its payload does not fit. It becomes a task if
another rank is late, as one step does. The tests of the table are
unit/test_routes.py::test_each_route_is_taken_when_the_table_says_so and, for GPUs,
gpu/test_collectives.py::test_each_transport_is_a_route_of_its_own.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from ringcomm.engine.core.agreement import agree, mismatch
from ringcomm.engine.core.algorithm_choice import Selection
from ringcomm.engine.core.ledger import Ticket
from ringcomm.engine.core.pending_operations import PendingOperation
from ringcomm.engine.core.plan import Plan
from ringcomm.engine.progress.task import TaskCoroutine
from ringcomm.status.error_text import place_of_thread
from ringcomm.transport.channel import Channel, Disagreement, Until, Wait
from ringcomm.transport.control_messages import Watch
from ringcomm.transport.node.steps import AGREE, Meeting, NodeExchange, NodeWork, Team
from ringcomm.transport.tags import CALLS, DATA
from ringcomm.transport.wire_team import WireTeam

# How long a thread that waits for an operation stays in C++ before it polls anything else.
_LINGER_S = 1e-3
_NEVER = Until(lambda: False)


class Routes:
    """Turns the plans of tasks into coroutines."""

    def __init__(self, watch: Watch, selection: Selection) -> None:
        self._watch = watch
        self._selection = selection

    def coroutines(self, work: PendingOperation, plan: Plan[Any]) -> tuple[TaskCoroutine, ...]:
        """Return the coroutine of a plan; two if the ranks agree while the data moves."""
        ledger, ticket = work.ledger, work.ticket
        assert ledger is not None
        if work.team is not None and (ticket.name is None or ledger.is_cached(ticket)):
            return (self._meet_and_run(work, plan),)
        stream = ledger.cached_stream(ticket, plan.call.fingerprint)
        is_beside = stream is not None and work.problem is None and not plan.agrees_first
        if work.wire is not None and (ticket.name is None or ledger.is_cached(ticket)):
            # What each rank brings is told with the agreement.
            agrees_first = plan.begun is not None or isinstance(plan.step, NodeExchange)
            if not is_beside or agrees_first or work.wire.fits(plan.nbytes):
                return (self._meet_by_messages(work, plan, work.wire),)
        elif not is_beside:
            return (self._agree_and_run(work, plan),)
        assert stream is not None
        run = self._run_beside(plan, self._channel(work, stream, DATA, plan.call.fingerprint))
        return run, self._agree_beside(work, plan, stream)

    async def _meet_and_run(self, work: PendingOperation, plan: Plan[Any]) -> Any:
        """Agree in the first rendezvous of the operation in shared memory."""
        ledger, ticket, team = work.ledger, work.ticket, work.team
        assert ledger is not None
        assert team is not None
        stream = ledger.proposal(ticket)
        t = self._channel(work, stream, DATA, plan.call.fingerprint)
        await _take_turn(team, ticket)
        try:
            if self._selection.leaves_memory:
                await t.meet()
            result = None if work.problem is not None else await plan.carry_out(t)
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

    async def _meet_by_messages(
        self, work: PendingOperation, plan: Plan[Any], team: WireTeam
    ) -> Any:
        """Agree by the messages of a step. A short payload goes along with them."""
        ledger, ticket = work.ledger, work.ticket
        assert ledger is not None
        stream, has_moved = ledger.proposal(ticket), ledger.is_cached(ticket)
        t = self._channel(work, stream, DATA, plan.call.fingerprint)
        await _take_turn(team, ticket)
        try:
            step = plan.begun or self._step(plan, work.problem).begin(
                Meeting(team, team.slot(stream, None), plan.call.fingerprint)
            )
            try:
                await self._talk(work, stream).follow(step, plan.step, plan)
            except Disagreement:
                ledger.settle(ticket, stream, None)
                raise await self._mismatch(work, plan, stream, has_moved=has_moved) from None
            ledger.settle(ticket, stream, None if work.problem else plan.call.fingerprint)
            if work.problem is not None:
                raise work.problem
            return await (plan.end(t) if step.is_whole else plan.move(t))
        finally:
            end_turn(team, ticket)

    def _talk(self, work: PendingOperation, stream: int) -> Channel:
        talk = self._channel(work, stream, CALLS)
        talk.phase_of_steps = "negotiation"
        work.task.asks_who_left = True
        return talk

    def _step(self, plan: Plan[Any], problem: Exception | None) -> NodeWork:
        if problem is not None or plan.step is None or self._selection.leaves_memory:
            return AGREE
        return plan.step

    async def _agree_and_run(self, work: PendingOperation, plan: Plan[Any]) -> Any:
        ledger, ticket, fingerprint = work.ledger, work.ticket, plan.call.fingerprint
        assert ledger is not None
        talk = self._channel(work, 0, CALLS)
        has_moved = ledger.is_cached(ticket)  # other ranks may have sent data already
        verdict = await agree(fingerprint, ledger.proposal(ticket), talk)
        is_good = verdict.is_agreed and work.problem is None
        ledger.settle(ticket, verdict.value, fingerprint if is_good else None)
        await _take_turn(work.neighbours, ticket)  # even if this rank will not use the slot
        try:
            if not verdict.is_agreed:
                raise await self._mismatch(work, plan, verdict.value, has_moved=has_moved)
            if work.problem is not None:
                raise work.problem
            return await plan.carry_out(self._channel(work, verdict.value, DATA, fingerprint))
        finally:
            end_turn(work.neighbours, ticket)

    async def _run_beside(self, plan: Plan[Any], t: Channel) -> Any:
        """Carry out a plan whose name was agreed on before, while the ranks agree anew."""
        with contextlib.suppress(Disagreement):
            return await plan.carry_out(t)
        await Wait((_NEVER,))  # _agree_beside() raises the mismatch

    async def _agree_beside(self, work: PendingOperation, plan: Plan[Any], stream: int) -> None:
        """Agree while the data moves; after a disagreement the moved data is undefined."""
        assert work.ledger is not None
        is_agreed = True
        if work.wire is None:
            talk = self._channel(work, 0, CALLS)
            is_agreed = (await agree(plan.call.fingerprint, stream, talk)).is_agreed
        else:
            where = Meeting(work.wire, work.wire.slot(stream, None), plan.call.fingerprint)
            try:
                await self._talk(work, stream).follow(AGREE.begin(where), None, plan)
            except Disagreement:
                is_agreed = False
        if not is_agreed:
            work.ledger.settle(work.ticket, stream, None)
            raise await self._mismatch(work, plan, stream, has_moved=True)

    async def _mismatch(
        self, work: PendingOperation, plan: Plan[Any], stream: int, *, has_moved: bool
    ) -> Exception:
        talk = self._channel(work, stream, CALLS)
        number, problem = work.ticket.number, work.problem
        call = replace(plan.call, at=place_of_thread(work.thread))
        return await mismatch(call, number, talk, has_moved=has_moved, problem=problem)

    def _channel(
        self, work: PendingOperation, stream: int, channel: int, fingerprint: int | None = None
    ) -> Channel:
        """Return a channel; with a fingerprint, one that also uses shared memory."""
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
        made.leaves_memory = self._selection.leaves_memory
        work.task.channels.append(made)
        return made


async def _take_turn(team: Team | None, ticket: Ticket) -> None:
    """Wait until the slot of an unnamed operation is free; a cached name has a slot of its own."""
    if team is not None and ticket.name is None and not team.is_turn_of(ticket.number):
        await Wait((Until(lambda: team.is_turn_of(ticket.number)),))


def end_turn(team: Team | None, ticket: Ticket) -> None:
    if team is not None and ticket.name is None:
        team.end_turn(ticket.number)
