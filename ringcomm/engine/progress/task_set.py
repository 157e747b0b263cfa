"""All tasks that are under way, and the services; the driver advances both."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from ringcomm._core import WireFault
from ringcomm.config import Settings
from ringcomm.engine.progress.deadlines import Patience, refuse_hopeless
from ringcomm.engine.progress.driver_turn import Turn
from ringcomm.engine.progress.pending_limit import Admission
from ringcomm.engine.progress.task import Task
from ringcomm.errors import RingcommError
from ringcomm.transport.control_messages import Watch

_CONFIRM_S = 2.0  # after a refused message: how long news of a death may take


class Service(Protocol):
    """Work besides operations, such as the requests of a server; see Progress.attach()."""

    def poll(self, *, only_news: bool = False) -> bool:
        """Work without waiting; return True if anything moved. only_news: do not use the wire."""

    @property
    def has_news(self) -> bool:
        """True if something has come by another way than the wire."""

    @property
    def is_busy(self) -> bool:
        """True while the service waits for something, so that it must be polled."""

    @property
    def is_streaming(self) -> bool:
        """True while a long message is under way, whose bytes move when the wire is polled."""


class TaskSet:
    """Tasks and services; any thread may add one, the driver does the rest."""

    def __init__(
        self,
        watch: Watch,
        settings: Settings,
        on_over: Callable[[Task, BaseException | None], None],
        turn: Turn,
    ) -> None:
        self._watch = watch
        self._settings = settings
        self.on_over = on_over  # called once per task; it sets task.is_over
        self._turn = turn
        self._next_warning = -math.inf
        self.inbox: deque[Task] = deque()  # tasks that the driver has not seen yet
        self.services: tuple[Service, ...] = ()
        self.failure: Callable[[], RingcommError] | None = None  # makes the errors of all tasks
        # In the order in which they began, each with the Patience of its present wait.
        self._tasks: dict[Task, Patience | None] = {}
        self._admission = Admission[Task]()

    @property
    def has_work(self) -> bool:
        if self._tasks or self.inbox:
            return True
        return any(service.is_busy for service in self.services)

    @property
    def is_patient(self) -> bool:
        tasks = (*self._tasks, *self.inbox)
        if not tasks or not all(task.is_patient for task in tasks):
            return False
        return not any(service.is_busy for service in self.services)

    @property
    def is_streaming(self) -> bool:
        return any(service.is_streaming for service in self.services)

    def waits_in_cpp(self) -> bool:
        """Return True if C++ alone advances what is under way, and wakes a thread at its end."""
        for task in (*self._tasks, *self.inbox):
            if not task.waits_in_cpp:
                return False
        return not any(service.is_busy for service in self.services)

    def take_news(self) -> bool:
        """Poll only services that have news, which is cheap; return True if anything moved."""
        has_moved = False
        for service in self.services:
            if service.has_news:
                has_moved |= service.poll(only_news=True)
        if has_moved:
            self._notify_watchers()
        return has_moved

    def advance(self) -> bool:
        """Advance everything as far as possible without waiting; return True if anything moved."""
        self._admit()
        if self.failure is not None:
            self.fail_all(self.failure)
        self._watch.poll()
        has_moved = False
        for service in self.services:
            has_moved |= service.poll()
        if has_moved:
            self._notify_watchers()
        for task in tuple(self._tasks):
            if task.fault is not None or task.is_over:
                continue
            try:
                if task.advance():
                    has_moved = True
                    self._tasks[task] = None
            except WireFault as fault:
                task.stop()
                task.fault = fault
                task.fault_until = time.monotonic() + _CONFIRM_S
            except BaseException as error:
                self._finish(task, error)
                if not isinstance(error, Exception):
                    raise
            else:
                if not task.has_work:
                    self._finish(task, None)
        return has_moved

    def look_around(self, now: float) -> None:
        """End the tasks that cannot complete; warn of those that take long."""
        for task, known in tuple(self._tasks.items()):
            if task.is_over:
                continue
            patience = known or Patience(task, self._watch, self._settings, self._may_warn, now)
            self._tasks[task] = patience
            try:
                if task.fault is None:
                    patience.check(now)
                refuse_hopeless(task, self._watch, task.fault)
            except RingcommError as error:
                self._finish(task, None if self._completes(task) else error)
            else:
                if now >= task.fault_until:
                    self._finish(task, _refused(task))

    def fail_all(self, make: Callable[[], RingcommError]) -> None:
        """End every task, also those that come later, each with an error of its own."""
        self.failure = make
        self._admit()
        self._tasks.update(dict.fromkeys(self._admission.admit_all()))
        for task in tuple(self._tasks):
            self._finish(task, make())

    def _notify_watchers(self) -> None:
        if self._turn.n_watching:
            with self._turn.lock:
                self._turn.notify_watchers()

    def _admit(self) -> None:
        while self.inbox:
            task = self.inbox.popleft()
            if task.is_over or (task.needs_admission and not self._admission.may_begin(task)):
                continue
            self._tasks[task] = None
            if self._watch.peers.has_lost:
                try:
                    refuse_hopeless(task, self._watch)
                except RingcommError as error:
                    self._finish(task, error)

    def _finish(self, task: Task, error: BaseException | None) -> None:
        if task.is_over:
            return
        task.stop()
        del self._tasks[task]
        successor = self._admission.leave(task) if task.needs_admission else None
        if successor is not None:
            self._tasks[successor] = None
        self.on_over(task, error)
        if self._turn.waiting:
            with self._turn.lock:
                self._turn.lock.notify_all()

    def _may_warn(self, now: float) -> bool:
        if now < self._next_warning:
            return False
        self._next_warning = now + self._settings.stall_warning_or_inf
        return True

    def _completes(self, task: Task) -> bool:
        """Return True if the task can complete: ranks that are gone had done their part before."""
        if task.fault is not None:
            return False
        self._watch.transport.loop.settle()
        try:
            while task.advance():
                pass
        except Exception:  # noqa: BLE001 - the caller reports a better reason
            return False
        return not task.has_work


def _refused(task: Task) -> RingcommError:
    error = RingcommError(
        f"{task.label}: the wire refused a message and no rank is known to be dead: "
        f"{task.fault}. The engine cannot be used any more; end this job."
    )
    error.__cause__ = task.fault
    return error
