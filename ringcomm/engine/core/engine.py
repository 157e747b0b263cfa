"""The engine of a rank: how its operations are identified, and how they begin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from ringcomm._core import CollectiveStep, StatusPage
from ringcomm.config import Settings
from ringcomm.engine.control.step_boundary import Control
from ringcomm.engine.core.call import Call
from ringcomm.engine.core.context import EngineContext, Topology
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.handle import Handle
from ringcomm.engine.core.ledger import Ledger, Ticket
from ringcomm.engine.core.pending_operations import PendingOperation
from ringcomm.engine.core.plan import Plan
from ringcomm.engine.executors.routes import Routes, end_turn
from ringcomm.engine.peers.answer_whether_entered import Whereabouts
from ringcomm.engine.peers.groups import Groups
from ringcomm.engine.peers.join import JoinedRanks
from ringcomm.engine.progress.task import CompletedTask, Task
from ringcomm.transport.base import Transport
from ringcomm.transport.channel import Channel, StepRequest
from ringcomm.transport.node.steps import Meeting, Team, drive

R = TypeVar("R")


class _Submission(NamedTuple):
    """An operation that this rank has entered in the ledger; see PendingOperation."""

    group: Group
    ledger: Ledger
    ticket: Ticket
    is_awaited: bool
    timeout_s: float | None = None


class Engine(EngineContext):
    """The operations of one rank, in its groups."""

    def __init__(
        self,
        transport: Transport,
        settings: Settings,
        topology: Topology | None = None,
        page: StatusPage | None = None,
    ) -> None:
        super().__init__(transport, settings, topology, page)
        watch, talks = self.watch, self.conversations
        self.groups = Groups(watch, Group.of_all(self), talks)
        self.groups.when_over = self.extensions.end_group
        self.here = Whereabouts(watch, self.pending, self.extensions, self.groups)
        self._joined = JoinedRanks(watch, self.pending, self.groups, self.here, talks)
        self._routes = Routes(watch, self.selection)
        self.control = Control(self, self.groups)

    @property
    def rank(self) -> int:
        return self.groups.default.index

    @property
    def size(self) -> int:
        return self.groups.default.size

    def execute(
        self,
        kind: str,
        name: str | None,
        plan: Callable[[Group], Plan[R]],
        group: Group | None = None,
        *,
        timeout_s: float | None = None,
        is_once: bool = False,
    ) -> R:
        """Carry out one collective of a group (None: all ranks) and return its result; blocks.

        Raises the errors of plan(), and those of the functions in ringcomm.engine.api.collectives.

        Args:
            kind: name of the collective; the other ranks get it if plan() fails.
            name: name that the user gave to the operation, or None.
            plan: checks the arguments and returns the plan. If it raises, this rank still takes
                part in the agreement, so that the others get a MismatchError instead of waiting.
            group: the ranks that take part.
            timeout_s: deadline in seconds; None: RINGCOMM_TIMEOUT_S.
            is_once: no rank will use `name` again; `name` replaces the name in the plan's call.
        """
        task = None
        try:
            task = self._submit(
                kind, name, plan, group, is_awaited=True, timeout_s=timeout_s, is_once=is_once
            )
            result: R = self.completion.result_of(task)
        except BaseException as error:
            self.completion.break_unless_over(task, error)
            raise
        return result

    def start(
        self,
        kind: str,
        name: str | None,
        plan: Callable[[Group], Plan[R]],
        group: Group | None = None,
        *,
        timeout_s: float | None = None,
        is_once: bool = False,
    ) -> Handle[R]:
        """Begin one collective and return its Handle at once; see execute()."""
        self.progress.work_in_background()
        task = None
        try:
            task = self._submit(
                kind, name, plan, group, is_awaited=False, timeout_s=timeout_s, is_once=is_once
            )
            return Handle(self.completion, task)
        except BaseException as error:
            self.completion.break_unless_over(task, error)
            raise

    def join(self, plan: Callable[[Group, Call], Plan[Any]]) -> int:
        """Take part in others' calls by plans of plan() until all join; return the last to join."""

        def stand_in(call: Call, group: Group) -> Task | CompletedTask:
            kind, name, is_once = call.kind, call.name, call.is_once
            return self._submit(
                kind, name, lambda g: plan(g, call), group, is_awaited=False, is_once=is_once
            )

        self.progress.work_in_background()
        last, n_steps = self._joined.join(stand_in, self.control.n_steps)
        self.control.catch_up(n_steps)
        return last

    def nudge(self) -> None:
        """Poll the services, at once if no thread drives the loop. Any thread may call this."""
        self.state.require_usable()
        self.progress.nudge()

    # --- without a task ---------------------------------------------------------------------------
    def take_place(self, ledger: Ledger, team: Team) -> int | None:
        """Return the place (number) of a new operation without a task; None if it needs a task."""
        if not self.state.is_usable or self._needs_task():
            return None
        with self.pending.lock:
            if not team.is_turn_of(ledger.next_place):
                return None
            return ledger.take_place()

    def take_name(self, ledger: Ledger, name: str) -> Ticket | None:
        """Return the ticket of a new operation without a task; None if it needs a task."""
        if not self.state.is_usable or self._needs_task():
            return None
        with self.pending.lock:
            if ledger.is_pending(name) or not ledger.knows(name):
                return None
            return ledger.enter(name)

    def adopt(
        self,
        ticket: Ticket,
        step: CollectiveStep,
        plan: Plan[Any],
        group: Group,
        *,
        timeout_s: float | None = None,
    ) -> Task:
        """Return a task for the step that this thread has begun for an operation of `group`."""
        ledger = group.ledger_for(self)
        return self._follow(step, plan, _Submission(group, ledger, ticket, True, timeout_s))

    def _needs_task(self) -> bool:
        """Return True if a timeline, messages, joined or lost ranks require tasks."""
        if self.pending.timeline is not None or self.selection.leaves_memory:
            return True
        return self._joined.has_guests or self.watch.peers.has_lost

    @property
    def n_joins(self) -> int:
        """Number of times that join() has ended; the same on all ranks between two operations."""
        return self._joined.n_ended

    @property
    def seen_in_join(self) -> tuple[int, ...]:
        """The ranks that were in join() in an exchange of all ranks, and are there still.

        It is the same on all other ranks. More may be there: a rank that joins is not heard of at
        one moment by all.
        """
        return self._joined.seen

    @seen_in_join.setter
    def seen_in_join(self, ranks: tuple[int, ...]) -> None:
        self._joined.seen = ranks

    # --- submission -------------------------------------------------------------------------------
    def _submit(
        self,
        kind: str,
        name: str | None,
        plan: Callable[[Group], Plan[R]],
        group: Group | None,
        *,
        is_awaited: bool,
        timeout_s: float | None = None,
        is_once: bool = False,
    ) -> Task | CompletedTask:
        self.state.require_usable()
        group = self.groups.or_default(group)
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name must be a str or None, not {name!r}")
        ledger = group.ledger_for(self)
        ready, problem = _try(kind, name, group, plan)
        if is_once:
            ready = replace(ready, call=replace(ready.call, name=name, is_once=True))
        has_place = False
        try:
            with self.pending.lock:
                self.state.require_usable()
                self.pending.require_room(self.job_rank)
                ledger.require_free(ready.call.name)
                has_place = True
                ticket = ledger.enter(ready.call.name, is_once=is_once)
                entered = _Submission(group, ledger, ticket, is_awaited, timeout_s)
                is_one_step = problem is None and self._is_one_step(ready, entered)
                if not is_one_step:
                    task = self._make_task(ready, entered, problem)
            if is_one_step:
                return self._take_step(ready, entered)
            begins_here = group.team is not None or group.size == 1
            self.progress.begin(task, is_awaited=is_awaited, at_once=begins_here)
        except BaseException as error:
            if has_place:  # an interrupt, or no memory: other ranks wait for this operation
                self.completion.break_engine(error, ready.call.label(ledger.next_place - 1))
            raise
        return task

    def _is_one_step(self, plan: Plan[Any], entered: _Submission) -> bool:
        team, ticket = entered.group.takes_steps, entered.ticket
        if plan.step is None or team is None or not team.fits(plan.nbytes):
            return False
        if self._needs_task():
            return False
        if ticket.name is None:
            return team.is_turn_of(ticket.number)
        return entered.ledger.is_cached(ticket)

    def _take_step(self, plan: Plan[R], entered: _Submission) -> Task | CompletedTask:
        """Carry out an operation of one step; return a task that may not be over yet."""
        group, ledger, ticket, is_awaited, _ = entered
        team, stream = group.takes_steps, ledger.proposal(ticket)
        assert team is not None
        assert plan.step is not None
        assert plan.finish is not None
        slot = team.slot(stream, ledger.slot(ticket, stream))
        assert slot is not None
        step = plan.step.begin(Meeting(team, slot, plan.call.fingerprint))
        moment_s = team.moment_s if is_awaited else 0.0
        is_over = drive(step, plan.step, moment_s)
        if is_over and step.agrees and step.is_whole and not step.fault and not plan.goes_on:
            result = plan.finish(None)
            with self.pending.lock:
                ledger.finish(ticket)
                end_turn(team, ticket)
            if self.page is not None:
                self.page.count_op(plan.nbytes)
            label = partial(_label, plan.call, ticket, group, self.groups.default)
            return CompletedTask(result, ticket.number, label)
        return self._follow(step, plan, entered)

    def _follow(self, step: CollectiveStep, plan: Plan[Any], entered: _Submission) -> Task:
        """Return a task that completes a step that was begun."""
        plan.begun = step
        with self.pending.lock:
            task = self._make_task(plan, entered)
        transport = self.transport

        def give_up() -> None:
            if not step.is_over:  # its coroutine may never have begun
                transport.abandon([StepRequest(step, transport.loop, (), (plan,))])

        task.give_up = give_up
        self.progress.begin(task, is_awaited=entered.is_awaited, at_once=True)
        return task

    def _make_task(
        self, plan: Plan[Any], entered: _Submission, problem: Exception | None = None
    ) -> Task:
        """Return a pending task; the caller holds the lock."""
        group, ledger, ticket, is_awaited, timeout_s = entered
        label = _label(plan.call, ticket, group, self.groups.default)
        task = Task(label, ticket, group.ranks)
        task.timeout_s = timeout_s
        # An operation with a deadline of its own must not queue behind others.
        task.needs_admission = ticket.name is None and timeout_s is None
        task.ends_alone = plan.call.place is None  # what a GPU uses is not given up
        teams = group.team, group.node_team, group.wire
        work = PendingOperation(
            task, ledger, ticket, plan.nbytes, plan.call, problem, group, *teams, is_awaited
        )
        try:
            self.pending.add(work)
            task.start(*self._routes.coroutines(work, plan))
            self._joined.invite(work)
        except BaseException as error:  # other ranks will wait for this operation
            self.pending.remove(ticket.key, has_failed=True)
            task.stop()
            task.error, task.is_over = error, True
            self.completion.break_engine(error, label)
            raise
        return task


def _label(call: Call, ticket: Ticket, group: Group, default: Group) -> str:
    label = call.label(ticket.number)
    return label if group is default else f"{label} of {group!r}"


def _try(
    kind: str, name: str | None, group: Group, plan: Callable[[Group], Plan[R]]
) -> tuple[Plan[R], Exception | None]:
    try:
        ready = plan(group)
        _ = ready.call.fingerprint  # a call that cannot be packed is an error like a bad argument
        return ready, None
    except Exception as error:  # noqa: BLE001 - the other ranks must learn of any error
        call = Call(kind, name, error=f"{type(error).__name__}: {error}")
        return Plan(call, 0, _never_run), error


async def _never_run(_: Channel) -> Any:
    raise AssertionError("a call that could not be planned must not run")
