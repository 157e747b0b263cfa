"""The seam for other modules: state that lives as long as an engine, services, closers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from ringcomm.engine.core.ledger import Ticket
from ringcomm.engine.core.pending import Pending, PendingOperation
from ringcomm.engine.progress.loop import Progress
from ringcomm.engine.progress.task import Task, TaskCoroutine
from ringcomm.engine.progress.task_set import Service
from ringcomm.errors import RingcommError

T = TypeVar("T")


class Extension(Generic[T]):
    """The key under which a module keeps its T with an engine."""


class Closer(Protocol):
    """Frees something when the engine closes."""

    def __call__(self, *, is_clean: bool) -> None:
        """Free it; `is_clean`: all ranks do, and nothing is under way."""


class Extensions:
    """Keeps what other modules have with one engine, which knows nothing else of them.

    Any thread may add something. Services are polled, and has_entered() is called, by the thread
    that drives. Goodbyes and closers are called by the thread that leaves: goodbyes while the
    engine still works, closers when nobody drives any more.
    """

    def __init__(self, pending: Pending, progress: Progress) -> None:
        self._pending = pending
        self._progress = progress
        self._entered: dict[int, Callable[[int], bool]] = {}
        self._goodbyes: list[Callable[[], None]] = []
        self._closers: list[Closer] = []
        self._with_groups: list[Callable[[int], None]] = []
        self._kept: dict[Extension[Any], Any] = {}

    def get(self, key: Extension[T]) -> T | None:
        """Return what is kept under this key, or None."""
        return self._kept.get(key)

    def keep(self, key: Extension[T], value: T) -> None:
        """Keep a value as long as the engine lives, instead of the one before."""
        self._kept[key] = value

    def get_or_keep(self, key: Extension[T], value: T) -> T:
        """Return what is kept under this key: the value if there is none yet."""
        kept: T = self._kept.setdefault(key, value)
        return kept

    def drop(self, key: Extension[T]) -> None:
        """Keep nothing under this key any more."""
        self._kept.pop(key, None)

    def add_service(self, service: Service) -> None:
        """Poll a service besides the operations."""
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
        """Watch over something that an operation has left behind, as if it were one; any thread.

        Args:
            label: "allreduce #3 on the GPU".
            members: ranks of the job whose death ends it.
            coroutine: returns once it is over.
            ticket: see add_entered().
            late: returns the ranks of the job that hold it up.
        """
        task = Task(label, ticket, members)
        task.late_elsewhere = late
        task.is_asked = True
        task.start(coroutine)
        with self._pending.lock:
            self._pending.add(PendingOperation(task, None, ticket, 0))
        self._progress.work_in_background()
        self._progress.submit(task, is_awaited=False)

    def add_entered(self, base: int, has_entered: Callable[[int], bool]) -> None:
        """Ask has_entered(number) for the operations of this base, which no ledger counts."""
        self._entered[base] = has_entered

    def drop_entered(self, base: int) -> None:
        """Undo add_entered(); no operation of this base is under way on any rank."""
        self._entered.pop(base, None)

    def has_entered(self, base: int, number: int) -> bool:
        """Return True if this rank is, or was, in that operation, as far as one of them knows."""
        return base in self._entered and self._entered[base](number)

    def before_leaving(self, goodbye: Callable[[], None]) -> None:
        """Call `goodbye` when this rank is about to leave in order, the last one first."""
        self._goodbyes.append(goodbye)

    def say_goodbye(self) -> RingcommError | None:
        """Call the goodbyes; return the error that ended them."""
        try:
            while self._goodbyes:
                self._goodbyes.pop()()
        except RingcommError as error:
            return error
        return None

    def free_with_groups(self, free: Callable[[int], None]) -> None:
        """Call `free` with the id of each group that all members have dropped."""
        self._with_groups.append(free)

    def end_group(self, group_id: int) -> None:
        """Call all of them; see free_with_groups()."""
        for free in self._with_groups:
            free(group_id)

    def before_closing(self, closer: Closer) -> None:
        """Call `closer` when nothing is done any more, before the wire is closed."""
        self._closers.append(closer)

    def close(self, *, is_clean: bool) -> None:
        """Call the closers, the last one first."""
        while self._closers:
            self._closers.pop()(is_clean=is_clean)
        self._entered.clear()
        self._with_groups.clear()
