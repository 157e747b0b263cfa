"""The wire of the parameter server: frames between clients and servers, bodies of any size.

Frames of one sender arrive in order, whatever way their bodies take. Small ones gather in a letter
while the one before is on its way. A large body stands in memory that both ranks map, if they share
a node: then nothing is copied here; between nodes it is a message.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ringcomm.arrays.base import Bytes
from ringcomm.ps.frames import (
    HEADER_NBYTES,
    Frame,
    Header,
    Kind,
    Where,
    frame_of,
    frames,
    packed,
)
from ringcomm.ps.long_frames import Joiner, pieces
from ringcomm.transport.base import Request, Transport
from ringcomm.transport.mail import LETTER_MAX, Mail
from ringcomm.transport.tags import P2P

if TYPE_CHECKING:
    from ringcomm.ps.dense import DensePartition
    from ringcomm.ps.placement import Partition
    from ringcomm.ps.post import Post

INLINE_MAX: Final = LETTER_MAX - 1024  # bytes of a body in a letter; the rest is header and meta
META_MAX: Final = 1024 - HEADER_NBYTES  # of what explains such a body
_NOTHING: Final = np.empty(0, np.uint8)


Asked = tuple[int, int, int, int, int, int, int, int, int, int]


@dataclass(slots=True)
class Delivery:
    """A frame whose body is here.

    Attributes:
        source: rank that sent it.
        header: see ringcomm.ps.frames.
        meta: explains it.
        body: the payload. In shared memory it is the sender's, who waits for the reply.
    """

    source: int
    header: Header
    meta: bytes
    body: Bytes


@dataclass(slots=True)
class _Coming:
    """A frame at the head of its sender's line, or behind it."""

    delivery: Delivery
    request: Request | None


class Link:
    """This rank's end of the wire to all others.

    Args:
        transport: what carries it.
        mail: what carries letters.
        context: number that is this link's alone among the groups of the job.
        place_for: returns where a body that comes as a message shall go; None: memory of its own.
        post: what carries frames between ranks of this node; None: `mail` does.
    """

    def __init__(
        self,
        transport: Transport,
        mail: Mail,
        context: int,
        place_for: Callable[[int, Header], Bytes | None],
        post: Post | None = None,
    ) -> None:
        self._transport = transport
        self._mail = mail
        self._context = context
        self._place_for = place_for
        self._post = post
        self._box = None if post is None else post.box
        self._streams = itertools.count()
        self._long = itertools.count()  # numbers of frames that are sent in pieces
        self._joiner = Joiner()
        # What send() touches, in any thread, is there from the start and appended to, no more.
        self._outgoing: list[deque[bytes]] = [deque() for _ in range(transport.size)]
        self._bodies: deque[_Later] = deque()
        self._sending: list[_Later] = []
        self._lines: list[deque[_Coming]] = [deque() for _ in range(transport.size)]
        self._n_waiting = 0

    def shares_memory(self, rank: int) -> bool:
        """Return True if this rank's bodies need not be copied to get there."""
        t = self._transport
        return t.node is not None and t.nodes[rank] == t.nodes[t.rank]

    def place_of(self, x: Bytes) -> int:
        """Return where shared memory of this rank is, as view() of another rank wants it."""
        node = self._transport.node
        assert node is not None
        return node.offset_of(x)

    def view(self, rank: int, place: int, nbytes: int) -> Bytes:
        """Return memory of a rank that shares_memory(), where it stands. Raises ValueError."""
        node = self._transport.node
        if node is None:
            raise ValueError(f"rank {rank} shares no memory with this one")
        return node.view(rank, place, nbytes)

    def send(self, dest: int, header: Header, meta: bytes = b"", body: Bytes = _NOTHING) -> None:
        """Send a frame; any thread. It leaves at the next poll().

        Args:
            dest: rank of the job.
            header: what is known of place and n_body is filled in.
            meta: of any length; past META_MAX there is less room for a body beside it.
            body: kept until it is sent. A large one in memory that `dest` maps is read there: it
                must stay as it is until `dest` says that it has done so.
        """
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
            self._bodies.append(_Later(self._transport, body, dest, tag))
        self._put(dest, packed(header._replace(n_body=body.nbytes), meta))

    def ask(self, dest: int, header: Asked, meta: bytes, body: Bytes) -> None:
        """Send a request, as send() does.

        Args:
            dest: rank of the job.
            header: kind, view, origin, incarnation, sequence, table, partition, clock, option and
                place, see Header.
            meta: see send().
            body: see send().
        """
        if self._box is not None and self._box.ask(dest, *header, meta, body):
            return
        kind, view, origin, life, sequence, table, part, clock, option, place = header
        full = Header(
            kind, 0, 0, view, origin, life, sequence, table, part, clock, 0, option, place
        )
        self.send(dest, full, meta, body)

    def take_acks(self) -> list[tuple[int, int]]:
        """Return which requests were carried out without more to say: sequence, clock.

        Of what one rank has sent they came before what the last poll() returned.
        """
        return [] if self._box is None else self._box.take_acks()

    def await_ack(self, dest: int, sequence: int, limit_ns: int, taken: int) -> int:
        """Look for the ack of a request until it comes, without driving; return its clock.

        Returns -1 if something else comes, or it does not within limit_ns: poll() then. The ack
        may come once more, until a call says that it has been `taken`.
        """
        if self._box is None or not self._box.reaches(dest):
            return -1
        return self._box.await_ack(sequence, limit_ns, taken)

    def _put(self, dest: int, frame: bytes) -> None:
        if len(frame) > LETTER_MAX:
            for piece in pieces(frame, next(self._long), LETTER_MAX):
                self._put(dest, piece)
        elif self._box is not None and self._box.reaches(dest):
            self._box.send(dest, frame)
        else:
            self._outgoing[dest].append(frame)

    @property
    def has_mail(self) -> bool:
        """True if something from this node waits for poll()."""
        return self._box is not None and self._box.has_mail

    def poll(self, *, only_near: bool = False) -> list[Delivery]:
        """Advance the wire; return what has arrived, that of each sender in order.

        Args:
            only_near: leave letters alone, and take what has come from this node.
        """
        if not only_near:
            self.flush()
            for letter in self._mail.collect():
                for frame in frames(letter.data):
                    self._admit(letter.source, frame)
        came = [] if self._box is None else self._box.collect()
        if only_near and not self._n_waiting and len(came) == 1:  # as a rule
            (source, data), came = came[0], []
            frame = frame_of(data)
            if frame.header.where <= 1 and frame.header.kind != Kind.PIECE:
                body = np.frombuffer(frame.inline, np.uint8) if frame.inline else _NOTHING
                return [Delivery(source, frame.header, frame.meta, body)]
            self._admit(source, frame)
        for source, data in came:
            self._admit(source, frame_of(data))
        return list(self._arrived())

    def enter(self) -> None:
        """Let nothing be carried out without Python until leave(); around poll() and what came."""
        if self._box is not None:
            self._box.enter()

    def leave(self) -> None:
        """See enter()."""
        if self._box is None:
            return
        if self._n_waiting:
            for source, line in enumerate(self._lines):
                if line:  # what this rank sends next must not overtake it
                    self._box.hold(source)
        self._box.leave()

    def open(self, partition: Partition, epoch: int, part: DensePartition) -> None:
        """Let pushes for a partition be carried out without Python."""
        if self._box is not None:
            self._box.open(*partition, epoch, part.counter)

    def close(self, partition: Partition) -> None:
        """Let Python carry out what comes for a partition."""
        if self._box is not None:
            self._box.close(*partition)

    @property
    def carried_out(self) -> tuple[int, int]:
        """How many requests needed no Python, and the bytes of their bodies."""
        return (0, 0) if self._box is None else (self._box.n_requests, self._box.n_body)

    @property
    def waits_to_leave(self) -> bool:
        """True if a poll() would put something on the wire."""
        is_full = self._box is not None and self._box.n_unsent
        return bool(self._bodies or any(self._outgoing) or is_full)

    @property
    def is_busy(self) -> bool:
        """True while something waits to leave, or for its body."""
        return bool(
            self._bodies
            or self._sending
            or self._n_waiting
            or self._mail.n_unsent
            or (self._box is not None and (self._box.n_unsent or self._box.has_mail))
            or any(self._outgoing)
        )

    @property
    def n_queued(self) -> int:
        """How many frames wait to leave, or for their body."""
        return sum(map(len, self._outgoing)) + self._n_waiting

    def flush(self) -> None:
        """Put on the wire what waits to leave; by poll() anyway."""
        for dest, queue in enumerate(self._outgoing):
            while queue:
                letter = [queue.popleft()]
                room = LETTER_MAX - len(letter[0])
                while queue and len(queue[0]) <= room:
                    room -= len(queue[0])
                    letter.append(queue.popleft())
                self._mail.send(dest, letter[0] if len(letter) == 1 else b"".join(letter))
        while self._bodies:
            self._sending.append(self._bodies.popleft())
        if self._sending:
            self._sending = [each for each in self._sending if not each.test()]

    def _admit(self, source: int, frame: Frame) -> None:
        if frame.header.kind == Kind.PIECE:
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
            place = self._place_for(source, header)
            body = np.empty(header.n_body, np.uint8) if place is None else place
            request = self._transport.irecv(body, source, header.place)
            self._n_waiting += 1
        self._lines[source].append(_Coming(Delivery(source, header, frame.meta, body), request))

    def _arrived(self) -> Iterable[Delivery]:
        for line in self._lines:
            while line and (line[0].request is None or line[0].request.test()):
                coming = line.popleft()
                self._n_waiting -= coming.request is not None
                yield coming.delivery


class _Later:
    """A message that is put on the wire by the thread that drives it."""

    source = -1

    def __init__(self, transport: Transport, body: Bytes, dest: int, tag: int) -> None:
        self._start: Callable[[], Request] = lambda: transport.isend(body, dest, tag)
        self._request: Any = None

    def test(self) -> bool:
        if self._request is None:
            self._request = self._start()
        done: bool = self._request.test()
        return done

    def cancel(self) -> None:
        """Do nothing: sends are matched all the same."""
