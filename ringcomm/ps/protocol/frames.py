"""Frames: the requests and replies of clients and servers as bytes, without pickling.

A frame is a header of 64 bytes, a few bytes that explain it (`meta`), and a body: the payload. A
small body follows at once. A large one is in memory that the node shares, or comes as a message of
its own. A message between hosts holds any number of frames. A frame that is longer than a
message comes in pieces. All parts begin at multiples of 8.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum, IntFlag
from typing import Final, NamedTuple

from ringcomm.errors import RingcommError
from ringcomm.transport.unannounced_messages import SHORT_MESSAGE_MAX

_HEADER: Final = struct.Struct("<BBHIIIQIIqIIQQ")
HEADER_NBYTES: Final = _HEADER.size
STEPS_MAX: Final = 1 << 62  # of a worker: a header has room for them
INLINE_MAX: Final = SHORT_MESSAGE_MAX - 1024  # bytes of a body in a frame; the rest: header, meta
META_MAX: Final = 1024 - HEADER_NBYTES  # of the meta beside such a body
RECOVERING: Final = "ps.recover()"  # for what those wait that go back to a checkpoint
_EMPTY: Final = memoryview(b"")
_GAPS: Final = tuple(bytes(n) for n in range(8))


class FrameKind(IntEnum):
    REPLY = 1
    # about the values of a table
    PUSH = 2
    PULL = 3
    PULLS = 4  # of several hash tables, see ringcomm.ps.client.rows.pull_many
    CALL = 5  # see CallOption
    ENTER = 6  # rounds of ps.FirstOf(k), see ringcomm.ps.client.first_of
    # about no table
    TICK = 7  # a worker has made steps; option 1: a reply once the slowest has
    ASK = 8  # a command, of the server that leads; see ringcomm.ps.control
    SERVER = 9  # see ServerOption
    FILES = 10  # see FilesOption
    # between servers, and from them
    ORDER = 11  # a server asks another, or a rank; see ringcomm.ps.control.agreement
    NEWS = 12  # has no reply; see NewsOption
    PIECE = 13  # of a frame that is too long for a message, see ringcomm.ps.protocol.link
    RECORD = 14  # between the copies of a home, see CopyOption


class CallOption(IntEnum):
    """The option of a frame of FrameKind.CALL: what is to be done with values."""

    FUNCTION = 0  # of the user
    GET_STATE = 1  # values, and the state of their updater
    SET_STATE = 2
    COUNT = 3  # rows; the others, too
    METADATA = 4
    EVICT = 5
    ERASE = 6


class ServerOption(IntEnum):
    """The option of a frame of FrameKind.SERVER: what one server is asked, or told."""

    STATS = 0
    MISSING = 1  # for which workers do requests of the sender wait?
    SETTLE = 2  # reply once nothing moves
    REST = 3  # the sender completes no more steps
    LEAVE = 4


class FilesOption(IntEnum):
    """The option of a frame of FrameKind.FILES. See ringcomm.ps.checkpoint.server."""

    SAVE = 0
    RESTORE = 1


class NewsOption(IntEnum):
    """The option of a frame of FrameKind.NEWS: who says what to whom."""

    MOVED = 0  # the server that leads to clients: a partition has moved, see core.migration
    NOTED = 1  # a client to servers: it has sent again all that came back from there
    HOMES = 2  # a server to all: a rank died, and these homes run here; of some there are copies
    REPORT = 3  # an evaluator to the chief
    MEMBERS = 4  # the chief to workers: who is in the next group of ps.live_workers()


class CopyOption(IntEnum):
    """The option of a frame of FrameKind.RECORD. See ringcomm.ps.server.homes.replication."""

    FOLLOW = 0  # to the follower: carry out the frame that is within
    DONE = 1  # to the primary: carried out, up to this one
    DIED = 3  # within: a rank died
    TIME = 4  # within: time has passed
    NAME = 5  # within: the name of the job
    PIECE = 6  # to a server that is to be the follower: pieces of what the primary has
    LOADED = 7  # to the primary: the follower has the pieces; with meta: it cannot, and why
    PUSH = 8  # to the follower, without Python: carry out the push that is within
    LOST = 9  # within: a home has no copy any more
    DROP = 10  # to the follower: it is no copy any more
    PLACES = 11  # within: a spare takes the place of a home, or partitions are on homes without one


class EntryOption(IntEnum):
    """Options of FrameKind.ENTER. See ringcomm.ps.client.first_of."""

    ASK = 0
    JOIN = 1
    IN = 2
    OUT = 3


_ONE_WAY: Final = frozenset((FrameKind.REPLY, FrameKind.NEWS, FrameKind.RECORD))


class Status(IntEnum):
    OK = 0
    LATE = 1  # applied to nothing: the round had what it needed
    REFUSED = 2  # a mistake of the caller; meta has the error
    WRONG_VIEW = 3  # another server owns the partition; meta has the owner and epoch
    FAILED = 4  # the server could not; meta has the error


class Where(IntFlag):
    """The place of a frame's body."""

    NONE = 0
    INLINE = 1  # behind the meta
    SHARED = 2  # in the sender's shared memory, at `place`
    MESSAGE = 3  # a message with tag `place`


class FrameHeader(NamedTuple):
    """The fixed part of a frame.

    Attributes:
        kind: see Kind.
        where: see Where.
        status: of a reply, see Status.
        view: of a request for a partition: its epoch, see
            ringcomm.ps.server.core.migration; for a command: how many losses its sender knows;
            of a reply: the request's.
        origin: rank of the job that sends the request, or the reply.
        home: 1 + the number of the server that it is for, wherever that runs; 0: it is for the rank
            itself, or the server that began there.
        sequence: of a request: ascending per rank, or server; of a reply: the request's.
        table: number of the table.
        partition: which part of it.
        clock: of the worker: steps it has completed; of a reply: rounds, or the version.
        n_meta: bytes of the meta.
        option: of the kind.
        place: see Where.
        n_body: bytes of the body.
    """

    kind: int
    where: int = 0
    status: int = 0
    view: int = 0
    origin: int = 0
    home: int = 0
    sequence: int = 0
    table: int = 0
    partition: int = 0
    clock: int = 0
    n_meta: int = 0
    option: int = 0
    place: int = 0
    n_body: int = 0


class Frame(NamedTuple):
    """A frame, read.

    Attributes:
        header: see Header.
        meta: explains it.
        inline: the body if it is in the frame, else empty.
    """

    header: FrameHeader
    meta: bytes
    inline: memoryview


# Of a request: kind, view, origin, sequence, table, partition, clock, option and place; see Header.
RequestHeader = tuple[int, int, int, int, int, int, int, int, int]


def header_of_request(header: RequestHeader, home: int = 0) -> FrameHeader:
    kind, view, origin, sequence, table, part, clock, option, place = header
    return FrameHeader(
        kind, 0, 0, view, origin, home, sequence, table, part, clock, 0, option, place
    )


def is_one_way(header: FrameHeader) -> bool:
    return header.kind in _ONE_WAY


def packed(header: FrameHeader, meta: bytes = b"", inline: bytes | memoryview = b"") -> bytes:
    """Return a frame as bytes; n_meta is filled in, and n_body of one that is inline."""
    n_meta, n_inline = len(meta), len(inline)
    where, n_body = header.where, header.n_body
    if where <= 1:  # none, or inline
        where, n_body = 1 if n_inline else 0, n_inline
    head = _HEADER.pack(
        header.kind, where, *header[2:10], n_meta, header.option, header.place, n_body
    )
    return b"".join((head, meta, _GAPS[-n_meta % 8], inline, _GAPS[-n_inline % 8]))


def header_of(data: bytes) -> FrameHeader:
    return FrameHeader._make(_HEADER.unpack_from(data))


def frame_of(data: bytes) -> Frame:
    header = FrameHeader._make(_HEADER.unpack_from(data))
    start = HEADER_NBYTES + header.n_meta
    if header.where != 1:  # not inline
        return Frame(header, data[HEADER_NBYTES:start], _EMPTY)
    start += -start % 8
    return Frame(
        header,
        data[HEADER_NBYTES : HEADER_NBYTES + header.n_meta],
        memoryview(data)[start : start + header.n_body],
    )


def frames(data: bytes) -> Iterator[Frame]:
    """Read the frames of a message.

    Raises:
        RingcommError: its end is missing.
    """
    view, at = memoryview(data), 0
    while at < len(data):
        start = at + HEADER_NBYTES
        if start > len(data):
            raise RingcommError(f"ps: a message of {len(data)} bytes ends inside a header")
        header = FrameHeader._make(_HEADER.unpack_from(data, at))
        body = start + _padded(header.n_meta)
        end = body + (header.n_body if header.where == Where.INLINE else 0)
        at = body + _padded(end - body)
        if at > len(data):
            raise RingcommError(f"ps: a message of {len(data)} bytes ends inside a frame of {at}")
        yield Frame(header, bytes(view[start : start + header.n_meta]), view[body:end])


def _padded(n: int) -> int:
    return n + -n % 8
