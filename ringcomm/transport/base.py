"""The seam of the wire: Transport. What it shares within a node is transport.node.SharedNode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ringcomm import _core
from ringcomm.arrays.base import Bytes

if TYPE_CHECKING:
    from ringcomm._core import Loop
    from ringcomm.transport.mail import Mail
    from ringcomm.transport.node.shm import SharedNode
    from ringcomm.transport.tags import TagLayout

ANY_SOURCE = -1
WireFault = _core.WireFault  # the wire refused an operation: a hint that a peer died


class Request(Protocol):
    """A message under way. Its buffer belongs to the transport until test() is True."""

    def test(self) -> bool:
        """Return True once it is complete; never blocks. Raises WireFault."""
        ...

    def cancel(self) -> None:
        """Give up a receive that has not been matched. No effect on a send."""
        ...

    @property
    def source(self) -> int:
        """The rank a completed receive came from."""
        ...


@dataclass(frozen=True)
class Arrived:
    """A control message: a packed Header and text, see ringcomm.transport.header."""

    source: int
    message: bytes


@dataclass(frozen=True)
class Died:
    """A rank's process is no more."""

    rank: int  # that rank
    reason: str  # what is known of how, in words
    blames: int  # the rank whose failure it followed, or itself


Event = Arrived | Died


class Transport(Protocol):
    """Point-to-point messages between the ranks 0..size-1 of one job.

    Messages of one (source, tag) arrive in the order they were sent. Nothing here blocks: waiting,
    with its deadline and its watch on peers, is the business of ringcomm.engine.progress alone.
    Thread-safe for one thread at a time, and any number that call control() and wake().
    """

    rank: int
    size: int
    nodes: tuple[int, ...]  # of each rank: the lowest rank of its node
    implementation: str  # what carries the messages: "Open MPI v5.0.11"
    tags: TagLayout  # the same on all ranks
    is_threaded: bool  # more than one thread may use it, one at a time
    runner: _core.Runner | None  # carries out recorded algorithms without Python, if the wire can
    ring_epoch: int  # version of the membership
    incarnation: int  # life of this rank

    @property
    def loop(self) -> Loop:
        """Advances what is under way in C++ without the GIL."""
        ...

    def mail(self) -> Mail:
        """Return the channel of letters; opened by the first call, at any time on each rank."""
        ...

    @property
    def node(self) -> SharedNode | None:
        """The memory that the ranks of this node share; None: there is none."""
        ...

    def isend(self, data: Bytes, dest: int, tag: int) -> Request:
        """Start to send; `data` must not change until the request is complete."""
        ...

    def irecv(self, out: Bytes, source: int, tag: int) -> Request:
        """Start to receive exactly out.nbytes bytes from source, or from ANY_SOURCE."""
        ...

    def control(self, dest: int, message: bytes) -> None:
        """Send a control message; best effort, never blocks, never raises for a dead peer."""
        ...

    def poll(self) -> list[Event]:
        """Return what happened since the last call. Each death is reported once."""
        ...

    def park(self, seconds: float) -> None:
        """Sleep for at most `seconds`, less if something may have arrived or wake() is called."""
        ...

    def wake(self) -> None:
        """End the park() of another thread, or let its next one return at once."""
        ...

    def abandon(self, requests: list[Request]) -> None:
        """Cancel own receives; keep requests and buffers alive for ever, peers may still write."""
        ...

    def ranks_of(self, comm: Any) -> tuple[int, ...]:
        """Return the ranks of an mpi4py communicator; ValueError if one is not a rank here."""
        ...

    def label(self, rank: int) -> str:
        """Return "rank 3 (host a, pid 4711)"."""
        ...

    def close(self, *, is_clean: bool) -> None:
        """Close the wire; collective if is_clean, local after a failure."""
        ...
