"""Events: what happens to a server, as its core gets it. Pure data."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from ringcomm.ps.control.agreement import Asked as Asked  # noqa: PLC0414 - it is an event, too
from ringcomm.ps.control.agreement import Command, Member
from ringcomm.ps.placement.replacement_workers import Beginning, Newcomer
from ringcomm.ps.server.core.actions import CoreRequest, Key


# --- requests for a unit ------------------------------------------------------------------------
class Arrived(NamedTuple):
    """A request for values has come, or comes again."""

    request: CoreRequest
    key: Key
    round_of: int | None = None  # the round that it contributes to; None: it does not


class Initialized(NamedTuple):
    """A push of the values that a table begins with, decoded."""

    key: Key
    request: CoreRequest
    payload: Any


class Assigned(NamedTuple):
    """A push of values, decoded."""

    key: Key
    request: CoreRequest
    payload: Any


class Contributed(NamedTuple):
    """A push of a gradient, decoded."""

    key: Key
    request: CoreRequest
    payload: Any
    is_held: bool = False
    lets_in: bool = False  # its worker was let into the round before


class Released(NamedTuple):
    """A request to end a round whose mean is held."""

    key: Key
    request: CoreRequest
    payload: Any
    drops: bool


class Read(NamedTuple):
    """A request for values as they are after enough updates."""

    key: Key
    request: CoreRequest


class Decided(NamedTuple):
    """A worker reports whether its contribution to a round of FirstOf counts in a unit."""

    key: Key
    request: CoreRequest
    is_in: bool


class Loaded(NamedTuple):
    """Values were replaced from outside: a checkpoint, or the state of an optimizer."""

    key: Key


# --- requests for the server --------------------------------------------------------------------
class Entered(NamedTuple):
    """A worker asks whether it is in a round of FirstOf; its table stands for all that share it."""

    request: CoreRequest


class Joined(NamedTuple):
    """A table asks in which round it begins to share the rounds of another."""

    request: CoreRequest
    table: int


class Ticked(NamedTuple):
    """A worker has completed as many steps as the clock of the request says."""

    request: CoreRequest


class ClockAwaited(NamedTuple):
    """A request waits until the slowest worker has completed so many steps."""

    request: CoreRequest


class Stopped(NamedTuple):
    """A moment asks that rounds end no more."""

    request: CoreRequest
    number: int


class Held(NamedTuple):
    """A moment asks for each unit, after so many rounds by table."""

    request: CoreRequest
    number: int
    rounds: Mapping[int, int]


class MomentEnded(NamedTuple):
    """A moment is over."""

    request: CoreRequest
    number: int
    keeps_copies: bool = False


class Settling(NamedTuple):
    """A request waits until nothing moves here."""

    request: CoreRequest


class MoveOrdered(NamedTuple):
    """A step of a migration, of the server that leads; see core.migration."""

    request: CoreRequest
    do: str
    key: Key
    content: dict[str, Any]


class Noted(NamedTuple):
    """A client has sent again all that came back from the move of an epoch."""

    rank: int
    key: Key
    epoch: int


class Begun(NamedTuple):
    """The leader itself begins a command."""

    command: Command


class StepDone(NamedTuple):
    """The leader has carried out a step of a command itself."""

    key: Hashable
    why_not: str


class Answered(NamedTuple):
    """A rank, or a server, has carried out an order; for the leader."""

    member: Member
    step: int
    answer: Any


class ProcessDied(NamedTuple):
    """A process died, which had servers: others have copies of them."""

    rank: int


class TookPlace(NamedTuple):
    """A newcomer has a place; beginning: of a worker."""

    request: CoreRequest
    newcomer: Newcomer
    beginning: Beginning | None
    beside: int  # the worker that stands still meanwhile; -1: none lives


class Retracted(NamedTuple):
    """A newcomer has no place after all."""

    request: CoreRequest
    rank: int


class HowFar(NamedTuple):
    """The server that leads asks how far all workers were: these have died, and none lives."""

    request: CoreRequest
    dead: Sequence[int]


class Died(NamedTuple):
    rank: int


class Left(NamedTuple):
    """A rank asks nothing more: it has left."""

    rank: int
    request: CoreRequest | None = None
    still_asks: bool = False  # it is a worker that only completes no more steps


# --- what the server does by itself -------------------------------------------------------------
class Without(NamedTuple):
    """A server says in which rounds of ps.FirstOf a worker was that died; see core.departures."""

    table: int
    worker: int
    rounds: Sequence[int]


class Taken(NamedTuple):
    """A partition was taken by the server that it was sent to; why: or why not."""

    key: Key
    part: int
    why: str


class Finished(NamedTuple):
    """All that an action Settled followed is done."""

    key: Key


class TimePassed(NamedTuple):
    pass


Event: TypeAlias = (
    Arrived | Initialized | Assigned | Contributed | Released | Read | Decided | Loaded | Entered
    | Joined | Ticked | ClockAwaited | Stopped | Held | MomentEnded | Settling | MoveOrdered
    | Noted | Asked | Begun | StepDone | Answered | ProcessDied | TookPlace | Retracted | HowFar
    | Died | Left | Without | Taken | Finished | TimePassed
)  # fmt: skip
