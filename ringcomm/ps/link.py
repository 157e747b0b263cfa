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
from typing import Any, Final

import numpy as np

from ringcomm.arrays.base import Bytes
from ringcomm.ps.frames import HEADER_NBYTES, Frame, Header, Where, frames, packed
from ringcomm.transport.base import N_STREAMS, P2P, Request, Transport, tag_of
from ringcomm.transport.mail import LETTER_MAX, Mail

INLINE_MAX: Final = LETTER_MAX - 1024  # bytes of a body in a letter; the rest is header and meta
_META_MAX: Final = 1024 - HEADER_NBYTES
_NOTHING: Final = np.empty(0, np.uint8)


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
    """

    def __init__(
        self,
        transport: Transport,
        mail: Mail,
        context: int,
        place_for: Callable[[int, Header], Bytes | None],
    ) -> None:
        self._transport = transport
        self._mail = mail
        self._context = context
        self._place_for = place_for
        self._streams = itertools.count()
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

    def send(self, dest: int, header: Header, meta: bytes = b"", body: Bytes = _NOTHING) -> None:
        """Send a frame; any thread. It leaves at the next poll().

        Args:
            dest: rank of the job.
            header: what is known of place and n_body is filled in.
            meta: at most 900 bytes with a body, or 15,000 without one.
            body: kept until it is sent. A large one in memory that `dest` maps is read there: it
                must stay as it is until `dest` says that it has done so.
        """
        if body.nbytes <= INLINE_MAX - max(0, len(meta) - _META_MAX):
            self._outgoing[dest].append(packed(header, meta, body.data if body.nbytes else b""))
            return
        node = self._transport.node if self.shares_memory(dest) else None
        if node is not None and node.memory.holds(body):
            header = header._replace(where=Where.SHARED, place=node.offset_of(body))
        else:
            tag = tag_of(self._context, next(self._streams) % N_STREAMS, P2P)
            header = header._replace(where=Where.MESSAGE, place=tag)
            self._bodies.append(_Later(self._transport, body, dest, tag))
        self._outgoing[dest].append(packed(header._replace(n_body=body.nbytes), meta))

    def poll(self) -> list[Delivery]:
        """Advance the wire; return what has arrived, that of each sender in order."""
        self.flush()
        for letter in self._mail.collect():
            for frame in frames(letter.data):
                self._admit(letter.source, frame)
        return list(self._arrived())

    @property
    def is_busy(self) -> bool:
        """True while something waits to leave, or for its body."""
        return bool(
            self._bodies
            or self._sending
            or self._n_waiting
            or self._mail.n_unsent
            or any(self._outgoing)
        )

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
