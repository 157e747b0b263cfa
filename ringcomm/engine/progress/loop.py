"""The progress loop, in which all waits of the library happen.

The loop polls the tasks, backs off, and after every few polls checks control messages, deaths and
deadlines. So a rank that waits for a second one notices the death of a third, and no wait lasts
longer than RINGCOMM_TIMEOUT_S. One thread at a time drives the loop: a thread that waits for an
operation, or the background thread while none waits. A submitted task wakes the driver; there is
no periodic cycle.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import ringcomm.transport
from ringcomm._core import in_mpi_since, monotonic_ns
from ringcomm.config import Settings
from ringcomm.engine.progress.clock_without_stops import RunningTime, Standstill
from ringcomm.engine.progress.driver_turn import Turn, Waiter
from ringcomm.engine.progress.task import Task
from ringcomm.engine.progress.task_set import Service, TaskSet
from ringcomm.errors import RingcommError
from ringcomm.open_errors import needed_for
from ringcomm.transport.control_messages import Watch

_log = logging.getLogger("ringcomm")

_SPINS = 64  # polls before the first nap of a thread that waits
_BACKGROUND_SPINS = 4  # the same for the background thread
_CPP_SPINS = 1  # the same for both while C++ advances something: C++ polls faster than Python
_LOOK_EVERY = 16  # polls between two looks at deaths and deadlines
# Naps of 20 us cost 26-38 % of a core, 1 ms 2-4 %, 5 ms 1 % (measured, ci/idle.py). So naps grow
# fast to 1 ms, then to half a percent of the time waited so far, 5 ms at most.
_NAP_S, _LONG_NAP_S, _LONGEST_NAP_S = 20e-6, 1e-3, 5e-3
_NAP_SHARE = 1 / 200
# While C++ advances all tasks, the end of a task, a death or wake() ends a nap; other news waits
# until the nap is over. A pass through this loop after a nap takes 100-200 us: caches are cold.
_LONGEST_CPP_NAP_S, _CPP_NAP_SHARE = 20e-3, 1 / 20
_PASS_SHARE = 20  # a nap lasts at least 20 times as long as the poll before it
# MPI moves the bytes of a long message between hosts only while it is polled. With naps of 5 ms a
# link of 200 Mbit/s is idle for a quarter of the time; with these, a core is busy for a tenth.
_STREAM_NAP_S = 0.5e-3
# A poll that takes so much CPU time has moved much of it, and there is more to move.
_STREAM_POLL_S = 0.15e-3
_TRANSPORT = ringcomm.transport.__path__[0]
_LONG_CALL_NS = 1_000_000  # a call of MPI that takes longer may not come back
_IDLE_LOOK_S = 0.2  # between an idle rank's polls, which find questions and deaths of others


class Progress:
    """Drives the tasks of one engine. on_broken() gets an error that ends a drive."""

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
        self._n_passes = 0  # see Standstill
        self._standstill, self._standstill_in_cpp = Standstill(), Standstill()
        self._thread: threading.Thread | None = None

    def submit(self, task: Task, *, is_awaited: bool) -> None:
        """Begin a task; any thread may call. is_awaited: this thread will wait; it wakes none."""
        self._tasks.inbox.append(task)
        if task.waits_in_cpp:
            return  # C++ wakes a thread at the end
        with self._turn.lock:
            if self._turn.driver is not None:
                if not task.is_patient:
                    self._turn.wake_driver()
            elif not is_awaited:
                self._loop.wake()

    def begin(self, task: Task, *, is_awaited: bool, at_once: bool) -> None:
        """Begin a task; see submit(). at_once: advance it in this thread first; it may end then."""
        if at_once and not self._peers.has_lost:
            try:
                task.advance()
            except BaseException as error:  # noqa: BLE001 - raised where a caller waits
                task.start(_raise(error))  # the driver ends the task with this error
            if not task.has_work:
                self._on_over(task, None)
                return
        self.submit(task, is_awaited=is_awaited)

    def attach(self, service: Service) -> None:
        """Poll a service in the loop, too; an error of it ends all tasks, as a broken wire does."""
        self._tasks.services = (*self._tasks.services, service)

    def nudge(self) -> None:
        """Poll the services: in this thread if nobody drives, else by waking the driver.

        A poll in this thread costs less than waking another one, which takes 10 to 30 us.
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
        """Start the threads of this rank. Raises OSError if there can be no more."""
        if not self._transport.is_threaded:
            return
        with needed_for("the threads of this rank"):
            # First: Python aborts at its exit if its own thread runs on.
            self._loop.start_thread()
            if self._thread is None and not self._is_stopping:
                thread = threading.Thread(target=self._run, name="ringcomm", daemon=True)
                thread.start()
                self._thread = thread

    def wait(self, task: Task, timeout_s: float = math.inf) -> bool:
        """Return True once the task is over, False after timeout_s; any thread may call.

        An exception such as KeyboardInterrupt gives the turn back. Raises RingcommError if this
        thread is driving, because it would wait for itself.
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
            while turn.take(waiter, task, deadline, self._tell_of_standstill):
                self._take_part(waiter, partial(self._drive, is_enough, _SPINS))
            return task.is_over
        finally:
            try:
                turn.give_back(waiter, self._tasks.waits_in_cpp)
            finally:  # an interrupt may have ended the first try
                turn.give_back(waiter, self._tasks.waits_in_cpp)

    def run_until(
        self,
        is_enough: Callable[[], bool],
        *,
        is_done: Callable[[], bool] | None = None,
        timeout_s: float = math.inf,
    ) -> None:
        """Drive in this thread until is_enough(). Return early if is_done() while another drives.

        This thread calls is_done() whenever a service has moved, until its turn comes. Raises
        RingcommError if this thread is driving already.
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
        return self._turn.is_own

    def fail_all(self, make: Callable[[], RingcommError]) -> None:
        """See TaskSet.fail_all(); for the driver."""
        self._tasks.fail_all(make)

    def fail_soon(self, make: Callable[[], RingcommError]) -> None:
        """Make the driver call fail_all(); any thread may call this."""
        self._tasks.failure = make
        with self._turn.lock:
            self._turn.wake_driver()
            self._turn.lock.notify_all()

    def stop(self, make: Callable[[], RingcommError]) -> None:
        """End the background thread, and all tasks."""
        with self._turn.lock:
            self._is_stopping = True
            self._turn.lock.notify_all()
        self._turn.wake_driver()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)
        self._tasks.failure = make
        if self._turn.driver is None:
            self.fail_all(make)

    def await_driver(self, timeout_s: float) -> None:
        """Return once no thread drives, after stop(); at the latest after timeout_s."""
        deadline = time.monotonic() + timeout_s
        with self._turn.lock:
            while self._turn.driver is not None and time.monotonic() < deadline:
                self._turn.lock.wait(_LONG_NAP_S)

    def close(self) -> None:
        """Drop the references to the engine; no task may be submitted after this."""
        self._on_over = self._tasks.on_over = self._on_broken = _refuse
        self._tasks.failure = None

    def _take_part(self, waiter: Waiter, drive: Callable[[], object]) -> None:
        """Call drive() in this thread's turn, then give the turn back."""
        self._n_passes += 1
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
        """Drive while there is work and no thread waits; the background thread."""
        waiter, looked_at, turn, is_kept = Waiter(), -math.inf, self._turn, False
        while True:
            self._tell_of_standstill()
            with turn.lock:
                is_mine = self._tasks.has_work and not (turn.driver or turn.waiting)
                is_idle = not (self._is_stopping or is_mine)
            if is_idle or is_kept:
                self._loop.await_news(_IDLE_LOOK_S if is_idle else _LONG_NAP_S)
            with turn.lock:
                if self._is_stopping:
                    return
                # MPI may keep this thread, too, and then nobody would tell of it.
                since = in_mpi_since()
                is_kept = since != 0 and monotonic_ns() - since > _LONG_CALL_NS
                if turn.driver is not None or turn.waiting or is_kept:
                    continue
                turn.driver = waiter
            # An idle rank polls once per _IDLE_LOOK_S, to answer the questions of others.
            now = time.monotonic()
            is_due = now - looked_at >= _IDLE_LOOK_S
            looked_at, looks = now if is_due else looked_at, itertools.count(not is_due)
            # An error has ended all tasks, and their callers raise it.
            with contextlib.suppress(BaseException):
                is_enough = partial(self._is_done, looks)
                self._take_part(waiter, partial(self._drive, is_enough, _BACKGROUND_SPINS))

    def _tell_of_standstill(self) -> None:
        """Say it, once, if another thread of this rank does not get out of MPI.

        It is in a call of Python while it drives, or in one of C++, with or without the turn.
        """
        with self._turn.lock:
            driver, now = self._turn.driver, time.monotonic()
            stood_s = self._standstill.at(now, driver, self._n_passes)
            in_cpp_s = self._standstill_in_cpp.at(now, in_mpi_since() or None, 0)
        frame = sys._current_frames().get(driver.thread) if driver and stood_s else None
        if frame is None or not frame.f_code.co_filename.startswith(_TRANSPORT):
            stood_s = 0.0  # a callback of the program may take as long as it likes
        stood_s = max(stood_s, in_cpp_s)
        if not stood_s:
            return
        _log.warning(
            "rank %d: its own MPI has not returned for %.0f s, so this rank hears of no other, and "
            "others wait for it. A connection to one of its ports that sends nothing has this "
            "effect: `ss -tnp` shows it; SECURITY.md says how to close the ports.",
            self._transport.rank,
            stood_s,
        )

    def _is_done(self, looks: Iterator[int]) -> bool:
        if next(looks) == 0:
            return False
        return not self._tasks.has_work or bool(self._turn.waiting) or self._is_stopping

    def _drive(self, is_enough: Callable[[], bool], spins: int) -> None:
        turns, polls, nap, moved_at = 0, 0, _NAP_S, time.monotonic()
        is_background = spins == _BACKGROUND_SPINS
        if self._is_in_cpp and self._tasks.waits_in_cpp():
            # Often the operation ends within this nap.
            self._park(_LONG_NAP_S, is_background=is_background)
        elif is_background and self._tasks.is_patient:
            self._park(_LONG_NAP_S, is_background=True)
        while not is_enough():
            turns += 1
            if turns % _LOOK_EVERY and self._tasks.take_news():
                polls, nap, moved_at = 0, _NAP_S, time.monotonic()
                continue
            limit = _CPP_SPINS if self._is_in_cpp else spins
            began_at = time.thread_time() if polls + 1 >= limit else math.inf
            has_moved = self._tasks.advance()
            now = time.monotonic()
            self._n_passes += 1
            if has_moved:
                polls, nap, moved_at = 0, _NAP_S, now
            polls += 1
            is_in_cpp = self._tasks.waits_in_cpp()
            is_patient = is_background and self._tasks.is_patient
            is_slow = polls >= limit or is_patient
            if (is_slow and turns > 1) or turns % _LOOK_EVERY == 0:
                self._tasks.look_around(now)
            if is_slow and self._peers.has_lost and is_enough():
                return  # such a look takes long, and 20 times that is no nap
            if is_slow:
                # CPU time, not wall time: other processes may have had the core.
                look_s = 0.0 if has_moved else time.thread_time() - began_at
                nap = max(nap, _LONG_NAP_S) if is_patient else nap
                if self._tasks.is_streaming:
                    if look_s > _STREAM_POLL_S:
                        continue
                    nap = min(nap, _STREAM_NAP_S)
                self._park(nap, is_background=is_background)
                nap = max(_longer(nap, now - moved_at, is_in_cpp=is_in_cpp), _PASS_SHARE * look_s)

    @property
    def _is_in_cpp(self) -> bool:
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
    """Return is_enough, which is also True after the deadline; see RunningTime."""
    if deadline == math.inf:
        return is_enough
    running: RunningTime | None = None

    def is_over() -> bool:
        nonlocal running
        if is_enough():
            return True
        now = time.monotonic()
        if running is None:  # at least one poll comes before the deadline counts
            running = RunningTime(now)
            return False
        return running.at(now) >= deadline

    return is_over


def _longer(nap_s: float, waited_s: float, *, is_in_cpp: bool) -> float:
    share, longest = _NAP_SHARE, _LONGEST_NAP_S
    if is_in_cpp:
        share, longest = _CPP_NAP_SHARE, _LONGEST_CPP_NAP_S
    limit = min(max(_LONG_NAP_S, waited_s * share), longest)
    return min(nap_s * 1.5, limit)


def _refuse(*_: object) -> None:
    raise AssertionError("no task is under way after close(), and no thread drives")
