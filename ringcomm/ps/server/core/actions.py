"""Actions: what the core returns, for the server to carry out in this order. Pure data."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from ringcomm.ps.protocol.frames import FrameHeader

Key: TypeAlias = tuple[int, int]  # of a unit: number of the table; partition, or 0 of a hash table
Partition: TypeAlias = tuple[int, int]


class CoreRequest(Protocol):
    """A request of a client: to the core, a header and whatever else the server needs."""

    @property
    def source(self) -> int: ...
    @property
    def header(self) -> FrameHeader: ...


class RoundContribution(NamedTuple):
    """A push that waits for its round."""

    worker: int
    request: Any
    payload: Any  # the gradient, decoded
    is_held: bool = False  # the mean of the round waits for a release


# --- requests -----------------------------------------------------------------------------------
class Carry(NamedTuple):
    """Decode a request, and give the core the event that it stands for."""

    request: Any


class Retry(NamedTuple):
    """Give a request to the core again, as if it came now."""

    request: Any


class Redirect(NamedTuple):
    """Send a request back with the owner of its partition: it has not been carried out."""

    request: Any


class Acknowledge(NamedTuple):
    """Say that a push came twice, and was carried out the first time."""

    key: Key
    request: Any


class Serve(NamedTuple):
    """Answer a request to read: enough is in the values now."""

    request: Any


class Reply(NamedTuple):
    """Answer a request that concerns no values."""

    request: Any
    clock: int = 0
    is_late: bool = False
    content: Any = None  # for JSON


class Reopen(NamedTuple):
    """Place all tables anew on the servers that live, and make this one's part; drop all else."""

    users: Mapping[int, Any]  # the tables that each rank uses, see Catalog.reopen()


class Step(NamedTuple):
    """Carry out a step of a command, and give the core the event StepDone."""

    key: Hashable  # of the command
    actions: list[Any]


class Discard(NamedTuple):
    """Drop a table here: nobody uses it any more."""

    table: int


class Tell(NamedTuple):
    """Give an order to a rank, or a server, perhaps this one; see ringcomm.ps.control.agreement."""

    dest: int
    is_server: bool
    do: str
    content: Any
    step: int = 0  # of a command that awaits the answer; 0: none does


class Fail(NamedTuple):
    """Answer a request with an error."""

    request: Any
    why: str


# --- values -------------------------------------------------------------------------------------
class Apply(NamedTuple):
    """Update a unit with a gradient at once, and say so."""

    key: Key
    request: Any
    payload: Any


class Write(NamedTuple):
    """Replace values, and say so; payload None: leave them, and say so."""

    key: Key
    request: Any
    payload: Any


class Hold(NamedTuple):
    """Compute the mean of a round, keep it, and reply to its workers how large it is."""

    key: Key
    number: int  # of rounds that will be over once this one is
    contributions: Sequence[RoundContribution]


class End(NamedTuple):
    """End a round: update a unit with the mean of contributions, or the one that is held."""

    key: Key
    number: int  # of rounds that are over then
    contributions: Sequence[RoundContribution]  # none if their mean is held
    drops: bool = False  # the mean
    release: Any = None  # payload of the release, which says what the mean is multiplied by


class Late(NamedTuple):
    """Say that a contribution came too late."""

    key: Key
    contribution: RoundContribution


class ReleaseDone(NamedTuple):
    """Say that the round which a request released is over."""

    key: Key
    request: Any


# --- units --------------------------------------------------------------------------------------
class Open(NamedTuple):
    """Allow C++ and mapped memory to answer for a unit, which this server owns."""

    key: Key
    epoch: int


class Close(NamedTuple):
    """Forbid both to answer for a unit: each request is for the core."""

    key: Key


class Retire(NamedTuple):
    """A partition is another server's; keep its memory, which clients may still read."""

    key: Key
    epoch: int


class Free(NamedTuple):
    """No client reads what was retired."""

    key: Key
    epoch: int


# --- snapshots ----------------------------------------------------------------------------------
class Take(NamedTuple):
    """Keep what a unit has now for a moment."""

    moment: int
    key: Key


class Drop(NamedTuple):
    """Keep nothing more for a moment; keeps_copies: but what is to be written to files."""

    moment: int
    keeps_copies: bool = False


# --- moves --------------------------------------------------------------------------------------
class Export(NamedTuple):
    """Send a copy of a partition to a server, or give the core the reason why not."""

    key: Key
    part: int
    dest: int


class Forget(NamedTuple):
    """Drop a partition, which another server has now, or which could not be taken."""

    key: Key
    part: int


class Moved(NamedTuple):
    """Partitions have new owners: from which server to which, one by one."""

    key: Key
    servers: Sequence[tuple[int, int]]


class Notify(NamedTuple):
    """Send clients the owners of the partitions of a unit."""

    ranks: Sequence[int]
    key: Key


class Settled(NamedTuple):
    """Give the core the event Finished, once all before this is done."""

    key: Key


Action: TypeAlias = (
    Carry | Retry | Redirect | Acknowledge | Serve | Reply | Apply | Write | Hold | End | Late
    | ReleaseDone | Open | Close | Retire | Free | Take | Drop | Export | Forget
    | Moved | Notify | Settled | Discard | Reopen | Step | Tell | Fail
)  # fmt: skip
