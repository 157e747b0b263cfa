"""The operations of this rank that are not over, and what its status page says of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringcomm._core import StatusPage
from ringcomm.engine.core.call import Call
from ringcomm.engine.core.ledger import Ledger, Ticket
from ringcomm.engine.progress.task import Task
from ringcomm.engine.progress.timeline import Lane, Timeline
from ringcomm.status.page import OpState
from ringcomm.transport.node.shm import NodeTeam

if TYPE_CHECKING:
    from ringcomm.engine.core.group import Group


@dataclass
class Work:
    """A task, and what the engine keeps with it.

    Attributes:
        task: what is driven.
        ledger: of its group; None for what is no collective.
        ticket: which operation it is.
        nbytes: size of the payload.
        call: what all ranks must agree on; None for what is no collective.
        problem: why this rank could not plan it, if it could not.
        group: whose it is; None for what is no collective.
        is_awaited: who started it waits for it.
        order: among all operations that this rank has entered.
        lane: its row of the timeline, if one is written.
    """

    task: Task
    ledger: Ledger | None
    ticket: Ticket
    nbytes: int
    call: Call | None = None
    problem: Exception | None = None
    group: Group | None = None
    is_awaited: bool = False
    order: int = 0
    lane: Lane | None = None

    @property
    def team(self) -> NodeTeam | None:
        """Where its ranks meet in shared memory, if all of them do."""
        return None if self.group is None else self.group.team

    @property
    def neighbours(self) -> NodeTeam | None:
        """Where those of its ranks meet that are on this node, if there are several."""
        return None if self.group is None else self.group.neighbours


class Pending:
    """Work by key, oldest first; the oldest stands on the status page. Not thread-safe.

    Args:
        page: of this rank, or None.
    """

    def __init__(self, page: StatusPage | None) -> None:
        self._page = page
        self._works: dict[int, Work] = {}
        self._shown: int | None = None
        self._n_entered = 0

    def __len__(self) -> int:
        return len(self._works)

    def __contains__(self, key: int) -> bool:
        return key in self._works

    def tasks(self) -> list[Task]:
        """Return what is pending, oldest first."""
        return [work.task for work in list(self._works.values())]

    def works(self) -> list[Work]:
        """Return what is pending, with what is kept with it, oldest first."""
        return list(self._works.values())

    def oldest(self) -> str:
        """Return the label of what has been pending for longest, "" if nothing is."""
        return next((task.label for task in self.tasks()), "")

    def add(self, work: Work, timeline: Timeline | None) -> None:
        """Take note of an operation that begins."""
        self._n_entered += 1
        work.order = self._n_entered
        self._works[work.ticket.key] = work
        if timeline is not None:
            work.lane = timeline.begin(work.task.label, work.nbytes)
        if self._shown is None:
            self._show(work)

    def get(self, key: int) -> Work:
        """Return what is pending under this key."""
        return self._works[key]

    def remove(self, key: int, *, has_failed: bool) -> None:
        """Take note that an operation is over; `has_failed`: this rank does nothing more."""
        self._works.pop(key, None)
        if self._shown != key:
            return
        self._shown = None
        if self._page is not None:
            self._page.end_op(OpState.FAILED if has_failed else OpState.IDLE)
        if not has_failed:
            for work in self._works.values():
                self._show(work)
                return

    def _show(self, work: Work) -> None:
        self._shown = work.ticket.key
        if self._page is not None:
            label = work.task.label.encode(errors="replace").decode()  # lone surrogates
            self._page.begin_op(label, work.order, work.nbytes)
