"""The operations of this rank that are not over; the status page shows the oldest."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from ringcomm._core import StatusPage
from ringcomm.engine.core.call import Call
from ringcomm.engine.core.ledger import Ledger, Ticket
from ringcomm.engine.progress.task import Task
from ringcomm.engine.progress.timeline import Lane, Timeline
from ringcomm.errors import RingcommError
from ringcomm.status.error_text import place_of_thread
from ringcomm.status.page_enums import OpState
from ringcomm.transport.node.shared_memory import NodeTeam
from ringcomm.transport.wire_team import WireTeam


@dataclass
class PendingOperation:
    """A task and its facts; ledger, call and group are None if the task is no collective."""

    task: Task
    ledger: Ledger | None
    ticket: Ticket
    nbytes: int  # of the payload
    call: Call | None = None  # on which all ranks must agree
    problem: Exception | None = None  # why this rank could not plan it
    group: object = None  # kept alive, because its context must not be reused meanwhile
    team: NodeTeam | None = None  # see Group
    neighbours: NodeTeam | None = None  # see Group
    wire: WireTeam | None = None  # see Group
    is_awaited: bool = False  # the thread that started it waits for it
    order: int = 0  # among all operations that this rank has entered
    lane: Lane | None = None  # its row of the timeline, if there is a timeline
    thread: int = field(default_factory=threading.get_ident)  # that started it


def _facts_of(work: PendingOperation) -> dict[str, str]:
    """Return what tells an operation from others in a timeline; where it is, if it has no name."""
    facts = {"shape": work.call.arrays if work.call is not None else ""}
    if work.ticket.name is None:
        facts["at"] = place_of_thread(work.thread) or ""
    return {name: text for name, text in facts.items() if text}


class Pending:
    """The pending operations by key, at most `limit`; the status page shows the oldest."""

    def __init__(self, page: StatusPage | None, timeline: Timeline | None, limit: int) -> None:
        self._page = page
        self._limit = limit
        self.timeline = timeline
        self.lock = threading.Lock()  # also guards entering in ledgers
        self._operations: dict[int, PendingOperation] = {}
        self._shown: int | None = None
        self._n_entered = 0

    def __len__(self) -> int:
        return len(self._operations)

    def __contains__(self, key: int) -> bool:
        return key in self._operations

    def operations(self) -> list[PendingOperation]:
        """Return the pending operations, oldest first."""
        return list(self._operations.values())

    def oldest(self) -> str:
        return next((work.task.label for work in self.operations()), "")

    def label_of(self, key: int) -> str:
        return self._operations[key].task.label

    def require_room(self, rank: int) -> None:
        if len(self._operations) >= self._limit:
            raise RingcommError(
                f"{len(self._operations)} operations are pending on rank {rank}, which is the "
                "limit: wait for some of their handles first"
            )

    def record(self, timeline: Timeline | None) -> None:
        before, self.timeline = self.timeline, timeline
        if before is not None:
            before.close()

    def add(self, work: PendingOperation) -> None:
        self._n_entered += 1
        work.order = self._n_entered
        self._operations[work.ticket.key] = work
        if self.timeline is not None:
            work.lane = self.timeline.begin(work.task.label, work.nbytes, **_facts_of(work))
        if self._shown is None:
            self._show(work)

    def get(self, key: int) -> PendingOperation:
        return self._operations[key]

    def go_on(self, key: int, label: str, number: int) -> None:
        """Note which of several operations, one after the other, a task is about from now on."""
        work = self._operations[key]
        if work.task.number != number:
            work.task.label, work.task.number = label, number
            with self.lock:
                if self._shown == key:
                    self._show(work)

    def remove(self, key: int, *, has_failed: bool) -> None:
        """Note that an operation is over; `has_failed`: it breaks the engine."""
        self._operations.pop(key, None)
        if self._shown != key:
            return
        self._shown = None
        if self._page is not None:
            self._page.end_op(OpState.FAILED if has_failed else OpState.IDLE)
        if not has_failed:
            for work in self._operations.values():
                self._show(work)
                return

    def _show(self, work: PendingOperation) -> None:
        self._shown = work.ticket.key
        if self._page is not None:
            label = work.task.label.encode(errors="replace").decode()  # lone surrogates
            self._page.begin_op(label, work.order, work.nbytes)
