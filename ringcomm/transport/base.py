"""The interface of the layer that carries messages: a Transport, and its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ringcomm._core import Runner
from ringcomm.arrays.base import Bytes

if TYPE_CHECKING:
    from ringcomm._core import Loop, PeerMessages
    from ringcomm.transport.membership.view import View
    from ringcomm.transport.node.shared_memory import SharedNode
    from ringcomm.transport.tags import TagLayout
    from ringcomm.transport.unannounced_messages import ShortMessages

ANY_SOURCE = -1
PROC_NULL = -1000  # nobody. Not MPI's number: in MPICH, that is ANY_SOURCE here


class WireRequest(Protocol):
    """A message under way, or another event that an operation waits for.

    The transport owns the buffer of a message until test() returns True.
    """

    def test(self) -> bool:
        """Return True if the request is complete; never blocks. Raises WireFault."""
        ...

    def cancel(self) -> None:
        """Give up a receive that has not been matched. Does nothing for sends and most events."""
        return  # not abstract


class ArrivedMessage(NamedTuple):
    """A control message: a packed ringcomm.transport.control_header.Header, then text."""

    source: int
    message: bytes


class PeerDied(NamedTuple):
    rank: int
    reason: str  # how it ended, in words
    blames: int  # the rank that failed first: `rank`, or another whose failure ended `rank`


Event = ArrivedMessage | PeerDied


class Transport(Protocol):
    """Point-to-point messages between the ranks 0..size-1 of one job.

    Messages with the same source and tag arrive in the order they were sent. Only park()
    blocks; ringcomm.engine.progress calls it with a deadline, and watches peers. One thread at
    a time may use a transport; any number of threads may call control() and wake() meanwhile.
    """

    rank: int
    size: int
    nodes: tuple[int, ...]  # for each rank, the lowest rank of its node
    implementation: str  # the library that carries the messages: "Open MPI v5.0.11"
    tags: TagLayout  # the same on all ranks
    is_threaded: bool  # different threads may use this transport in turn
    runner: Runner | None  # carries out recorded algorithms without Python; None: there is none
    ring_epoch: int  # number of earlier transports; the same on all ranks

    @property
    def loop(self) -> Loop:
        """The loop that advances operations in C++, without the GIL."""
        ...

    def short_messages(self) -> ShortMessages:
        """Return the channel of short messages. Ranks may call this at different times."""
        ...

    @property
    def node(self) -> SharedNode | None:
        """The memory that the ranks of this node share; None if they share none."""
        ...

    @property
    def view(self) -> View:
        """The view of the job whose members this transport connects."""
        ...

    def messages(self, *, may_read: bool) -> PeerMessages:
        """Return the messages of send(), see make_peer_messages(). The first call decides."""
        ...

    def wire_ranks(self, ranks: list[int]) -> list[int]:
        """Return the numbers by which `runner` knows these ranks."""
        ...

    def isend(self, data: Bytes, dest: int, tag: int) -> WireRequest:
        """Start to send; `data` must not change until the request is complete."""
        ...

    def irecv(self, out: Bytes, source: int, tag: int) -> WireRequest:
        """Start to receive exactly out.nbytes bytes from source."""
        ...

    def control(self, dest: int, message: bytes) -> None:
        """Send a control message; best effort, never raises for a dead peer."""
        ...

    def poll(self) -> list[Event]:
        """Return the events since the last call. Each death is reported once."""
        ...

    def park(self, seconds: float) -> None:
        """Sleep for `seconds`, or until a message may have arrived or another thread calls wake().

        Returns at once if another thread has called wake() since the last park().
        """
        ...

    def wake(self) -> None:
        """End the park() of another thread; if there is none, the next park() returns at once."""
        ...

    def abandon(self, requests: list[WireRequest]) -> None:
        """Cancel receives, but not sends.

        Keeps all requests and buffers alive for ever, as peers may still use them.
        """
        ...

    def ranks_of(self, comm: Any) -> tuple[int, ...]:
        """Return the ranks of an mpi4py communicator. Raises ValueError for unknown processes."""
        ...

    def label(self, rank: int) -> str:
        """Return the text that names a rank, such as "rank 3 (host a, pid 4711)"."""
        ...

    def close(self, *, is_clean: bool) -> None:
        """Close the wire: a collective call if is_clean, a local one after a failure."""
        ...
