"""One rank's operations: which is which, begun, waited for; and whether the next can be."""

from __future__ import annotations

import copy
import logging
import math
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from ringcomm._core import NodeStep, StatusPage
from ringcomm.arrays.base import Bytes
from ringcomm.collectives.table import Table
from ringcomm.config import Settings
from ringcomm.engine.core.agreement import broadcast_bytes
from ringcomm.engine.core.call import Call
from ringcomm.engine.core.execution import Deferred, Execution, Plan, end_turn
from ringcomm.engine.core.extensions import Attached
from ringcomm.engine.core.forks import n_forks
from ringcomm.engine.core.group import Group, group_of
from ringcomm.engine.core.group_agreement import Founding
from ringcomm.engine.core.handle import DroppedErrors, Handle
from ringcomm.engine.core.joining import Joining
from ringcomm.engine.core.ledger import MAX_CACHED, MAX_PENDING, NO_GROUP, Ledger, Ticket, base_of
from ringcomm.engine.core.pending import Pending, Work
from ringcomm.engine.core.selection import Selection
from ringcomm.engine.progress.deadlines import ANSWER_S, Farewell, ask_around, describe_wait
from ringcomm.engine.progress.loop import Progress
from ringcomm.engine.progress.task import CompletedTask, Task, TaskCoroutine
from ringcomm.engine.progress.timeline import Timeline
from ringcomm.errors import (
    CommTimeoutError,
    ConfigError,
    MismatchError,
    NotInitializedError,
    PeerFailedError,
    RingcommError,
)
from ringcomm.status.page import State
from ringcomm.transport.base import Transport
from ringcomm.transport.channel import Channel
from ringcomm.transport.node.shm import NodeTeam
from ringcomm.transport.node.steps import Meeting
from ringcomm.transport.watch import Watch

_log = logging.getLogger("ringcomm")
R = TypeVar("R")


class _Entry(NamedTuple):
    """An operation that this rank has entered.

    Attributes:
        group: whose it is.
        ledger: of the group.
        ticket: which one it is.
        is_awaited: who started it waits for it.
        timeout_s: its own deadline, if it has one.
    """

    group: Group
    ledger: Ledger
    ticket: Ticket
    is_awaited: bool
    timeout_s: float | None = None


@dataclass(frozen=True)
class Topology:
    """Where a rank stands. local: among the ranks of its host. cross: among hosts.

    Attributes:
        local_rank: index among the ranks of this host.
        local_size: number of ranks on this host.
        cross_rank: index of this host among the hosts that have this local_rank.
        cross_size: number of those hosts.
    """

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


class Engine:
    """The collectives of one rank.

    Attributes:
        rank: of this process, 0..size-1.
        size: number of ranks.
        world: the default group.
        topology: ranks of this host, and hosts.
        settings: deadlines and bucket size.
        watch: what is known of the other ranks.
        timeline: where its operations are recorded, or None.
        selection: which algorithm carries out which collective.
        broke_while_leaving: what kept leave() from completing what was started, or None.
        attached: what other modules have attached to it.
    """

    def __init__(
        self,
        transport: Transport,
        settings: Settings,
        topology: Topology | None = None,
        page: StatusPage | None = None,
    ) -> None:
        self.job_rank = transport.rank
        self.job_size = transport.size
        self.topology = topology or Topology(self.job_rank, self.job_size, 0, 1)
        self.settings = settings
        self.watch = Watch(transport)
        self.watch.whereabouts = self
        self.timeline = Timeline(settings.timeline, self.job_rank) if settings.timeline else None
        self._transport = transport
        self.world = Group._of_all(self)
        self.progress = Progress(self.watch, settings, self._on_over, self._on_lost)
        self._page = page
        self._pid, self._n_forks = os.getpid(), n_forks()
        self._lock = threading.Lock()
        self._pending = Pending(page)
        world = self.world.ledger_for(self)
        self._founding = self.watch.groups = Founding(self.watch, world)
        self._joining = self.watch.host = Joining(self, self._pending, self._lock)
        self.selection = Selection(settings)
        self._execution = Execution(self.watch, self.selection)
        self._of_all = self.world  # whatever the default group is
        self._n_serial = 0
        self._broken: RingcommError | None = None
        self.dropped = DroppedErrors()
        self._is_closed = False
        self.broke_while_leaving: RingcommError | None = None
        self.attached = Attached(self, self._pending, self._lock, self.progress)
        self._has_warned_of_names = False

    @property
    def rank(self) -> int:
        """Of this process in the default group."""
        return self.world.index

    @property
    def size(self) -> int:
        """Of the default group."""
        return self.world.size

    def set_default(self, group: Group) -> None:
        """Let a group, which this process is in, be the one that is meant where none is said."""
        self.world = group

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
        """Carry out one collective; blocks. Every rank of the group calls it.

        Args:
            kind: name of the collective, for a rank whose plan() fails.
            name: the user's name for it.
            plan: checks the arguments and says what to do. If it raises, this rank still takes
                part in the agreement, so that the others get a MismatchError instead of waiting.
            group: None: all ranks.
            timeout_s: deadline of this operation; None: RINGCOMM_TIMEOUT_S.
            is_once: the name will not come again, on any rank, so it is not worth keeping. It
                stands for the one that plan() has.

        Raises:
            TypeError, ValueError, ...: plan() raised, in the same way on every rank.
            MismatchError: ranks disagree; the same on every rank; the engine works on.
            PeerFailedError: a rank died or left.
            CommTimeoutError: a rank did not come within timeout_s.
            NotInitializedError: after shutdown(), or in a child of this rank.
        """
        result: R = self.complete(
            lambda: self._enqueue(
                kind, name, plan, group, is_awaited=True, timeout_s=timeout_s, is_once=is_once
            )
        )
        return result

    def take_place(self, ledger: Ledger, team: NodeTeam) -> int | None:
        """Return the place of an operation that does without a task; see executors/node.py.

        None: it cannot do without.
        """
        if self._is_closed or self._broken is not None or self._n_forks != n_forks():
            return None
        if self._needs_task:
            return None
        with self._lock:
            if not team.is_turn_of(ledger.next_place):
                return None
            return ledger.take_place()

    @property
    def _needs_task(self) -> bool:
        """True while none may be carried out without a task: it does more, or cannot go well."""
        if self.timeline is not None or self.selection.leaves_memory or self._joining.has_guests:
            return True
        return self.watch.peers.has_lost

    def lose_place(self, place: int | None, error: BaseException) -> None:
        """What was begun at this place ends with an error that the other ranks do not know.

        None: an interrupt came while it was taken, so it may be.
        """
        self._lose("an operation" if place is None else f"operation #{place}", error)

    def _lose(self, label: str, error: BaseException) -> None:
        if self._break(label, error):
            self.progress.lose(self._copy_of_broken)

    def adopt(
        self,
        place: int,
        step: NodeStep,
        plan: Plan[Any],
        group: Group,
        *,
        timeout_s: float | None = None,
    ) -> Task:
        """Let what was begun at this place of `group` be a task, for this thread to wait for."""
        ledger = group.ledger_for(self)
        return self._follow(
            step, plan, _Entry(group, ledger, ledger.unnamed(place), True, timeout_s)
        )

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
        """Begin one collective and return at once; see execute().

        Raises:
            TypeError: name is no text.
            ValueError: an operation of that name is pending, or this rank is not in the group.
            NotInitializedError, PeerFailedError, CommTimeoutError: the engine is unusable already.
        """
        self.progress.work_in_background()
        task = None
        try:
            task = self._enqueue(
                kind, name, plan, group, is_awaited=False, timeout_s=timeout_s, is_once=is_once
            )
            return Handle(self, task)
        except BaseException as error:
            self.lose_unless_over(task, error)
            raise

    def result_of(self, task: Task | CompletedTask, timeout_s: float | None = None) -> Any:
        """Return what a task comes to; see Handle.wait()."""
        if timeout_s is not None and not (isinstance(timeout_s, int | float) and timeout_s >= 0):
            raise ValueError(f"timeout_s is {timeout_s!r}; it must be a number of seconds >= 0")
        if not task.is_over:
            assert isinstance(task, Task)
            self._require_own_process()
            self._wait(task, math.inf if timeout_s is None else timeout_s)
        task.is_asked = True
        if isinstance(task.error, RingcommError):
            raise copy.copy(task.error) from task.error.__cause__  # each waiter has its traceback
        if task.error is not None:
            raise task.error
        return task.result.take() if isinstance(task.result, Deferred) else task.result

    def converse(
        self,
        label: str,
        members: tuple[int, ...],
        talk: Callable[[Task, int], TaskCoroutine],
        *,
        ticket: Ticket | None = None,
        is_awaited: bool = True,
        timeout_s: float | None = None,
    ) -> Task:
        """Begin to speak with other ranks about what no collective agrees on; see result_of().

        Args:
            label: "recv(source=3, tag=0)".
            members: the ranks of the job whose death ends it, this one among them.
            talk: returns what to do, given the task and a serial number of this rank's.
            ticket: what it is, alike on those ranks; None: no other rank knows it.
            is_awaited: this thread is going to wait for it.
            timeout_s: its deadline; None: RINGCOMM_TIMEOUT_S.
        """
        if not is_awaited:
            self.progress.work_in_background()
        self._require_own_process()
        is_begun = False
        try:
            with self._lock:
                self.require_usable()
                self._require_room()
                self._n_serial += 1
                if ticket is None:
                    base = base_of(NO_GROUP, f"rank {self.job_rank}")
                    ticket = Ticket(None, base, self._n_serial)
                task = Task(label, ticket, members)
                task.timeout_s = timeout_s
                is_begun = True
                task.start(talk(task, self._n_serial))
                self._pending.add(Work(task, None, ticket, 0), self.timeline)
                self.progress.submit(task, is_awaited=is_awaited)
        except BaseException as error:
            if is_begun:
                self._lose(label, error)
            raise
        return task

    def label_of(self, key: int) -> str:
        """Return the label of an operation that is pending."""
        return self._pending.get(key).task.label

    def team_of(
        self, context: int, members: tuple[int, ...], *, here: bool = False
    ) -> NodeTeam | None:
        """Return where these ranks of a group meet in shared memory, if all of them can.

        Args:
            context: of the group.
            members: its ranks.
            here: those on this node are meant, alone.
        """
        node, nodes = self._transport.node, self._transport.nodes
        if node is None:
            return None
        if here:
            members = tuple(rank for rank in members if nodes[rank] == nodes[self.job_rank])
        return node.team_or_none(context, members)

    def ranks_of(self, comm: Any) -> tuple[int, ...]:
        """Return the ranks of an mpi4py communicator. Raises ValueError if one is no rank here."""
        return self._transport.ranks_of(comm)

    def shared_memory(self, nbytes: int) -> Bytes | None:
        """Return memory that the ranks of this node map, None where nothing is shared."""
        self._require_own_process()
        node = self._transport.node
        return None if node is None else node.empty(nbytes)

    def shared_usage(self) -> tuple[int, int, int]:
        """Return bytes of it in use, kept for reuse, and in use at most."""
        node = self._transport.node
        return (0, 0, 0) if node is None else node.memory.usage()

    def found(self, group: Group) -> Ledger:
        """Return the ledger of a new group, agreed on by its members; blocks."""
        return self._founding.found(group, self)

    @property
    def n_entered_by_all(self) -> int:
        """How many operations in which all ranks take part this rank has begun."""
        return self._of_all.ledger_for(self).tally.n_entered

    def group_of(self, group_id: int) -> Group:
        """Return the group of this id.

        Raises:
            RingcommError: it is no more on this rank.
        """
        group = self._founding.group(group_id) if group_id else self._of_all
        if group is None:
            raise RingcommError(
                f"join(): another rank uses group {group_id}, which rank {self.job_rank} has "
                "dropped: keep a reference to it"
            )
        return group

    def join(self) -> int:
        """Stand in for this rank, which has no more work, until all ranks have joined; blocks.

        Returns:
            The last rank that joined, the same on all.
        """
        self.work_in_background()
        last: int = self.complete(self._joining.begin)
        return last

    def stand_in(
        self, call: Call, plan: Callable[[Group], Plan[Any]], group: Group
    ) -> Task | CompletedTask:
        """Begin this rank's part of an operation in which it has nothing to contribute."""
        return self._enqueue(
            call.kind, call.name, plan, group, is_awaited=False, is_once=call.is_once
        )

    def meet(self, version: str, table: str = "") -> None:
        """Return when every rank runs this version and its guardian watches; first call of all.

        Args:
            version: of ringcomm.
            table: on rank 0: what was measured on this topology; all ranks choose by it.

        Raises:
            MismatchError: ranks differ in their version, or in a setting that must be alike.
        """
        call = Call("init", settings=(f"ringcomm {version}", *self.settings.shared))

        async def share(t: Channel) -> None:
            text = await broadcast_bytes(table.encode(), 0, t)
            self.selection.table = Table.loads(text.decode()) if text else None

        self.execute("init", None, lambda _: Plan(call, 0, share))

    def shares_memory(self, group: Group) -> bool:
        """Return True if the ranks of `group` map each other's memory, as far as is known here."""
        node = self._transport.node
        is_one = len(set(group.ranks.nodes)) == 1 and group.size > 1
        return node is not None and is_one and (group.team is not None or group.rank is None)

    @property
    def implementation(self) -> str:
        """What carries the messages: "Open MPI v5.0.11"."""
        return self._transport.implementation

    @property
    def is_threaded(self) -> bool:
        """True if operations advance while Python computes."""
        return self._transport.is_threaded

    def note_step(self, step: int) -> None:
        """Write the number of completed training steps to the status page."""
        if self._page is not None:
            self._page.set_step(step)

    def record(self, timeline: Timeline | None) -> None:
        """Record operations from now on in `timeline`, or nowhere; closes the one before."""
        before, self.timeline = self.timeline, timeline
        if before is not None:
            before.close()

    @property
    def transport(self) -> Transport:
        """The wire, for services; only their poll() may use it."""
        return self._transport

    def nudge(self) -> None:
        """Let services be polled, at once if nobody drives; any thread."""
        self.require_usable()
        self.progress.nudge()

    def run_until(
        self,
        is_enough: Callable[[], bool],
        *,
        is_done: Callable[[], bool] | None = None,
        timeout_s: float = math.inf,
    ) -> None:
        """Drive in this thread until is_enough(), or until another that drives has done it.

        See Progress.run_until().

        Raises:
            RingcommError: the engine cannot be used any more.
        """
        self.require_usable()
        self.progress.run_until(is_enough, is_done=is_done, timeout_s=timeout_s)
        if self._broken is not None:
            raise self._copy_of_broken()

    @property
    def is_own_turn(self) -> bool:
        """See Progress.is_own_turn."""
        return self.progress.is_own_turn

    def work_in_background(self) -> None:
        """Let this rank answer others, and operations advance, while it computes."""
        self.progress.work_in_background()

    def leave(self, how: str, *, keeps_wire: bool = False) -> bool:
        """Complete what was started and say that this rank takes part in nothing more.

        Returns when no other rank does. There is no deadline: a rank may evaluate for hours after
        the others are done, but a warning says for whom this one waits. Whoever needs this rank
        after all gets a PeerFailedError, and a death ends this wait. An engine that is unusable
        does not wait.

        Args:
            how: "called shutdown()".
            keeps_wire: an engine that has_waited_in_vain is not closed, so that it can still
                see_others_leave().

        Returns:
            True if every rank left in order, so that MPI can be finalized.
        """
        if self._is_closed or self._n_forks != n_forks():
            return False
        unsaid = self.attached.say_goodbye()
        with self._lock:
            self._is_closed = True
        was_broken = self._broken is not None
        while tasks := self._pending.tasks():  # some leave others behind; see Attached.follow_up()
            for task in tasks:
                self.progress.wait(task)
        self.broke_while_leaving = unsaid if was_broken else self._broken or unsaid
        self.progress.stop(self._copy_of_broken)
        self._set_state(State.LEAVING)
        self.record(None)
        self.watch.announce_left(how)
        if self._broken is None:
            self.progress.run_until(Farewell(self.watch, self.settings).is_over)
        is_clean = self._broken is None and not self.watch.peers.dead
        if not (keeps_wire and self.has_waited_in_vain):
            self.close(is_clean=is_clean)
        return is_clean

    @property
    def has_waited_in_vain(self) -> bool:
        """True if that is all that went wrong: no rank is known to have failed."""
        is_others_fault = isinstance(self._broken, CommTimeoutError | PeerFailedError)
        has_failed = self.watch.own_failure is not None or bool(self.watch.peers.dead)
        return is_others_fault and not has_failed

    def see_others_leave(self) -> None:
        """Return once all other ranks have left; after leave(keeps_wire=True), and before close().

        Raises:
            CommTimeoutError: some have not within RINGCOMM_TIMEOUT_S.
            PeerFailedError: one died or failed meanwhile.
        """
        limit_s, peers = self.settings.timeout_or_inf, self.watch.peers
        self.progress.run_until(Farewell(self.watch, self.settings, limit_s).is_over)
        for rank, reason in peers.dead.items():
            raise PeerFailedError(
                f"init: {self.watch.transport.label(rank)} {reason}, so the ranks cannot begin "
                "anew. End this job",
                rank=rank,
                reason=reason,
            )
        if peers.still_here:
            raise CommTimeoutError(
                f"init: rank {self.rank} has waited {limit_s:g} s for ranks that have not called "
                f"shutdown(): {', '.join(map(str, peers.still_here))}. After an error all ranks "
                "call shutdown() before they can init() again. End this job if they cannot",
                missing=peers.still_here,
            )

    def close(self, *, is_clean: bool) -> None:
        """Free what MPI and the wire hold for this engine.

        Args:
            is_clean: all ranks do, and no message is under way.
        """
        self.attached.close(is_clean=is_clean)
        self._transport.close(is_clean=is_clean)
        self.world.quick = None
        self.watch.whereabouts = self.watch.host = self.watch.groups = (
            None  # no cycle may keep the page's descriptor
        )
        self.progress.close()

    def stop(self) -> None:
        """End the thread in the background and what is under way: this rank has failed."""
        if self._broken is None:
            self._broken = RingcommError("this rank has failed, so its operations were broken off")
        self.progress.stop(self._copy_of_broken)

    def has_entered(self, key: int, base: int, number: int) -> bool:
        """Return True if this rank is, or was, in that operation; see Whereabouts."""
        if key in self._pending:
            return True
        if self.attached.has_entered(base, number):
            return True
        return self._founding.has_entered(base, number)

    def is_in(self) -> str:
        """Return the label of the oldest operation that is pending, "" if there is none."""
        return self._pending.oldest()

    def complete(self, begin: Callable[[], Task | CompletedTask]) -> Any:
        """Begin a task of which nobody has a handle, and return what it comes to; blocks."""
        task = None
        try:
            task = begin()
            return self.result_of(task)
        except BaseException as error:
            self.lose_unless_over(task, error)
            raise

    def lose_unless_over(self, task: Task | CompletedTask | None, error: BaseException) -> None:
        """Take note of what ended the wait for a task; None: it did not begin."""
        if task is not None and not task.is_over:  # interrupted
            self._on_lost(error)

    def _enqueue(
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
        self._require_own_process()
        self.require_usable()
        group = group_of(group, self)
        _require_name(name)
        ledger = group.ledger_for(self)
        ready, problem = _try(kind, name, group, plan)
        if is_once:
            ready = replace(ready, call=replace(ready.call, name=name, is_once=True))
        has_place = False
        try:
            with self._lock:
                self.require_usable()
                self._require_room()
                ledger.require_free(ready.call.name)
                has_place = True
                ticket = ledger.enter(ready.call.name, is_once=is_once)
                entry = _Entry(group, ledger, ticket, is_awaited, timeout_s)
                is_one_step = problem is None and self._is_one_step(ready, entry)
                if not is_one_step:
                    task = self._make_task(ready, entry, problem)
            if is_one_step:
                return self._take_step(ready, entry)
            begins_here = group.team is not None or group.size == 1
            self.progress.begin(task, is_awaited=is_awaited, at_once=begins_here)
        except BaseException as error:
            if has_place:  # an interrupt, or no memory: others wait for what was begun here
                self._lose(ready.call.label(ledger.next_place - 1), error)
            raise
        return task

    def _is_one_step(self, plan: Plan[Any], entry: _Entry) -> bool:
        """Return True if all that an operation comes to is one step, which it can take now."""
        team, ticket = entry.group.team, entry.ticket
        if plan.step is None or team is None:
            return False
        if self._needs_task:
            return False
        if ticket.name is None:
            return team.is_turn_of(ticket.number)
        return entry.ledger.is_cached(ticket)

    def _take_step(self, plan: Plan[R], entry: _Entry) -> Task | CompletedTask:
        """Carry out the one step of an operation; only what is not over at once becomes a task."""
        ledger, ticket, team = entry.ledger, entry.ticket, entry.group.team
        assert team is not None
        assert plan.step is not None
        assert plan.finish is not None
        slot = ledger.slot(ticket, ledger.proposal(ticket))
        assert slot is not None
        step = plan.step.begin(Meeting(team, slot, plan.call.fingerprint))
        is_over = step.is_over or step.drive(team.moment_s if entry.is_awaited else 0.0)
        if is_over and step.agrees and not step.fault:
            result = plan.finish(None)
            with self._lock:
                ledger.finish(ticket)
                end_turn(team, ticket)
            label = partial(_label, plan.call, ticket, entry.group, self.world)
            return CompletedTask(result, ticket.number, label)
        return self._follow(step, plan, entry)

    def _follow(self, step: NodeStep, plan: Plan[Any], entry: _Entry) -> Task:
        """Return a task that carries on with a step that was begun."""
        finish = plan.finish
        assert finish is not None

        async def run(t: Channel) -> Any:
            await t.follow(step, plan)
            return finish(t)

        with self._lock:
            task = self._make_task(Plan(plan.call, plan.nbytes, run), entry)
        self.progress.begin(task, is_awaited=entry.is_awaited, at_once=True)
        return task

    def _make_task(self, plan: Plan[Any], entry: _Entry, problem: Exception | None = None) -> Task:
        """Return a task that is pending; the lock is held."""
        group, ledger, ticket, is_awaited, timeout_s = entry
        task = Task(_label(plan.call, ticket, group, self.world), ticket, group.ranks)
        task.timeout_s = timeout_s
        task.needs_admission = (
            ticket.name is None and timeout_s is None
        )  # else it has its own deadline
        work = Work(task, ledger, ticket, plan.nbytes, plan.call, problem, group, is_awaited)
        self._launch(work, plan)
        return task

    def _launch(self, work: Work, plan: Plan[Any]) -> None:
        """Give a task what it is to do; the lock is held."""
        try:
            self._pending.add(work, self.timeline)
            work.task.start(*self._execution.coroutines(work, plan))
            self._joining.invite(work)
        except BaseException as error:  # its place is taken, and others will wait for it
            self._pending.remove(work.ticket.key, has_failed=True)
            work.task.stop()
            work.task.error, work.task.is_over = error, True
            if self._break(work.task.label, error):
                self.progress.lose(self._copy_of_broken)
            raise

    def _wait(self, task: Task, limit_s: float) -> None:
        """Return once the task is over; ask who is missing before giving up on it for now."""
        try:
            if self.progress.wait(task, limit_s):
                return
            missing: list[int] = []
            text = f"{task.label}: is not over"
            if limit_s > 0:
                ask_around(task, self.watch)
                if self.progress.wait(task, min(ANSWER_S, limit_s)):
                    return
                text = describe_wait(task, self.watch, limit_s)
                missing = self.watch.peers.missing(task.key, task.members)
        except BaseException as error:  # an interrupt, or the wire broke
            task.is_asked = True
            self._on_lost(error)
            raise
        raise CommTimeoutError(
            f"{text} The timeout of this wait is over. It is still under way, and the engine works "
            "on: wait again, or pass a larger timeout_s.",
            missing=missing,
        )

    def _require_own_process(self) -> None:
        if self._n_forks != n_forks():
            raise NotInitializedError(
                f"this process (pid {os.getpid()}) is a child of rank {self.job_rank} "
                f"(pid {self._pid}); only the rank itself can communicate. Do it there, and hand "
                "the result to the child"
            )

    def require_usable(self) -> None:
        """Raise what an operation would, if it was shut down or is broken."""
        if self._is_closed:
            raise NotInitializedError("ringcomm was shut down: call ringcomm.init() again first")
        if self._broken is not None:
            self.require_unbroken()

    @property
    def is_broken(self) -> bool:
        """True once it cannot be used any more."""
        return self._broken is not None

    def require_unbroken(self) -> None:
        """Raise what ended the engine, if anything did."""
        if self._broken is not None:
            raise copy.copy(self._broken) from self._broken

    def _require_room(self) -> None:
        if len(self._pending) >= MAX_PENDING:
            raise RingcommError(
                f"{len(self._pending)} operations are pending on rank {self.job_rank}, which is "
                "the limit: wait for some of their handles first"
            )

    def _on_over(self, task: Task, error: BaseException | None) -> None:
        """Take note that a task is over, and decide whether the engine survives its error."""
        try:
            with self._lock:
                work = self._pending.get(task.key)
                if work.ledger is not None:
                    work.ledger.finish(work.ticket)
                    self._warn_of_names(work.ledger)
                is_fatal = error is not None and not _is_harmless(work, error)
                if work.lane is not None:
                    work.lane.end(_outcome(work, error, is_fatal=is_fatal))
                self._pending.remove(task.key, has_failed=is_fatal)
            self.watch.peers.forget(task.key)
        finally:
            task.error = error
            task.is_over = True
            task.call_back()
        if error is not None and is_fatal and self._break(task.label, error):
            self.progress.fail_all(self._copy_of_broken)
        elif task.is_dropped and error is not None:
            self.dropped.warn(error)

    def lose(self, error: BaseException) -> None:
        """Be unusable: an interrupt, or the like, has left something half done; any thread."""
        self._on_lost(error)

    def _on_lost(self, error: BaseException) -> None:
        """An interrupt, or the wire broke while no task is to blame: end them all."""
        if self._break(self.is_in() or "ringcomm", error):
            self.progress.lose(self._copy_of_broken)

    def _break(self, label: str, error: BaseException) -> bool:
        """Let the engine be unusable and tell the others; False if it was so before."""
        if self._broken is not None:
            return False
        self._broken = _lasting(label, error)
        if isinstance(error, PeerFailedError):
            self.watch.announce_broken(error.rank, error.reason)
        elif not isinstance(error, CommTimeoutError):
            self.watch.announce_failed(self.job_rank, f"broke off {label}: {_text_of(error)}")
        if self._transport.node is not None:
            self._transport.node.abandon()  # behind the words: who meets with it knows why by then
        return True

    def _copy_of_broken(self) -> RingcommError:
        return copy.copy(self._broken or RingcommError("the engine is unusable"))

    def _warn_of_names(self, ledger: Ledger) -> None:
        if ledger.has_overflown and not self._has_warned_of_names and self.job_rank == 0:
            _log.warning(
                "more than %d names are in use: further ones cost a round of agreement each time. "
                "Names that are new in every call, with a step number in them, do that.",
                MAX_CACHED,
            )
            self._has_warned_of_names = True

    def _set_state(self, state: State) -> None:
        if self._page is not None:
            self._page.set_state(state)


def _is_harmless(work: Work, error: BaseException) -> bool:
    """Return True if all agreed on the error, or share it: no message is left over."""
    return isinstance(error, MismatchError | ConfigError) or error is work.problem


def _lasting(label: str, error: BaseException) -> RingcommError:
    """Return what every later call raises."""
    if isinstance(error, RingcommError):
        return error
    return RingcommError(
        f"{label}: was broken off by {_text_of(error)}; the engine cannot be "
        "used any more. End this job"
    )


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _outcome(work: Work, error: BaseException | None, *, is_fatal: bool) -> str:
    if error is None:
        return "done"
    return "failed" if is_fatal else "refused" if error is work.problem else "mismatch"


def _label(call: Call, ticket: Ticket, group: Group, world: Group) -> str:
    label = call.label(ticket.number)
    return label if group is world else f"{label} of {group!r}"


def _try(
    kind: str, name: str | None, group: Group, plan: Callable[[Group], Plan[R]]
) -> tuple[Plan[R], Exception | None]:
    try:
        ready = plan(group)
        _ = ready.call.fingerprint  # what cannot be packed is told like a bad argument
        return ready, None
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
        call = Call(kind, name, error=f"{type(error).__name__}: {error}")
        return Plan(call, 0, _never_run), error


def _require_name(name: object) -> None:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a str or None, not {name!r}")


async def _never_run(_: Channel) -> Any:
    raise AssertionError("a call that could not be planned must not run")
