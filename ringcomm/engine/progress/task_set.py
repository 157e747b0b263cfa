"""The tasks that are under way and the services, advanced all together."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from ringcomm.config import Settings
from ringcomm.engine.progress.admission import Admission
from ringcomm.engine.progress.deadlines import Patience, Warnings, refuse_hopeless
from ringcomm.engine.progress.task import Task
from ringcomm.engine.progress.turn import Turn
from ringcomm.errors import RingcommError
from ringcomm.transport.base import WireFault
from ringcomm.transport.watch import Watch

_CONFIRM_S = 2.0  # time for a refused message to turn out as a death


class Service(Protocol):
    """Something that a rank does for others besides its operations; see Progress.attach()."""

    def poll(self, *, only_news: bool = False) -> bool:
        """Do what can be done without waiting, only_news: without the wire; True if it moved."""

    @property
    def has_news(self) -> bool:
        """True if something came without the wire."""

    @property
    def is_busy(self) -> bool:
        """True while something is awaited, so that polls must not cease."""


class TaskSet:
    """Tasks and services, for the thread that drives; any thread may add to them."""

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
        self._warnings = Warnings(settings)
        self.inbox: deque[Task] = deque()  # those that have not begun
        self.services: tuple[Service, ...] = ()
        self.failure: Callable[[], RingcommError] | None = None  # makes the error that ends all
        self._tasks: dict[Task, None] = {}  # in the order in which they began
        self._admission = Admission[Task]()

    @property
    def has_work(self) -> bool:
        """True while something is to be looked at again."""
        if self._tasks or self.inbox:
            return True
        return any(service.is_busy for service in self.services)

    def waits_in_cpp(self) -> bool:
        """Return True if C++ wakes who is to take note of the end of all that is under way."""
        for task in (*self._tasks, *self.inbox):
            if not task.waits_in_cpp:
                return False
        return not any(service.is_busy for service in self.services)

    def take_news(self) -> bool:
        """Poll services for what C++ has for them alone: a look at the wire costs more."""
        has_moved = False
        for service in self.services:
            if service.has_news:
                has_moved |= service.poll(only_news=True)
        if has_moved:
            self._notify_watchers()
        return has_moved

    def advance(self) -> bool:
        """Go on with everything as far as possible without waiting; return True if it moved."""
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
                has_moved |= task.advance()
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
        for task in tuple(self._tasks):
            if task.is_over:
                continue
            if task.patience is None:
                task.patience = Patience(task, self._watch, self._settings, self._warnings, now)
            try:
                if task.fault is None:
                    task.patience.check(now)
                refuse_hopeless(task, self._watch, task.fault)
            except RingcommError as error:
                self._finish(task, None if self._completes(task) else error)
            else:
                if now >= task.fault_until:
                    self._finish(task, _refused(task))

    def fail_all(self, make: Callable[[], RingcommError]) -> None:
        """End every task, those that come too, each with an error of its own."""
        self.failure = make
        self._admit()
        self._tasks.update(dict.fromkeys(self._admission.give_up()))
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
                self._refuse_hopeless(task)

    def _refuse_hopeless(self, task: Task) -> None:
        """End a task that has done nothing yet if it cannot complete."""
        try:
            refuse_hopeless(task, self._watch)
        except RingcommError as error:
            self._finish(task, error)

    def _finish(self, task: Task, error: BaseException | None) -> None:
        if task.is_over:
            return
        task.stop()
        del self._tasks[task]
        after = self._admission.leave(task) if task.needs_admission else None
        if after is not None:
            self._tasks[after] = None
        self.on_over(task, error)
        if self._turn.waiting:
            with self._turn.lock:
                self._turn.lock.notify_all()

    def _completes(self, task: Task) -> bool:
        """Return True if a rank that is gone had done its part of the task before."""
        if task.fault is not None:
            return False
        self._watch.transport.loop.settle()
        try:
            while task.advance():
                pass
        except Exception:  # noqa: BLE001 - why it cannot complete is known, and says more
            return False
        return not task.has_work


def _refused(task: Task) -> RingcommError:
    error = RingcommError(
        f"{task.label}: the wire refused a message and no rank is known to be dead: "
        f"{task.fault}. The engine cannot be used any more; end this job."
    )
    error.__cause__ = task.fault
    return error
