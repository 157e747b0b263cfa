"""Hooks for other layers: services, goodbyes, closers, objects that an engine keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from ringcomm.engine.core.ledger import Ticket
from ringcomm.engine.core.pending_operations import Pending, PendingOperation
from ringcomm.engine.progress.loop import Progress
from ringcomm.engine.progress.task import Task, TaskCoroutine
from ringcomm.engine.progress.task_set import Service
from ringcomm.errors import RingcommError

T = TypeVar("T")


class Extension(Generic[T]):
    """A key under which a module keeps its T in an engine."""


class Closer(Protocol):
    def __call__(self, *, is_clean: bool) -> None:
        """Free the thing. `is_clean`: all ranks close, and no operation is under way."""


class Extensions:
    """The objects and callbacks of other layers in one engine.

    Any thread may add one. The driver polls services and calls has_entered(). The thread that
    leaves the job calls goodbyes while the engine still works, and closers after the last drive.
    """

    def __init__(self, pending: Pending, progress: Progress) -> None:
        self._pending = pending
        self._progress = progress
        self._entered: dict[int, Callable[[int], bool]] = {}
        self._goodbyes: list[Callable[[], None]] = []
        self._closers: list[Closer] = []
        self._with_groups: list[Callable[[int], None]] = []
        self._kept: dict[Extension[Any], Any] = {}
        self._waits: list[Callable[[], str]] = []
        self._join_checks: list[Callable[[], None]] = []
        self._view_checks: list[Callable[[str], None]] = []

    def get(self, key: Extension[T]) -> T | None:
        return self._kept.get(key)

    def keep(self, key: Extension[T], value: T) -> None:
        self._kept[key] = value

    def get_or_keep(self, key: Extension[T], value: T) -> T:
        kept: T = self._kept.setdefault(key, value)
        return kept

    def drop(self, key: Extension[T]) -> None:
        self._kept.pop(key, None)

    def check_joins(self, check: Callable[[], None]) -> None:
        """Call check() before this rank joins; it raises an error where join() would not help."""
        self._join_checks.append(check)

    def require_join(self) -> None:
        for check in self._join_checks:
            check()

    def check_views(self, check: Callable[[str], None]) -> None:
        """Call check(what) before `what` would begin another view, which has an engine of its own.

        It raises an error, which names `what`, where a layer cannot leave this engine.
        """
        self._view_checks.append(check)

    def require_view(self, what: str) -> None:
        for check in self._view_checks:
            check(what)

    def add_service(self, service: Service) -> None:
        self._progress.attach(service)

    def follow_up(
        self,
        label: str,
        members: tuple[int, ...],
        coroutine: TaskCoroutine,
        ticket: Ticket,
        *,
        late: Callable[[], tuple[int, ...]],
        give_up: Callable[[], None],
    ) -> None:
        """Watch, in a new task, the work that operations have left behind; any thread may call.

        The ticket has the base that was passed to add_entered(). late() returns the ranks of the
        job for which the work waits. give_up() is called when the task ends, in whatever way.
        """
        task = Task(label, ticket, members)
        task.late_elsewhere, task.give_up = late, give_up
        task.is_asked = task.is_patient = task.is_follow_up = True
        task.start(coroutine)
        with self._pending.lock:
            self._pending.add(PendingOperation(task, None, ticket, 0))
        self._progress.work_in_background()
        self._progress.submit(task, is_awaited=False)

    def add_entered(self, base: int, has_entered: Callable[[int], bool]) -> None:
        """Ask has_entered(number) about operations whose base (see Ticket) is in no ledger."""
        self._entered[base] = has_entered

    def drop_entered(self, base: int) -> None:
        """Undo add_entered(). No rank may have operations of this base under way."""
        self._entered.pop(base, None)

    def has_entered(self, base: int, number: int) -> bool:
        return base in self._entered and self._entered[base](number)

    def add_waits(self, waits_in: Callable[[], str]) -> None:
        """Ask waits_in() for the label of the call in which this rank waits, or ""."""
        self._waits.append(waits_in)

    def waits_in(self) -> str:
        return next(filter(None, (waits_in() for waits_in in self._waits)), "")

    def before_leaving(self, goodbye: Callable[[], None]) -> None:
        """Call `goodbye` before an orderly leave; the goodbye added last is called first."""
        self._goodbyes.append(goodbye)

    def say_goodbye(self) -> RingcommError | None:
        """Call the goodbyes; return the RingcommError of one that failed, or None."""
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
        for free in self._with_groups:
            free(group_id)

    def before_closing(self, closer: Closer) -> None:
        """Call `closer` when the engine has stopped, before the wire is closed."""
        self._closers.append(closer)

    def close(self, *, is_clean: bool) -> None:
        while self._closers:
            self._closers.pop()(is_clean=is_clean)
        self._entered.clear()
        self._waits.clear()
        self._view_checks.clear()
        self._with_groups.clear()
