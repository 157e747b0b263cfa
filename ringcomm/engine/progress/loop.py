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
from collections.abc import Callable, Iterator
from functools import partial

from ringcomm.config import Settings
from ringcomm.engine.progress.task import Task
from ringcomm.engine.progress.task_set import Service, TaskSet
from ringcomm.engine.progress.turn import Turn, Waiter
from ringcomm.errors import RingcommError
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


class Progress:
    """Drives the tasks of one engine; calls on_over as TaskSet does.

    on_broken: called when driving itself has failed: an interrupt, or a wire that is broken.
    """

    def __init__(
        self,
        watch: Watch,
        settings: Settings,
        on_over: Callable[[Task, BaseException | None], None],
        on_broken: Callable[[BaseException], None],
    ) -> None:
        self._peers = watch.peers
        self._transport = watch.transport
        self._loop = watch.transport.loop
        self._on_over = on_over
        self._on_broken = on_broken
        self._turn = Turn(self._transport)
        self._tasks = TaskSet(watch, settings, on_over, self._turn)
        self._is_stopping = False
        self._thread: threading.Thread | None = None

    def submit(self, task: Task, *, is_awaited: bool) -> None:
        """Begin a task; any thread. If this thread is going to wait for it, no other is woken."""
        self._tasks.inbox.append(task)
        if task.waits_in_cpp:
            return  # it advances there, which wakes who is to take note of its end
        with self._turn.lock:
            if self._turn.driver is not None:
                self._turn.wake_driver()
            elif not is_awaited:
                self._loop.wake()

    def begin(self, task: Task, *, is_awaited: bool, at_once: bool) -> None:
        """Begin a task; see submit().

        at_once: advance it first in this thread: it begins in shared memory, and may be over soon.
        """
        if at_once and not self._peers.has_lost:
            try:
                task.advance()
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                task.start(_raise(error))  # who drives decides what it means
            if not task.has_work:
                self._on_over(task, None)
                return
        self.submit(task, is_awaited=is_awaited)

    def attach(self, service: Service) -> None:
        """Poll a service in the loop, too; its errors end everything, as a broken wire does."""
        self._tasks.services = (*self._tasks.services, service)

    def nudge(self) -> None:
        """Poll the services: at once in this thread if nobody drives, else soon.

        Waking another thread costs 10 to 30 us, a poll less.
        """
        waiter = Waiter()
        with self._turn.lock:
            if self._turn.driver is not None:
                self._turn.wake_driver()
                self._turn.notify_watchers()
                return
            self._turn.driver = waiter
        self._take_part(waiter, self._tasks.advance)

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
        Raises RingcommError if this thread is driving: it would wait for itself.
        """
        if task.is_over:
            return True
        turn = self._turn
        if timeout_s > 0 and turn.driver is not None:
            turn.refuse_own(task.label)
        deadline = time.monotonic() + timeout_s
        waiter, is_enough = Waiter(), _or_late(lambda: task.is_over, deadline)
        try:
            turn.request(waiter)
            while turn.take(waiter, task, deadline):
                self._take_part(waiter, partial(self._drive, is_enough, _SPINS))
            return task.is_over
        finally:
            try:
                turn.give_back(waiter, self._tasks.waits_in_cpp)
            finally:  # again, for an interrupt may have ended the first
                turn.give_back(waiter, self._tasks.waits_in_cpp)

    def run_until(
        self,
        is_enough: Callable[[], bool],
        *,
        is_done: Callable[[], bool] | None = None,
        timeout_s: float = math.inf,
    ) -> None:
        """Drive in this thread until is_enough(), or until another thread that drives has done it.

        is_done: asked while another thread drives, whenever something has moved, by any thread.
        None: this thread waits for its turn. Raises RingcommError if this thread is driving.
        """
        turn = self._turn
        turn.refuse_own("run_until()")
        deadline = time.monotonic() + timeout_s
        waiter = Waiter()
        try:
            is_free = turn.request(waiter, takes=True)
            if is_free or turn.take_unless(waiter, is_done or (lambda: False), deadline):
                drive = partial(self._drive, _or_late(is_enough, deadline), _SPINS)
                self._take_part(waiter, drive)
        finally:
            turn.give_back(waiter, self._tasks.waits_in_cpp)

    @property
    def is_own_turn(self) -> bool:
        """True in the thread that drives, as in a callback: it must not wait."""
        return self._turn.is_own

    def fail_all(self, make: Callable[[], RingcommError]) -> None:
        """End every task, those that come too, each with an error of its own; for the driver."""
        self._tasks.fail_all(make)

    def fail_soon(self, make: Callable[[], RingcommError]) -> None:
        """Make whoever drives next call fail_all(); any thread."""
        self._tasks.failure = make
        with self._turn.lock:
            self._turn.wake_driver()
            self._turn.lock.notify_all()

    def stop(self, make: Callable[[], RingcommError]) -> None:
        """End the thread, and the tasks that are not over."""
        with self._turn.lock:
            self._is_stopping = True
            self._turn.lock.notify_all()
        self._turn.wake_driver()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)
        self._tasks.failure = make
        if self._turn.driver is None:
            self.fail_all(make)

    def close(self) -> None:
        """Forget the engine; nothing is submitted any more."""
        self._on_over = self._tasks.on_over = self._on_broken = _refuse
        self._tasks.failure = None

    def _take_part(self, waiter: Waiter, drive: Callable[[], object]) -> None:
        """Drive; the turn is this thread's, and is given back."""
        try:
            drive()
        except BaseException as error:
            self._on_broken(error)
            if self._tasks.failure is not None:
                self.fail_all(self._tasks.failure)
            raise
        finally:
            self._turn.give_back(waiter, self._tasks.waits_in_cpp, waits_on=True)

    def _run(self) -> None:
        """Drive while there is something to do and nobody who waits does it."""
        waiter, looked_at, turn = Waiter(), -math.inf, self._turn
        while True:
            with turn.lock:
                is_mine = self._tasks.has_work and not (turn.driver or turn.waiting)
                is_idle = not (self._is_stopping or is_mine)
            if is_idle:
                self._loop.await_news(_IDLE_LOOK_S)
            with turn.lock:
                if self._is_stopping:
                    return
                if turn.driver is not None or turn.waiting:
                    continue
                turn.driver = waiter
            # Even with nothing to do a look is taken now and then: others ask where this rank is.
            now = time.monotonic()
            is_due = now - looked_at >= _IDLE_LOOK_S
            looked_at, looks = now if is_due else looked_at, itertools.count(not is_due)
            # What goes wrong ends all tasks, with the error; nobody waits here.
            with contextlib.suppress(BaseException):
                is_enough = partial(self._is_done, looks)
                self._take_part(waiter, partial(self._drive, is_enough, _BACKGROUND_SPINS))

    def _is_done(self, looks: Iterator[int]) -> bool:
        if next(looks) == 0:
            return False
        return not self._tasks.has_work or bool(self._turn.waiting) or self._is_stopping

    def _drive(self, is_enough: Callable[[], bool], spins: int) -> None:
        turns, polls, nap, moved_at = 0, 0, _NAP_S, time.monotonic()
        if self._is_in_cpp and self._tasks.waits_in_cpp():
            self._park(_LONG_NAP_S, is_background=spins == _BACKGROUND_SPINS)  # often it is enough
        while not is_enough():
            turns += 1
            if turns % _LOOK_EVERY and self._tasks.take_news():
                polls, nap, moved_at = 0, _NAP_S, time.monotonic()
                continue
            most = _CPP_SPINS if self._is_in_cpp else spins
            began_at = time.thread_time() if polls + 1 >= most else math.inf
            has_moved = self._tasks.advance()
            now = time.monotonic()
            if has_moved:
                polls, nap, moved_at = 0, _NAP_S, now
            polls += 1
            is_in_cpp = self._tasks.waits_in_cpp()
            is_slow = polls >= most
            if (is_slow and turns > 1) or turns % _LOOK_EVERY == 0:
                self._tasks.look_around(now)
            if is_slow:
                # What moved is work, and while others had the core nothing was looked at.
                look_s = 0.0 if has_moved else time.thread_time() - began_at
                self._park(nap, is_background=spins == _BACKGROUND_SPINS)
                nap = max(_longer(nap, now - moved_at, is_in_cpp=is_in_cpp), _PASS_SHARE * look_s)

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


async def _raise(error: BaseException) -> None:
    raise error


def _or_late(is_enough: Callable[[], bool], deadline: float) -> Callable[[], bool]:
    if deadline == math.inf:
        return is_enough
    looks = itertools.count()  # the first is before anything was polled
    return lambda: is_enough() or (next(looks) > 0 and time.monotonic() >= deadline)


def _longer(nap_s: float, waited_s: float, *, is_in_cpp: bool) -> float:
    """Return how long to sleep after a nap that was in vain."""
    share, longest = _NAP_SHARE, _LONGEST_NAP_S
    if is_in_cpp:
        share, longest = _CPP_NAP_SHARE, _LONGEST_CPP_NAP_S
    limit = min(max(_LONG_NAP_S, waited_s * share), longest)
    return min(nap_s * 1.5, limit)


def _refuse(*_: object) -> None:
    raise AssertionError("no task is under way after the end, and nobody drives")
