"""Advances the operations in flight: the one loop in which this library waits.

Test what is waited for, back off, and every few polls look around: control messages, deaths, the
deadline. So a rank that waits for a live one hears of a third's death, and no wait outlasts
RINGCOMM_TIMEOUT_S. One thread at a time drives the loop: whoever waits for an operation, or, while
nobody does, a thread of ours. It is woken by what is submitted; there is no cycle.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

from ringcomm.config import Settings
from ringcomm.engine.progress.admission import Admission
from ringcomm.engine.progress.deadlines import Patience, Warnings, refuse_hopeless
from ringcomm.engine.progress.task import Task
from ringcomm.engine.progress.turn import Mark, is_own_turn, refuse_own_turn
from ringcomm.errors import RingcommError
from ringcomm.transport.base import WireFault
from ringcomm.transport.watch import Watch

_SPINS = 64  # polls before the first nap of a thread that waits
_BACKGROUND_SPINS = 4  # of the thread that works beside the user's
_CPP_SPINS = 1  # of either while C++ advances something: it looks more closely than Python can
_LOOK_EVERY = 16
# A nap of 20 us burns 26-38 % of a core, 1 ms 2-4 %, 5 ms 1 % (measured, ci/idle.py). So naps grow
# to 1 ms at once, and from there on to 5 ms, half a percent of the time waited so far.
_NAP_S, _LONG_NAP_S, _LONGEST_NAP_S = 20e-6, 1e-3, 5e-3
_NAP_SHARE = 1 / 200
# The end of what is in C++, a death and wake() end a nap there: no more than news of other kinds is
# late. A pass through this loop after a nap takes 100-200 us, for the caches are cold by then.
_LONGEST_CPP_NAP_S, _CPP_NAP_SHARE = 20e-3, 1 / 20
_PASS_SHARE = 20  # a look at hundreds of operations takes long: naps are 20 times longer
_IDLE_LOOK_S = 0.2  # an idle rank answers who asks where it is, and hears of deaths
_CONFIRM_S = 2.0  # time for a refused message to turn out as a death


class Service(Protocol):
    """What a rank does for others beside its operations; see Progress.attach()."""

    def poll(self, *, only_news: bool = False) -> bool:
        """Do what can be done without waiting; return True if anything moved.

        Args:
            only_news: leave the wire alone, and take what has_news speaks of.
        """
        ...

    @property
    def has_news(self) -> bool:
        """True if something came without the wire."""
        ...

    @property
    def is_busy(self) -> bool:
        """True while something is awaited, so that polls must not cease."""
        ...


class Progress:
    """Drives the tasks of one engine.

    Args:
        watch: the control channel.
        settings: deadlines.
        on_over: called once per task, by the driving thread, with its error or None; it sets
            task.is_over.
        on_lost: called when driving itself has failed: an interrupt, or a wire that is broken.
    """

    def __init__(
        self,
        watch: Watch,
        settings: Settings,
        on_over: Callable[[Task, BaseException | None], None],
        on_lost: Callable[[BaseException], None],
    ) -> None:
        self._watch = watch
        self._transport = watch.transport
        self._loop = watch.transport.loop
        self._settings = settings
        self._on_over = on_over
        self._on_lost = on_lost
        self._warnings = Warnings(settings)
        self._inbox: deque[Task] = deque()
        self._tasks: dict[Task, None] = {}  # in the order in which they began
        self._admission = Admission[Task]()
        self._services: tuple[Service, ...] = ()
        self._turn = threading.Condition()
        self._driver: Mark | None = None  # of the thread whose turn it is
        self._waiting: set[Mark] = set()  # of threads that wait for a task
        self._n_watching = 0  # threads that look by themselves for what they wait for
        self._n_news = 0  # changes whenever they are to look
        self._failure: Callable[[], RingcommError] | None = None
        self._is_stopping = False
        self._thread: threading.Thread | None = None

    def submit(self, task: Task, *, is_awaited: bool) -> None:
        """Begin a task; any thread. If this thread is going to wait for it, no other is woken."""
        self._inbox.append(task)
        if task.waits_in_cpp:
            return  # it advances there, which wakes who is to take note of its end
        with self._turn:
            if self._driver is not None:
                self._wake()
            elif not is_awaited:
                self._loop.wake()

    def begin(self, task: Task, *, is_awaited: bool, at_once: bool) -> None:
        """Begin a task; see submit().

        Args:
            task: the task.
            is_awaited: see submit().
            at_once: advance it first in this thread: it begins in shared memory, and may be over
                in microseconds.
        """
        if at_once and not self._watch.peers.has_lost:
            try:
                task.advance()
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                task.start(_raise(error))  # who drives decides what it means
            if not task.has_work:
                self._on_over(task, None)
                return
        self.submit(task, is_awaited=is_awaited)

    def attach(self, service: Service) -> None:
        """Let whoever drives poll a service, too; its errors end everything, as a broken wire."""
        self._services = (*self._services, service)

    def nudge(self) -> None:
        """Let services be polled: at once in this thread if nobody drives, else soon.

        Waking another thread costs 10 to 30 us, a poll less.
        """
        mark = Mark()
        with self._turn:
            if self._driver is not None:
                self._wake()
                self._tell_watchers()
                return
            self._driver = mark
        self._take_part(mark, self._advance)

    def work_in_background(self) -> None:
        """From now on tasks advance while nobody waits, if the wire allows a second thread."""
        if self._thread is None and self._transport.is_threaded and not self._is_stopping:
            self._thread = threading.Thread(target=self._run, name="ringcomm", daemon=True)
            self._thread.start()
        if self._transport.is_threaded:
            self._loop.start_thread()

    def wait(self, task: Task, timeout_s: float = math.inf) -> bool:
        """Return True once the task is over, False after timeout_s; any thread.

        An exception that comes out of this, such as KeyboardInterrupt, leaves the turn to others.

        Raises:
            RingcommError: this thread is driving, and would wait for itself.
        """
        if task.is_over:
            return True
        if timeout_s > 0:
            refuse_own_turn(self._driver, task.label)
        deadline = time.monotonic() + timeout_s
        mark = Mark()
        try:
            with self._turn:
                self._waiting.add(mark)
                if self._driver is not None:
                    self._wake()
            while self._take_turn(mark, task, deadline):
                self._take_part(mark, partial(self._drive, _end_of(task, deadline), _SPINS))
            return task.is_over
        finally:
            try:
                self._step_back(mark)
            finally:
                self._step_back(mark)  # again, for an interrupt may have ended the first

    def run_until(
        self,
        is_enough: Callable[[], bool],
        *,
        is_done: Callable[[], bool] | None = None,
        timeout_s: float = math.inf,
    ) -> None:
        """Drive in this thread until is_enough(), or until another thread that drives has done it.

        Args:
            is_enough: asked again and again, by this thread while it drives.
            is_done: asked while another thread drives, whenever something has moved; any thread may
                ask it, at any time. None: this thread waits for its turn.
            timeout_s: return after so long in any case.

        Raises:
            RingcommError: this thread is driving, and would wait for itself.
        """
        refuse_own_turn(self._driver, "run_until()")
        deadline = time.monotonic() + timeout_s
        mark = Mark()
        try:
            with self._turn:
                self._waiting.add(mark)
                is_free = self._driver is None
                if is_free:
                    self._driver = mark
                else:
                    self._wake()
            if is_free or self._take_turn_unless(mark, is_done or _never, deadline):
                drive = partial(self._drive, _or_late(is_enough, deadline), _SPINS)
                self._take_part(mark, drive)
        finally:
            self._step_back(mark)

    @property
    def is_own_turn(self) -> bool:
        """True in the thread that drives, as in a callback: it must not wait."""
        return is_own_turn(self._driver)

    def fail_all(self, make: Callable[[], RingcommError]) -> None:
        """End every task, those that come too, each with an error of its own; for the driver."""
        self._failure = make
        self._admit()
        self._tasks.update(dict.fromkeys(self._admission.give_up()))
        for task in tuple(self._tasks):
            self._finish(task, make())

    def lose(self, make: Callable[[], RingcommError]) -> None:
        """Let whoever drives next fail_all(); any thread."""
        self._failure = make
        with self._turn:
            self._wake()
            self._turn.notify_all()

    def stop(self, make: Callable[[], RingcommError]) -> None:
        """End the thread, and the tasks that are not over."""
        with self._turn:
            self._is_stopping = True
            self._turn.notify_all()
        self._wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)
        self._failure = make
        if self._driver is None:
            self.fail_all(make)

    def close(self) -> None:
        """Forget the engine; nothing is submitted any more."""
        self._on_over, self._on_lost, self._failure = _ignore_task, _ignore_error, None

    def _take_turn(self, mark: Mark, task: Task, deadline: float) -> bool:
        """Return True if this thread is to drive now, False if it need not wait any more."""
        with self._turn:
            while not task.is_over:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                if self._driver is None:
                    self._driver = mark
                    return True
                self._turn.wait(None if left == math.inf else left)
        return False

    def _take_turn_unless(self, mark: Mark, is_done: Callable[[], bool], deadline: float) -> bool:
        """Return True if this thread is to drive now, False if it is done, or too late."""
        n_seen = -1
        with self._turn:
            self._n_watching += 1
        try:
            while not is_done():  # without the lock, for it may take others
                with self._turn:
                    left = deadline - time.monotonic()
                    while self._driver is not None and self._n_news == n_seen and left > 0:
                        self._turn.wait(None if left == math.inf else left)
                        left = deadline - time.monotonic()
                    if self._driver is None:
                        self._driver = mark
                        return True
                    if left <= 0:
                        return False
                    n_seen = self._n_news
            return False
        finally:
            with self._turn:
                self._n_watching -= 1

    def _tell_watchers(self) -> None:
        """Let threads look that wait for something other than a task; with the lock."""
        if self._n_watching:
            self._n_news += 1
            self._turn.notify_all()

    def _take_part(self, mark: Mark, drive: Callable[[], object]) -> None:
        """Drive; the turn is this thread's, and is given back."""
        try:
            drive()
        except BaseException as error:
            self._on_lost(error)
            if self._failure is not None:
                self.fail_all(self._failure)
            raise
        finally:
            with self._turn:
                if self._driver is mark:
                    self._driver = None
                self._hand_over()

    def _step_back(self, mark: Mark) -> None:
        with self._turn:
            self._waiting.discard(mark)
            if self._driver is mark:
                self._driver = None
            self._hand_over()

    def _hand_over(self) -> None:
        """Wake who may drive now; nobody if there is nothing to do, for waking costs 10 us."""
        if self._waiting:
            self._turn.notify_all()
            return
        self._loop.yield_turn()
        if not self._waits_in_cpp:
            self._loop.wake()

    def _run(self) -> None:
        """Drive while there is something to do and nobody who waits does it."""
        mark, looked_at = Mark(), -math.inf
        while True:
            with self._turn:
                is_idle = not (self._is_stopping or self._is_mine())
            if is_idle:
                self._loop.await_news(_IDLE_LOOK_S)
            with self._turn:
                if self._is_stopping:
                    return
                if self._driver is not None or self._waiting:
                    continue
                self._driver = mark
            # Even with nothing to do a look is taken now and then: others ask where this rank is.
            now = time.monotonic()
            is_due = now - looked_at >= _IDLE_LOOK_S
            looked_at, looks = now if is_due else looked_at, itertools.count(not is_due)
            # What goes wrong is told to all tasks; nobody waits here.
            with contextlib.suppress(BaseException):
                is_enough = partial(self._is_done, looks)
                self._take_part(mark, partial(self._drive, is_enough, _BACKGROUND_SPINS))

    def _is_done(self, looks: Iterator[int]) -> bool:
        return next(looks) > 0 and not self._is_wanted()

    def _is_mine(self) -> bool:
        return self._has_work and not (self._driver or self._waiting)

    def _is_wanted(self) -> bool:
        return self._has_work and not (self._waiting or self._is_stopping)

    @property
    def _has_work(self) -> bool:
        if self._tasks or self._inbox:
            return True
        return any(service.is_busy for service in self._services)

    @property
    def _waits_in_cpp(self) -> bool:
        """True if C++ wakes who is to take note of the end of all that is under way."""
        for task in (*self._tasks, *self._inbox):
            if not task.waits_in_cpp:
                return False
        return not any(service.is_busy for service in self._services)

    def _drive(self, is_enough: Callable[[], bool], spins: int) -> None:
        turns, polls, nap, moved_at = 0, 0, _NAP_S, time.monotonic()
        if self._is_in_cpp and self._waits_in_cpp:
            self._park(_LONG_NAP_S, is_background=spins == _BACKGROUND_SPINS)  # often it is enough
        while not is_enough():
            turns += 1
            if turns % _LOOK_EVERY and self._take_news():
                polls, nap, moved_at = 0, _NAP_S, time.monotonic()
                continue
            most = _CPP_SPINS if self._is_in_cpp else spins
            began_at = time.thread_time() if polls + 1 >= most else math.inf
            has_moved = self._advance()
            now = time.monotonic()
            if has_moved:
                polls, nap, moved_at = 0, _NAP_S, now
            polls += 1
            is_in_cpp = self._waits_in_cpp
            is_slow = polls >= most
            if (is_slow and turns > 1) or turns % _LOOK_EVERY == 0:
                self._look_around(now)
            if is_slow:
                # What moved is work, and while others had the core nothing was looked at.
                look_s = 0.0 if has_moved else time.thread_time() - began_at
                self._park(nap, is_background=spins == _BACKGROUND_SPINS)
                nap = max(_longer(nap, now - moved_at, is_in_cpp=is_in_cpp), _PASS_SHARE * look_s)

    def _take_news(self) -> bool:
        """Let services take what C++ has for them, without a look at the wire, which costs more."""
        has_moved = False
        for service in self._services:
            if service.has_news:
                has_moved |= service.poll(only_news=True)
        if has_moved and self._n_watching:
            with self._turn:
                self._tell_watchers()
        return has_moved

    @property
    def _is_in_cpp(self) -> bool:
        """True while C++ advances something: it looks more closely than this loop can."""
        return self._loop.has_programs

    def _park(self, nap_s: float, *, is_background: bool) -> None:
        if not self._loop.has_programs:
            self._transport.park(nap_s)
        elif is_background:
            self._loop.await_news(nap_s)
        else:
            self._loop.park(nap_s)

    def _wake(self) -> None:
        self._transport.wake()
        self._loop.wake()

    def _advance(self) -> bool:
        self._admit()
        if self._failure is not None:
            self.fail_all(self._failure)
        self._watch.poll()
        has_moved = False
        for service in self._services:
            has_moved |= service.poll()
        if has_moved and self._n_watching:
            with self._turn:
                self._tell_watchers()
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

    def _admit(self) -> None:
        while self._inbox:
            task = self._inbox.popleft()
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
        self._on_over(task, error)
        if self._waiting:
            with self._turn:
                self._turn.notify_all()

    def _look_around(self, now: float) -> None:
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

    def _completes(self, task: Task) -> bool:
        """Return True if a rank that is gone had done its part of the task before."""
        if task.fault is not None:
            return False
        self._loop.settle()
        try:
            while task.advance():
                pass
        except Exception:  # noqa: BLE001 - why it cannot complete is known, and says more
            return False
        return not task.has_work


async def _raise(error: BaseException) -> None:
    raise error


def _never() -> bool:
    return False


def _or_late(is_enough: Callable[[], bool], deadline: float) -> Callable[[], bool]:
    if deadline == math.inf:
        return is_enough
    looks = itertools.count()  # the first is before anything was polled
    return lambda: is_enough() or (next(looks) > 0 and time.monotonic() >= deadline)


def _end_of(task: Task, deadline: float) -> Callable[[], bool]:
    if deadline == math.inf:
        return lambda: task.is_over
    return lambda: task.is_over or time.monotonic() >= deadline


def _longer(nap_s: float, waited_s: float, *, is_in_cpp: bool) -> float:
    """Return how long to sleep after a nap that was in vain."""
    share, longest = _NAP_SHARE, _LONGEST_NAP_S
    if is_in_cpp:
        share, longest = _CPP_NAP_SHARE, _LONGEST_CPP_NAP_S
    limit = min(max(_LONG_NAP_S, waited_s * share), longest)
    return min(nap_s * 1.5, limit)


def _ignore_task(_task: Task, _error: BaseException | None) -> None:
    raise AssertionError("no task is under way after the end")


def _ignore_error(_error: BaseException) -> None:
    raise AssertionError("nobody drives after the end")


def _refused(task: Task) -> RingcommError:
    error = RingcommError(
        f"{task.label}: the wire refused a message and no rank is known to be dead: "
        f"{task.fault}. The engine cannot be used any more; end this job."
    )
    error.__cause__ = task.fault
    return error
