"""A worker enters rounds of ps.FirstOf(k): once for all blocks that its gradient is part of.

    worker -> blocks    PUSH, to each: kept, and counted for nothing yet
    worker -> server    ENTER/ASK, behind all of them: is this worker among the first k?
    server -> worker    OK or LATE
    worker -> blocks    ENTER/IN, or OUT: the block counts what it keeps, or drops it

One server answers for a table, or for all tables of an optimizer. So a gradient counts everywhere
or nowhere, and a round has the same k workers in every block. A worker asks when everything has
been pushed, so one whose gradient is slow, or fails on the way, is not among the k. It asks earlier
if the pushes have used up its credit, which comes back once the servers need not keep them. Hash
tables ask first, and send their rows only if they are in.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ringcomm.ps.client.future import Future
from ringcomm.ps.client.request import Request
from ringcomm.ps.protocol.frames import EntryOption, FrameKind, Status

if TYPE_CHECKING:
    from ringcomm.ps.client.client import Client
    from ringcomm.ps.client.future import Pushed
    from ringcomm.ps.protocol.link import Delivery


class EntryReply(NamedTuple):
    """The reply of the server that decides on rounds.

    Attributes:
        is_in: this worker is in the round that it asked for.
        rounds: for how many rounds the workers are decided.
    """

    is_in: bool
    rounds: int


def request_entry(
    client: Client, label: str, table: int, number: int, *, join: int | None = None
) -> Future[EntryReply]:
    """Ask to be in a round of a table, behind all requests of this worker; any thread.

    Args:
        client: of this rank.
        label: for errors.
        table: that stands for all that share its rounds.
        number: of the round.
        join: ask instead in which round this table begins to share them.
    """
    replies: list[EntryReply] = []

    def take(reply: Delivery) -> None:
        replies.append(EntryReply(reply.header.status == Status.OK, reply.header.clock))

    request = Request(
        FrameKind.ENTER, server=client.servers[table % len(client.servers)], table=table,
        clock=number, option=EntryOption.ASK if join is None else EntryOption.JOIN, place=join or 0,
        on_reply=take,
    )  # fmt: skip
    future = Future(client, label, 1, lambda: replies[0])
    client.send_control([request], future)
    return future


@dataclass(eq=False)
class PendingPush:
    """A push that its blocks keep until it is decided whether it counts.

    Attributes:
        future: of the push; takes a reply more than it has requests.
        table: number of the table.
        parts: its blocks.
        step: the pushes that count together with it; None before it has a round.
        is_decided: the blocks know, or are going to.
    """

    future: Future[Pushed]
    table: int
    parts: list[int]
    step: PendingStep | None = None
    is_decided: bool = False


@dataclass(eq=False)
class PendingStep:
    """Pushes that count together, or not at all.

    Attributes:
        number: of their round, counted by the first of the tables that share it.
        pushes: to these tables.
        is_asked: the server has been asked for the round.
        outcome: the server's decision.
        error: raised in its place.
    """

    number: int
    pushes: list[PendingPush] = field(default_factory=list)
    is_asked: bool = False
    outcome: EntryOption | None = None
    error: Exception | None = None


class FirstOfRounds:
    """The rounds of one table, or of several that share them, as this worker goes through them.

    Args:
        client: of this rank.
        is_shared: the owner calls enter() after the pushes to all tables of a step; else each push
            is a step of its own.

    Attributes:
        n_missed: rounds that went by without this worker.
    """

    def __init__(self, client: Client, *, is_shared: bool = False) -> None:
        self._client = client
        self.is_shared = is_shared
        self.n_missed = 0
        self._first = -1  # the table that stands for all
        self._began: dict[int, int] = {}  # by table: the round of the first that was its round 0
        self._last: dict[int, int] = {}  # by table: the round of the last push
        self._round = 0  # of the next push
        self._open: PendingStep | None = None
        self._lock = threading.Lock()

    def restart(self) -> None:
        """Count from 0, in tables that are added anew."""
        with self._lock:
            self._first, self._round, self._open = -1, 0, None
            self.n_missed = 0
            self._began.clear()
            self._last.clear()

    def add(self, table: int, rounds: int = 0) -> None:
        """Add a new table to these rounds. Collective, between two steps.

        Args:
            table: its number.
            rounds: the number of its rounds that went by before this worker joined.
        """
        began = 0
        if self._began:
            reply = request_entry(self._client, "rounds", self._first, 0, join=table).wait()
            began = reply.rounds
        else:
            self._first = table
        self._began[table] = began
        self._round = max(self._round, began + rounds)

    def round_of(self, table: int) -> int:
        """Return how many rounds of a table are to be over before the next pull."""
        return max(0, self._round - self._began[table])

    def last_of(self, table: int) -> int:
        return self._last.get(table, -1)

    def note_pulled(self, table: int, rounds: int) -> None:
        with self._lock:
            n_more = max(0, self._began[table] + rounds - self._round)
            self._round += n_more
            self.n_missed += n_more

    def round_for(self, push: PendingPush) -> int:
        """Return the round of a push, as its table counts them; the first request draws it."""
        began = self._began[push.table]
        with self._lock:
            if push.step is None:
                push.step = self._open or PendingStep(self._round)
                push.step.pushes.append(push)
                if self.is_shared:
                    self._open = push.step
                else:
                    self._round += 1
                self._last[push.table] = push.step.number - began
        return push.step.number - began

    def sent(self, push: PendingPush) -> None:
        """Go on with a push, all requests of which are under way."""
        if push.step is not None and not self.is_shared:
            self._ask(push.step)
        self._decide(push)

    def hurry(self, push: PendingPush) -> None:
        """Bring back the credit that a push, or the rest of it, is to wait for."""
        step = push.step or self._open
        if step is not None:
            self._ask(step)
        self._decide(push)

    def enter(self) -> None:
        """End the step: all tables that share rounds have been pushed to."""
        with self._lock:
            step, self._open = self._open, None
            if step is None:
                return
            self._round = max(self._round, step.number + 1)
        self._ask(step)

    def _ask(self, step: PendingStep) -> None:
        with self._lock:
            if step.is_asked:
                return
            step.is_asked = True
        future = request_entry(self._client, "enter", self._first, step.number)
        self._client.undecided.add(future)
        future.then(lambda reply: self._on_decision(step, reply))

    def _on_decision(self, step: PendingStep, reply: Future[EntryReply]) -> None:
        """Pass the outcome of a step on to the blocks; called in the loop."""
        outcome, problem = None, None
        try:
            outcome = EntryOption.IN if reply.result().is_in else EntryOption.OUT
        except Exception as error:  # noqa: BLE001 - raised where a push is waited for
            problem = error
        with self._lock:
            step.outcome, step.error = outcome, problem
            self.n_missed += outcome == EntryOption.OUT
            pushes = list(step.pushes)
        try:
            for push in pushes:
                self._decide(push)
        finally:
            self._client.undecided.discard(reply)

    def _decide(self, push: PendingPush) -> None:
        """Send the blocks of a push the outcome of its step, behind the push; once."""
        if push.step is not None and push.step.error is not None:
            push.future.fail(push.step.error)
            return
        with self._lock:
            if push.step is None or push.step.outcome is None or push.is_decided:
                return
            push.is_decided = True
            number, outcome = push.step.number - self._began[push.table], push.step.outcome
        told = Future(self._client, push.future.label, len(push.parts), lambda: None)
        told.then(lambda told: self._on_told(push, told))
        requests = [
            Request(FrameKind.ENTER, (push.table, part), clock=number, option=outcome)
            for part in push.parts
        ]
        self._client.send_control(requests, told)

    def _on_told(self, push: PendingPush, told: Future[None]) -> None:
        """Count the outcome as a reply: servers that owe the others stay named in the future."""
        try:
            told.result()
        except Exception as error:  # noqa: BLE001 - raised where the push is waited for
            push.future.fail(error)
        else:
            push.future.replied()
