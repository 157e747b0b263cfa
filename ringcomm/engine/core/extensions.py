"""What others attach to an engine: what it keeps, polls and watches over, and calls at its end."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ringcomm.engine.core.ledger import Ticket
from ringcomm.engine.core.pending import Pending, Work
from ringcomm.engine.progress.loop import Progress
from ringcomm.engine.progress.task import Task, TaskCoroutine
from ringcomm.engine.progress.under_way import Service
from ringcomm.errors import RingcommError

if TYPE_CHECKING:
    from ringcomm.engine.core.engine import Engine


class Closer(Protocol):
    """Frees something when the engine closes."""

    def __call__(self, *, is_clean: bool) -> None:
        """Free it; `is_clean`: all ranks do, and nothing is under way."""
        ...


class Beside(Protocol):
    """What counts operations that no ledger knows."""

    def has_entered(self, base: int, number: int) -> bool:
        """Return True if this rank is, or was, in that operation."""
        ...


class Attached:
    """What other modules have attached to one engine, which knows nothing else of them.

    Any thread may attach something; follow_up() takes the lock. Services are polled, and
    has_entered() is called, by the thread that drives. Goodbyes and closers are called by the
    thread that leaves: goodbyes while the engine still works, closers when nobody drives any more.

    Args:
        engine: of this rank.
        pending: its operations.
        lock: of both.
        progress: drives them.

    Attributes:
        by_name: what others keep as long as the engine lives.
    """

    def __init__(
        self, engine: Engine, pending: Pending, lock: threading.Lock, progress: Progress
    ) -> None:
        self._held = weakref.ref(engine)  # no cycle may keep the page's descriptor
        self._pending = pending
        self._lock = lock
        self._progress = progress
        self._beside: dict[int, Beside] = {}
        self._goodbyes: list[Callable[[], None]] = []
        self._closers: list[Closer] = []
        self.by_name: dict[str, Any] = {}

    def add_service(self, service: Service) -> None:
        """Let whoever drives poll a service beside the operations."""
        self._progress.attach(service)

    def follow_up(
        self,
        label: str,
        members: tuple[int, ...],
        coroutine: TaskCoroutine,
        ticket: Ticket,
        *,
        late: Callable[[], tuple[int, ...]],
    ) -> None:
        """Let something be watched over that an operation has left behind, as if it were one.

        Args:
            label: "allreduce #3 on the GPU".
            members: ranks of the job whose death ends it.
            coroutine: returns once it is over.
            ticket: which it is; see enter_beside().
            late: returns the ranks of the job that hold it up.
        """
        engine = self._held()
        assert engine is not None
        task = Task(label, ticket, members)
        task.late_elsewhere = late
        task.is_asked = True
        task.start(coroutine)
        with self._lock:
            self._pending.add(Work(task, None, ticket, 0), engine.timeline)
        self._progress.work_in_background()
        self._progress.submit(task, is_awaited=False)

    def enter_beside(self, base: int, beside: Beside) -> None:
        """Let `beside` say which operations of this base this rank has entered."""
        self._beside[base] = beside

    def has_entered(self, base: int, number: int) -> bool:
        """Return True if this rank is, or was, in that operation, as far as one of them knows."""
        beside = self._beside.get(base)
        return beside is not None and beside.has_entered(base, number)

    def before_leaving(self, goodbye: Callable[[], None]) -> None:
        """Let `goodbye` be called when this rank is about to leave in order, the last one first."""
        self._goodbyes.append(goodbye)

    def say_goodbye(self) -> RingcommError | None:
        """Let those leave who have others to tell; return what kept them from it."""
        try:
            while self._goodbyes:
                self._goodbyes.pop()()
        except RingcommError as error:
            return error
        return None

    def before_closing(self, closer: Closer) -> None:
        """Let `closer` be called when nothing is done any more, before the wire is closed."""
        self._closers.append(closer)

    def close(self, *, is_clean: bool) -> None:
        """Free what others hold, the last one first; see Engine.close()."""
        while self._closers:
            self._closers.pop()(is_clean=is_clean)
        self._beside.clear()
