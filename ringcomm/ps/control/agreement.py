"""The server that leads runs commands; all who live carry out their orders, and answer. Pure.

| message | from -> to | the receiver |
|---|---|---|
| request | a rank -> leader | begins a command, or joins that of its key; replies when it is over |
| order | leader -> rank, or server | carries it out once, and answers |
| answer | to the leader | goes on with the command once all have answered who live |

A command is a script (commands.py): a generator that yields orders, and gets the answers. So each
reads from its first order to its last, and none of them knows of deaths: lose() is the one place
where those count. Commands run side by side; one that must not waits in Until.

An order is a request, as those of clients: see OrdersGiven. Both copies of a leader run the same
scripts, for they hear the same in the same order. The one that goes on in the place of the other
sends the orders again that are not answered. If a server is lost of which there is no copy, all
begin anew. Orders of before are void everywhere, for their numbers begin with the number of losses;
commands about tables are dropped, without a reply: who has asked for them fails by itself, as it
hears of the loss. Other commands run again from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from ringcomm.errors import RingcommError
from ringcomm.ps.server.core.actions import Action, CoreRequest, Fail, Reply, Step, Tell

T = TypeVar("T")

_NUMBERS: Final = 32  # bits of the number of an order, below the number of losses
_KEPT: Final = 64  # answers of a member, for orders that come again; a leader awaits fewer


class Member(NamedTuple):
    """A rank; or the server of that number, wherever it runs."""

    number: int
    is_server: bool = False


class Order(NamedTuple):
    """A step of a command: what its members are to do.

    Attributes:
        to: what each member is told beside.
        do: the name of what it does.
        until: the command goes on without the answers that are left then.
    """

    to: Mapping[Member, Any]
    do: str
    until: Callable[[], bool] | None = None


class Until(NamedTuple):
    """A step of a command that waits: looked at after each event."""

    is_so: Callable[[], bool]


class Do(NamedTuple):
    """A step of a command that the leader itself carries out; it gives why not, or ""."""

    actions: list[Action]


class Told(NamedTuple):
    """A step of a command that lasts: who has asked so far is replied, and it goes on."""

    content: Any


Answers: TypeAlias = dict[Member, Any]
Script: TypeAlias = Generator[Order | Until | Do | Told, Any, Any]


class Command(Protocol):
    """What a rank asks of the leader; commands of one key are one, which all who ask join."""

    @property
    def key(self) -> Hashable: ...

    @property
    def is_about_tables(self) -> bool:
        """True if it makes no sense any more once a server is lost."""

    def script(self, job: Any, asked: list[Asked]) -> Script:
        """Return what is to be done.

        It returns what the requests are replied with, and raises RefusedError if they are refused.

        Args:
            job: who lives, and what there is.
            asked: the requests for the command; more may come while it runs.
        """

    def awaited(self, job: Any, asked: list[Asked]) -> tuple[str, str, list[int]]:
        """Return for what it waits in Until: what, of which table, and which workers."""


class Asked(NamedTuple):
    """A rank asks for a command; for the leader."""

    request: CoreRequest
    command: Command


class RefusedError(Exception):
    """A command cannot be carried out."""


@dataclass
class _Running:
    command: Command
    script: Script
    asked: list[Asked]
    until: Callable[[], bool] | None = None
    performs: bool = False  # the leader does something itself
    step: int = 0  # of which answers are awaited
    orders: set[Member] = field(default_factory=set)  # who has not answered
    answers: Answers = field(default_factory=dict)
    given: Any = None  # to the script, with which it goes on

    @property
    def is_due(self) -> bool:
        return not self.orders if self.until is None else self.until()


class Agreement:
    """The commands that the server that leads runs.

    Args:
        job: see Command.script().
        n_losses: returns how many servers were lost.
    """

    def __init__(self, job: Any, n_losses: Callable[[], int]) -> None:
        self._job, self._n_losses = job, n_losses
        self._running: dict[Hashable, _Running] = {}
        self._n_steps = 0  # of all commands, in which members got orders
        self._gone: set[Member] = set()
        self._n_known = n_losses()

    # --- events ---------------------------------------------------------------------------------
    def ask(self, request: CoreRequest | None, command: Command) -> None:
        """A rank asks for a command, or None: the leader; due() follows, as after each event."""
        if not self._running:
            self._n_known = self._n_losses()
        self._begin([] if request is None else [Asked(request, command)], command)

    def _begin(self, asked: list[Asked], command: Command) -> None:
        running = self._running.get(command.key)
        if running is None:
            all_asked: list[Asked] = []
            script = command.script(self._job, all_asked)
            running = self._running[command.key] = _Running(command, script, all_asked)
        running.asked += asked

    def answered(self, member: Member, step: int, answer: Any) -> None:
        for running in self._running.values():
            if running.step == step and member in running.orders:
                running.orders.discard(member)
                running.answers[member] = answer

    def performed(self, key: Hashable, why_not: str) -> None:
        """The leader has done its own step of a command."""
        running = self._running[key]
        running.performs, running.given = False, why_not

    def lose(self, member: Member) -> None:
        """Wait no more for a member, which has left, or died."""
        self._gone.add(member)
        for running in self._running.values():
            running.orders.discard(member)
            running.asked[:] = [
                each for each in running.asked if member != Member(each.request.source)
            ]

    def due(self) -> list[Action]:
        """Return what follows from the last event."""
        if self._n_known != self._n_losses():
            self._n_known = self._n_losses()
            self._begin_anew()
        actions: list[Action] = []
        while (key := self._next()) is not None:
            actions += self._advance(key, self._running[key])
        return actions

    def _next(self) -> Hashable:
        """Return the key of a command that goes on; none does while the leader does something."""
        if any(each.performs for each in self._running.values()):
            return None
        return next((key for key, each in self._running.items() if each.is_due), None)

    def _begin_anew(self) -> None:
        """Take note that a server was lost: members take no more orders of before."""
        self.forget_tables()
        before, self._running = self._running, {}
        for running in before.values():
            self._begin(running.asked, running.command)

    def forget_tables(self) -> None:
        """Drop the commands about tables, of which there is none any more.

        Who has joined one with a command that is not about tables gets that alone.
        """
        for key, running in [*self._running.items()]:
            if running.command.is_about_tables:
                del self._running[key]
                for each in running.asked:
                    if not each.command.is_about_tables:
                        self._begin([each], each.command)

    # --- what there is --------------------------------------------------------------------------
    @property
    def is_running(self) -> bool:
        return bool(self._running)

    @property
    def awaits_answers(self) -> bool:
        return any(running.orders for running in self._running.values())

    def commands(self) -> list[Command]:
        return [each.command for each in self._running.values()]

    def asked(self, kind: type | None = None) -> list[Asked]:
        """Return the requests that wait, of one kind of command if given."""
        return [
            each for running in self._running.values() for each in running.asked
            if kind is None or isinstance(each.command, kind)
        ]  # fmt: skip

    def missing(self, rank: int) -> list[tuple[str, str, list[int]]]:
        """Return for what commands wait that concern a rank; see WorkerProgress.missing()."""
        found = []
        for running in self._running.values():
            told = {Member(each.request.source) for each in running.asked}
            if Member(rank) not in told | running.answers.keys():
                continue
            what, table, ranks = running.command.awaited(self._job, running.asked)
            if running.orders:
                ranks = sorted(each.number for each in running.orders if not each.is_server)
            found.append((what, table, ranks))
        return found

    def state(self) -> list[Member]:
        """Return what a copy is to know beside the requests, which ask there anew."""
        return sorted(self._gone)

    def load(self, state: Iterable[Iterable[Any]]) -> None:
        self._gone = {Member(*each) for each in state}

    # --- a command ------------------------------------------------------------------------------
    def _advance(self, key: Hashable, running: _Running) -> list[Action]:
        given, running.given, running.until = running.given, None, None
        running.orders.clear()
        try:
            step = running.script.send(given)
        except StopIteration as end:
            del self._running[key]
            return [Reply(each.request, content=end.value) for each in running.asked]
        except RefusedError as error:
            del self._running[key]
            return [Fail(each.request, str(error)) for each in running.asked]
        if isinstance(step, Do):
            running.performs = True
            return [Step(key, step.actions)]
        if isinstance(step, Until):
            running.until = step.is_so
            return []
        if isinstance(step, Told):
            told = [Reply(each.request, content=step.content) for each in running.asked]
            running.asked.clear()
            return [*told]
        return self._send(running, step)

    def _send(self, running: _Running, order: Order) -> list[Action]:
        tell: list[Action] = []
        self._n_steps += 1
        running.step = self._n_steps
        running.answers = running.given = {}
        if (is_enough := order.until) is not None:
            running.until = lambda: not running.orders or is_enough()
        for member, content in order.to.items():
            if member not in self._gone:
                running.orders.add(member)
                tell.append(Tell(*member, order.do, content, running.step))
        return tell


class _Given(NamedTuple, Generic[T]):
    member: Member
    order: T
    then: Callable[[Any], None] | None


class OrdersGiven(Generic[T]):
    """The orders of a server, to other servers and to ranks, that are not answered yet.

    A server asks as clients do: its orders have ascending numbers, and are sent again to who goes
    on in the place of one that died, or by who does. So each is carried out once, whoever dies: see
    OrdersTaken, and ringcomm.ps.server.homes.replication.Answers. Both copies of a server give the
    same ones. Those from before a loss are void.

    Args:
        send: sends a member an order of that number.
        n_losses: returns how many servers were lost.

    Attributes:
        last: the number of the last one.
    """

    def __init__(self, send: Callable[[Member, int, T], None], n_losses: Callable[[], int]) -> None:
        self._send, self._n_losses = send, n_losses
        self.last = 0
        self._given: dict[int, _Given[T]] = {}  # by number, ascending

    def give(self, member: Member, order: T, then: Callable[[Any], None] | None) -> None:
        """Give a member an order; then: gets its answer; None: it is none unless all is wrong."""
        self._drop_void()
        self.last = max(self.last, self._n_losses() << _NUMBERS) + 1
        self._given[self.last] = _Given(member, order, then)
        self._send(member, self.last, order)

    def _drop_void(self) -> None:
        if self.last >> _NUMBERS < self._n_losses():
            self._given.clear()

    def answered(self, number: int, answer: Any) -> None:
        self._drop_void()
        given = self._given.pop(number, None)
        if given is None:  # it is answered again, or void
            return
        if given.then is not None:
            given.then(answer)
        elif answer is not None:
            who = f"{'server' if given.member.is_server else 'rank'} {given.member.number}"
            raise RingcommError(f"{who} cannot carry out {given.order}: {answer}")

    def again(self, server: int | None = None) -> None:
        """Send what is not answered again: to a server, which goes on elsewhere; or to all."""
        self._drop_void()
        for number, given in self._given.items():
            if server is None or given.member == Member(server, is_server=True):
                self._send(given.member, number, given.order)

    def forget(self, member: Member) -> None:
        """Await nothing of a member that is gone."""
        self._given = {n: each for n, each in self._given.items() if each.member != member}

    @property
    def awaits_servers(self) -> bool:
        self._drop_void()
        return any(each.member.is_server for each in self._given.values())


class OrdersTaken:
    """The orders that a member has got: each is carried out once, and answered again if need be.

    Args:
        handlers: carry out orders, by name: content -> answer.
        n_losses: returns how many servers were lost, as far as this member knows.

    Attributes:
        handlers: see above; others may be added.
    """

    def __init__(
        self, handlers: Mapping[str, Callable[[Any], Any]], n_losses: Callable[[], int]
    ) -> None:
        self.handlers, self._n_losses = dict(handlers), n_losses
        self._answers: dict[int, Any] = {}  # in the order in which they were made

    def take(self, number: int, do: str, content: Any) -> tuple[bool, Any]:
        """Carry out an order; return whether it is to be answered, and the answer.

        One that is older than a loss is void: its command is over.
        """
        if number >> _NUMBERS < self._n_losses():
            return False, None
        if number not in self._answers:
            answer = self.handlers[do](content)
            self._answers[number] = answer
            if len(self._answers) > _KEPT:
                del self._answers[next(iter(self._answers))]
        return True, self._answers[number]
