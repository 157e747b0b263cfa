"""How a worker enters rounds of ps.FirstOf(k): once for all blocks that its gradient has a part in.

    worker -> blocks    PUSH, to each: kept, and counted for nothing yet
    worker -> server    ENTER/ASK, behind all of them: is this worker among the first k?
    server -> worker    OK or LATE
    worker -> blocks    ENTER/IN, or OUT: the block counts what it keeps, or drops it

One server answers for a table, or for all tables of an optimizer. So a gradient counts everywhere
or nowhere; a round has the same k workers in every block; and who is slow to make its gradient, or
fails on the way, is not among them, for it asks when all has been pushed. It asks earlier if what
the servers keep has used up its credit, which comes back once they need not keep it. Hash tables
ask first, and send their rows only if they are in.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ringcomm.ps.client import Ask
from ringcomm.ps.frames import Entry, Kind, Status
from ringcomm.ps.future import Future

if TYPE_CHECKING:
    from ringcomm.ps.client import Client
    from ringcomm.ps.future import Pushed
    from ringcomm.ps.link import Delivery


class Answer(NamedTuple):
    """The answer of the server that lets workers into rounds.

    Attributes:
        is_in: this worker is in the round that it asked for.
        rounds: of so many it is known who is in them.
    """

    is_in: bool
    rounds: int


def ask_entry(
    client: Client,
    label: str,
    table: int,
    number: int,
    *,
    option: Entry = Entry.ASK,
    place: int = 0,
) -> Future[Answer]:
    """Ask for a round of a table, behind all that this worker has sent; any thread.

    Args:
        client: of this rank.
        label: of the future.
        table: that stands for all that share its rounds.
        number: of the round.
        option: ASK, or JOIN: in which round the table `place` begins to share them.
        place: see option.
    """
    answers: list[Answer] = []

    def note(reply: Delivery) -> None:
        answers.append(Answer(reply.header.status == Status.OK, reply.header.clock))

    future: Future[Answer] = Future(client, label, 1, lambda: answers[0], client.timestamp())
    server = table % client.n_servers
    ask = Ask(
        Kind.ENTER, server=server, table=table, clock=number, option=option, place=place,
        on_reply=note,
    )  # fmt: skip
    client.post([ask], future)
    return future


@dataclass(eq=False)
class Push:
    """A push whose blocks keep it until it is known whether it counts.

    Attributes:
        future: of the push; takes a reply more than it has requests.
        table: that it is to.
        parts: blocks of that.
        step: what counts together with it; None before it has a round.
        is_told: the blocks know, or are going to.
    """

    future: Future[Pushed]
    table: int
    parts: list[int]
    step: Step | None = None
    is_told: bool = False


@dataclass(eq=False)
class Step:
    """Pushes that count together, or not at all.

    Attributes:
        number: of their round, counted by the first of the tables that share it.
        pushes: to these tables.
        is_asked: the server has been asked for the round.
        outcome: what it has said.
        error: what has come in the place of that.
    """

    number: int
    pushes: list[Push] = field(default_factory=list)
    is_asked: bool = False
    outcome: Entry | None = None
    error: Exception | None = None


class Entering:
    """The rounds of one table, or of several that share them, as this worker goes through them.

    Args:
        client: of this rank.
        is_shared: enter() follows the pushes to all tables of a step; else the table's own push
            calls it.
    """

    def __init__(self, client: Client, *, is_shared: bool = False) -> None:
        self._client = client
        self.is_shared = is_shared
        self._first = -1  # the table that stands for all
        self._began: dict[int, int] = {}  # by table: the round of the first that was its round 0
        self._last: dict[int, int] = {}  # by table: the round of the last push
        self._round = 0  # of the next push
        self._open: Step | None = None
        self._lock = threading.Lock()

    def add(self, table: int) -> None:
        """Let a table that is new share these rounds. Collective, between two steps."""
        began = 0
        if self._began:
            asked = ask_entry(
                self._client, "rounds", self._first, 0, option=Entry.JOIN, place=table
            )
            began = asked.wait().rounds
        else:
            self._first = table
        self._began[table] = began

    def round_of(self, table: int) -> int:
        """Return how many rounds of a table are to be over before what is pulled next."""
        return max(0, self._round - self._began[table])

    def last_of(self, table: int) -> int:
        """Return the round of the last push to a table."""
        return self._last.get(table, -1)

    def saw(self, table: int, rounds: int) -> None:
        """Take note of how many rounds of a table are in values that were pulled."""
        with self._lock:  # after rounds that went by without this worker
            self._round = max(self._round, self._began[table] + rounds)

    def number(self, push: Push) -> int:
        """Return the round of a push, as its table counts them; the first request draws it."""
        began = self._began[push.table]
        with self._lock:
            if push.step is None:
                push.step = self._open or Step(self._round)
                push.step.pushes.append(push)
                if self.is_shared:
                    self._open = push.step
                else:
                    self._round += 1
                self._last[push.table] = push.step.number - began
        return push.step.number - began

    def sent(self, push: Push) -> None:
        """Go on with a push, all of which is on its way."""
        if push.step is not None and not self.is_shared:
            self._ask(push.step)
        self._tell_if_known(push)

    def hurry(self, push: Push) -> None:
        """Do what gives back the credit that a push, or what is left of it, is to wait for."""
        step = push.step or self._open
        if step is not None:
            self._ask(step)
        self._tell_if_known(push)

    def enter(self) -> None:
        """End the step to which all tables that share rounds have been pushed."""
        with self._lock:
            step, self._open = self._open, None
            if step is None:
                return
            self._round = max(self._round, step.number + 1)
        self._ask(step)

    def _ask(self, step: Step) -> None:
        with self._lock:
            if step.is_asked:
                return
            step.is_asked = True
        future = ask_entry(self._client, "enter", self._first, step.number)
        self._client.undecided.add(future)
        future.then(lambda answered: self._note_outcome(step, answered))

    def _note_outcome(self, step: Step, answered: Future[Answer]) -> None:
        """Let the blocks know what became of a step; called by whoever drives."""
        outcome, problem = None, None
        try:
            outcome = Entry.IN if answered.result().is_in else Entry.OUT
        except Exception as error:  # noqa: BLE001 - it is for who waits for a push
            problem = error
        with self._lock:
            step.outcome, step.error = outcome, problem
            pushes = list(step.pushes)
        try:
            for push in pushes:
                self._tell_if_known(push)
        finally:
            self._client.undecided.discard(answered)

    def _tell_if_known(self, push: Push) -> None:
        """Send the blocks of a push what became of its step, behind the push; once."""
        if push.step is not None and push.step.error is not None:
            push.future.fail(push.step.error)
            return
        with self._lock:
            if push.step is None or push.step.outcome is None or push.is_told:
                return
            push.is_told = True
            number, outcome = push.step.number - self._began[push.table], push.step.outcome
        push.future.expect(len(push.parts))
        self._client.post(
            [
                Ask(Kind.ENTER, (push.table, part), clock=number, option=outcome)
                for part in push.parts
            ],
            push.future,
        )
        push.future.replied(-1)
