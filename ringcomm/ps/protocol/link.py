"""Sends and receives frames between clients and servers, with bodies of any size.

Frames of one sender arrive in order, whichever way their bodies go. Between hosts, small frames
gather while a message is under way, and leave together in the next. If both ranks are on one node,
a large body is in memory that they share, and is not copied here; between nodes it is a message.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from ringcomm._core import WireFault
from ringcomm.arrays.base import Bytes
from ringcomm.errors import RingcommError
from ringcomm.ps.protocol.body_memory import MemoryForBodies
from ringcomm.ps.protocol.frames import (
    HEADER_NBYTES,
    INLINE_MAX,
    META_MAX,
    Frame,
    FrameHeader,
    FrameKind,
    RequestHeader,
    Where,
    frame_of,
    frames,
    header_of_request,
    packed,
)
from ringcomm.transport.base import Transport, WireRequest
from ringcomm.transport.tags import P2P
from ringcomm.transport.unannounced_messages import SHORT_MESSAGE_MAX, ShortMessages

if TYPE_CHECKING:
    from ringcomm.ps.placement.partitions import Partition
    from ringcomm.ps.protocol.node_pipes import Pipes
    from ringcomm.ps.server.dense.partition import DensePartition


# --- large bodies ---------------------------------------------------------------------------------
class BodiesToSend:
    """Sends bodies; MPI goes on with all of them at the same time.

    Args:
        transport: what carries them.
        survivable: ranks without which the job goes on if they die.

    Attributes:
        new: bodies that wait for go_on().
        under_way: those with which it has begun.
    """

    def __init__(self, transport: Transport, survivable: Collection[int]) -> None:
        self._transport, self._survivable = transport, survivable
        self.new: deque[_Sending] = deque()  # any thread appends
        self.under_way: list[_Sending] = []
        self._dead: set[int] = set()

    def add(
        self, body: Bytes, dest: int, tag: int, is_filled: Callable[[], bool] | None = None
    ) -> None:
        """Send a body to a rank; any thread. It leaves at the next go_on() once it is filled."""
        self.new.append(_Sending(self._transport, body, dest, tag, is_filled))

    def go_on(self) -> int:
        """Go on with all of them, as far as that is possible without waiting.

        Returns:
            How many have left.
        """
        while self.new:
            sending = self.new.popleft()
            if sending.dest not in self._dead:
                self.under_way.append(sending)
        may_die = self._survivable
        left = [each for each in self.under_way if not is_over(each, may_die=each.dest in may_die)]
        n_left = len(self.under_way) - len(left)
        self.under_way = left
        return n_left

    def forget(self, rank: int) -> list[WireRequest]:
        """Send nothing to a dead rank any more; return what has begun, for abandon()."""
        self._dead.add(rank)
        for_it = [each.request for each in self.under_way if each.dest == rank]
        self.under_way = [each for each in self.under_way if each.dest != rank]
        return [request for request in for_it if request is not None]


class _Sending:
    """A message that the thread that drives the loop puts on the wire."""

    def __init__(
        self,
        transport: Transport,
        body: Bytes,
        dest: int,
        tag: int,
        is_filled: Callable[[], bool] | None,
    ) -> None:
        self._transport, self._body, self._tag = transport, body, tag
        self._is_filled = is_filled
        self.dest = dest
        self.request: WireRequest | None = None

    def test(self) -> bool:
        if self.request is None:
            if self._is_filled is not None and not self._is_filled():
                return False
            self.request = self._transport.isend(self._body, self.dest, self._tag)
        return self.request.test()


def is_over(request: WireRequest | _Sending, *, may_die: bool) -> bool:
    """Test a request; if its rank dies, it is over with forget(), once that is known."""
    try:
        return request.test()
    except WireFault:
        if may_die:
            return False
        raise


# --- frames that are longer than a message --------------------------------------------------------
def pieces(frame: bytes, number: int, most: int) -> Iterator[bytes]:
    """Yield a frame in pieces, each of which is a frame itself.

    Args:
        frame: as bytes.
        number: that no other long frame of this sender has.
        most: bytes of a piece; a multiple of 8.
    """
    room = most - HEADER_NBYTES
    for at in range(0, len(frame), room):
        header = FrameHeader(FrameKind.PIECE, sequence=number, clock=len(frame), place=at)
        yield packed(header, b"", frame[at : at + room])


class Joiner:
    """Joins the pieces that one rank receives; other frames may come between them."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, int], bytearray] = {}

    def forget(self, source: int) -> None:
        self._parts = {key: whole for key, whole in self._parts.items() if key[0] != source}

    def add(self, source: int, piece: Frame) -> Frame | None:
        """Take a piece; return the frame if it was the last.

        Raises:
            RingcommError: one before it is missing.
        """
        header, key = piece.header, (source, piece.header.sequence)
        whole = self._parts.setdefault(key, bytearray())
        if len(whole) != header.place:
            raise RingcommError(
                f"ps: of a frame of {header.clock} bytes from rank {source} came {len(whole)} "
                f"bytes, and then those from {header.place} on"
            )
        whole += piece.inline
        if len(whole) < header.clock:
            return None
        return frame_of(bytes(self._parts.pop(key)))


_NO_BODY: Final = np.empty(0, np.uint8)


@dataclass(slots=True)
class Delivery:
    """A frame whose body is here.

    Attributes:
        source: rank that sent it.
        header: see ringcomm.ps.protocol.frames.
        meta: explains it.
        body: the payload. In shared memory it is the sender's, and valid until the reply.
    """

    source: int
    header: FrameHeader
    meta: bytes
    body: Bytes


@dataclass(slots=True)
class _QueuedFrame:
    """A frame that waits for its body, or behind such a frame of its sender."""

    delivery: Delivery
    request: WireRequest | None


class Link:
    """This rank's end of the wire to all others.

    Args:
        transport: what carries it.
        messages: carries messages of several frames between hosts.
        context: number that only this link has among the groups of the job.
        place_for: returns memory for a body that comes as a message; None: new memory.
        pipes: carry frames between ranks of this node, once connected; None: `messages` do.
        survivable: ranks without which the job goes on if they die; see forget().

    Attributes:
        may_read: ranks may read the memory of blocks.
        memory_for_bodies: that travel as messages.
        bodies: that are sent as messages.
        n_moved: frames from other nodes, and bodies to them: some are no deliveries yet.
    """

    may_read = True

    def __init__(
        self,
        transport: Transport,
        messages: ShortMessages,
        context: int,
        place_for: Callable[[FrameHeader], Bytes | None],
        pipes: Pipes | None = None,
        *,
        survivable: Collection[int] = (),
    ) -> None:
        self._transport = transport
        self._survivable = survivable
        self._short_messages = messages
        self._context = context
        self._place_for = place_for
        self._pipes = pipes  # stay alive as long as the link
        self._endpoint = None if pipes is None else pipes.endpoint
        self._streams = itertools.count()
        self._long = itertools.count()  # numbers of frames that are sent in pieces
        self._joiner = Joiner()
        # send() may run in any thread: it only appends to these.
        self._outgoing: list[deque[bytes]] = [deque() for _ in range(transport.size)]
        self.bodies = BodiesToSend(transport, survivable)
        self._queues: list[deque[_QueuedFrame]] = [deque() for _ in range(transport.size)]
        self._n_waiting = self.n_moved = 0
        self._dead: set[int] = set()
        self.memory_for_bodies = MemoryForBodies()

    def forget(self, rank: int) -> None:
        """Drop what a dead rank has sent, and what is for it; in the thread that drives.

        From now on no rank of this node reads its blocks, which another server may go on with.
        """
        self._dead.add(rank)
        node = self._transport.node
        if node is not None and self.shares_memory(rank):
            node.memory_of(rank).withdraw()
        if self._endpoint is not None:
            self._endpoint.forget(rank)
        self._outgoing[rank].clear()
        receives = [each.request for each in self._queues[rank] if each.request is not None]
        self._n_waiting -= len(receives)
        self._queues[rank].clear()
        self._joiner.forget(rank)
        self._transport.abandon([*receives, *self.bodies.forget(rank)])

    def shares_memory(self, rank: int) -> bool:
        t = self._transport
        return t.node is not None and t.nodes[rank] == t.nodes[t.rank]

    def holds(self, x: Bytes) -> bool:
        node = self._transport.node
        return node is not None and node.memory.holds(x)

    def place_of(self, x: Bytes) -> int:
        """Return the place of shared memory of this rank, as view() of another rank takes it."""
        node = self._transport.node
        assert node is not None
        return node.offset_of(x)

    def view(self, rank: int, place: int, nbytes: int) -> Bytes:
        """Return a view of the memory of a rank that shares_memory(). Raises ValueError."""
        node = self._transport.node
        if node is None:
            raise ValueError(f"rank {rank} shares no memory with this one")
        return node.view(rank, place, nbytes)

    def send(
        self,
        dest: int,
        header: FrameHeader,
        meta: bytes = b"",
        body: Bytes = _NO_BODY,
        *,
        is_filled: Callable[[], bool] | None = None,
    ) -> None:
        """Send a frame; any thread. It leaves at the next poll().

        Args:
            dest: rank of the job.
            header: place and n_body are filled in.
            meta: of any length; beyond META_MAX there is less room for a body beside it.
            body: kept until it is sent. A large one in memory that `dest` maps is read there: it
                must not change until `dest` has replied.
            is_filled: of a large body in other memory: it leaves once this is true; None: it is.
        """
        if dest in self._dead:
            return
        if not body.nbytes or body.nbytes <= INLINE_MAX - max(0, len(meta) - META_MAX):
            self._put(dest, packed(header, meta, body.data if body.nbytes else b""))
            return
        node = self._transport.node if self.shares_memory(dest) else None
        if node is not None and node.memory.holds(body):
            header = header._replace(where=Where.SHARED, place=node.offset_of(body))
        else:
            tags = self._transport.tags
            tag = tags.tag(self._context, next(self._streams) % tags.n_streams, P2P)
            header = header._replace(where=Where.MESSAGE, place=tag)
            self.bodies.add(body, dest, tag, is_filled)
        self._put(dest, packed(header._replace(n_body=body.nbytes), meta))

    def ask(self, dest: int, header: RequestHeader, meta: bytes, body: Bytes) -> None:
        if self._endpoint is not None and self._endpoint.ask(dest, *header, meta, body):
            return
        self.send(dest, header_of_request(header), meta, body)

    def take_acks(self) -> list[tuple[int, int]]:
        """Return the acks, (sequence, clock), of requests that were carried out.

        Those of one sender came before its frames that the last poll() returned.
        """
        return [] if self._endpoint is None else self._endpoint.take_acks()

    def await_ack(self, dest: int, sequence: int, limit_ns: int, taken: int) -> int:
        """Look for the ack of a request until it comes, without driving; return its clock.

        Returns -1 if something else comes, or if it does not come within limit_ns: poll() then.
        The same ack may be returned again, until a call passes its sequence as `taken`.
        """
        if self._endpoint is None or not self._endpoint.reaches(dest):
            return -1
        return self._endpoint.await_ack(sequence, limit_ns, taken)

    def _put(self, dest: int, frame: bytes) -> None:
        if len(frame) > SHORT_MESSAGE_MAX:
            for piece in pieces(frame, next(self._long), SHORT_MESSAGE_MAX):
                self._put(dest, piece)
        elif self._endpoint is not None and self._endpoint.reaches(dest):
            self._endpoint.send(dest, frame)
        else:
            self._outgoing[dest].append(frame)

    @property
    def has_frames(self) -> bool:
        """True if a frame from this node waits for poll()."""
        return self._endpoint is not None and self._endpoint.has_frames

    def poll(self, *, only_near: bool = False) -> list[Delivery]:
        """Advance the wire; return the frames that have arrived, those of each sender in order.

        Args:
            only_near: take frames from this node, and leave messages of other hosts.
        """
        if not only_near:
            self.flush()
            for message in self._short_messages.collect():
                for frame in frames(message.data):
                    self.n_moved += 1
                    self._admit(message.source, frame)
        arrived = [] if self._endpoint is None else self._endpoint.collect()
        if only_near and not self._n_waiting and len(arrived) == 1:  # as a rule
            (source, data), arrived = arrived[0], []
            frame = frame_of(data)
            if frame.header.where <= 1 and frame.header.kind != FrameKind.PIECE:
                body = np.frombuffer(frame.inline, np.uint8) if frame.inline else _NO_BODY
                return [Delivery(source, frame.header, frame.meta, body)]
            self._admit(source, frame)
        for source, data in arrived:
            self._admit(source, frame_of(data))
        return list(self._arrived())

    def enter(self) -> None:
        """Carry out nothing without Python until leave(); around poll() and what follows."""
        if self._endpoint is not None:
            self._endpoint.enter()

    def leave(self) -> None:
        if self._endpoint is None:
            return
        if self._n_waiting:
            for source, queue in enumerate(self._queues):
                if queue:  # the next frames of this rank must not overtake it
                    self._endpoint.hold(source)
        self._endpoint.leave()

    def open(self, partition: Partition, epoch: int, part: DensePartition) -> None:
        """Carry out pushes for a partition without Python."""
        if self._endpoint is not None:
            self._endpoint.open(*partition, epoch, part.block_updater)

    def close(self, partition: Partition) -> None:
        """Carry out all requests for a partition in Python."""
        if self._endpoint is not None:
            self._endpoint.close(*partition)

    @property
    def carried_out(self) -> tuple[int, int]:
        """Number of requests that needed no Python, and the bytes of their bodies."""
        return (
            (0, 0) if self._endpoint is None else (self._endpoint.n_requests, self._endpoint.n_body)
        )

    @property
    def waits_to_leave(self) -> bool:
        is_full = self._endpoint is not None and self._endpoint.n_unsent
        return bool(self.bodies.new or any(self._outgoing) or is_full)

    @property
    def is_busy(self) -> bool:
        return bool(
            self.bodies.new
            or self.bodies.under_way
            or self._n_waiting
            or self._short_messages.n_unsent
            or (
                self._endpoint is not None
                and (self._endpoint.n_unsent or self._endpoint.has_frames)
            )
            or any(self._outgoing)
        )

    @property
    def is_streaming(self) -> bool:
        """True while a body is under way as a message."""
        return bool(self.bodies.under_way or self._n_waiting)

    @property
    def n_queued(self) -> int:
        return sum(map(len, self._outgoing)) + self._n_waiting

    def flush(self) -> None:
        """Put on the wire what waits to leave; poll() does so, too."""
        for dest, queue in enumerate(self._outgoing):
            if dest in self._dead:
                queue.clear()  # another thread was about to send
            while queue:
                batch = [queue.popleft()]
                room = SHORT_MESSAGE_MAX - len(batch[0])
                while queue and len(queue[0]) <= room:
                    room -= len(queue[0])
                    batch.append(queue.popleft())
                self._short_messages.send(dest, batch[0] if len(batch) == 1 else b"".join(batch))
        if self.bodies.new or self.bodies.under_way:
            self.n_moved += self.bodies.go_on()

    def _admit(self, source: int, frame: Frame) -> None:
        if source in self._dead:
            return
        if frame.header.kind == FrameKind.PIECE:
            whole = self._joiner.add(source, frame)
            if whole is None:
                return
            frame = whole
        header, request = frame.header, None
        body: Bytes = np.frombuffer(frame.inline, np.uint8)
        if header.where == Where.SHARED:
            node = self._transport.node
            assert node is not None
            body = node.view(source, header.place, header.n_body)
        elif header.where == Where.MESSAGE:
            place = self._place_for(header)
            body = self.memory_for_bodies.take(header.n_body) if place is None else place
            request = self._transport.irecv(body, source, header.place)
            self._n_waiting += 1
        self._queues[source].append(
            _QueuedFrame(Delivery(source, header, frame.meta, body), request)
        )

    def _arrived(self) -> Iterable[Delivery]:
        for source, queue in enumerate(self._queues):
            may_die = source in self._survivable
            while queue and (
                queue[0].request is None or is_over(queue[0].request, may_die=may_die)
            ):
                incoming = queue.popleft()
                self._n_waiting -= incoming.request is not None
                yield incoming.delivery
