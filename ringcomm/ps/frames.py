"""What clients and servers say to each other: one frame per request or reply, without pickling.

A frame is a header of 64 bytes, a few bytes that explain it (`meta`), and a body: the payload. A
small body follows in the same letter; a large one stands in memory that the node shares, or comes
as a message of its own. Letters hold any number of frames, and a frame that is longer than a letter
comes in pieces; all parts begin at multiples of 8.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum, IntFlag
from typing import Final, NamedTuple

from ringcomm.errors import RingcommError

_HEADER: Final = struct.Struct("<BBHIIIQIIqIIQQ")
HEADER_NBYTES: Final = _HEADER.size
_EMPTY: Final = memoryview(b"")
_GAPS: Final = tuple(bytes(n) for n in range(8))
PROTOCOL: Final = 1  # goes up when the header or a kind changes its meaning


class Kind(IntEnum):
    """What a frame asks for, or that it answers."""

    REPLY = 1
    CREATE = 2
    PUSH = 3
    PULL = 4
    TICK = 5
    CALL = 6
    STATS = 7
    SNAPSHOT = 8
    SAVE = 9
    RESTORE = 10
    MOVE = 11
    VIEW = 12
    REPORT = 13
    LEAVE = 14
    ERASE = 15
    CHANGES = 16
    STATE = 17
    ROWS = 18
    STOP = 19
    PIECE = 20  # of a frame that is too long for a letter, see ringcomm.ps.long_frames
    ENTER = 21  # rounds of ps.FirstOf(k), see ringcomm.ps.entering


class Step(IntEnum):
    """What a frame of Kind.MOVE is about; its option. See ringcomm.ps.moving."""

    ASK = 0
    GIVE = 1
    TAKE = 2
    TAKEN = 3
    GIVEN = 4
    NOTICE = 5
    NOTED = 6
    SETTLE = 7
    ROWS = 8
    ROWS_NOTICE = 9


class Entry(IntEnum):
    """What a frame of Kind.ENTER is about; its option. See ringcomm.ps.entering."""

    ASK = 0
    JOIN = 1
    IN = 2
    OUT = 3


class Status(IntEnum):
    """How a request ended."""

    OK = 0
    LATE = 1  # applied to nothing: the round had what it needed
    REFUSED = 2  # a mistake of the caller; meta says which
    WRONG_VIEW = 3  # another server owns the partition now; meta is its owner and epoch
    FAILED = 4  # the server could not; meta says why


class Where(IntFlag):
    """Where the body is."""

    NONE = 0
    INLINE = 1  # behind the meta
    SHARED = 2  # in the sender's shared memory, at `place`
    MESSAGE = 3  # a message with tag `place`


class Header(NamedTuple):
    """The fixed part of a frame.

    Attributes:
        kind: see Kind.
        where: see Where.
        status: of a reply, see Status.
        view: of a request for a partition: its epoch, see ringcomm.ps.moving; of a reply: the
            request's.
        origin: rank of the job that made the request; in a reply, that answers.
        incarnation: life of that rank.
        sequence: of a request: ascending per rank and incarnation; of a reply: the request's.
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
    incarnation: int = 0
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
        inline: the body if it stands in the letter, else empty.
    """

    header: Header
    meta: bytes
    inline: memoryview


def is_one_way(header: Header) -> bool:
    """Return True if a frame has no reply: what servers tell each other of tables and moves."""
    if header.kind == Kind.MOVE:
        return header.option not in (Step.ASK, Step.SETTLE)
    return header.kind in (Kind.VIEW, Kind.REPORT, Kind.STOP)


def packed(header: Header, meta: bytes = b"", inline: bytes | memoryview = b"") -> bytes:
    """Return a frame as bytes; n_meta is filled in, and n_body of one that is inline."""
    n_meta, n_inline = len(meta), len(inline)
    where, n_body = header.where, header.n_body
    if where <= 1:  # none, or inline
        where, n_body = 1 if n_inline else 0, n_inline
    head = _HEADER.pack(
        header.kind, where, *header[2:10], n_meta, header.option, header.place, n_body
    )
    return b"".join((head, meta, _GAPS[-n_meta % 8], inline, _GAPS[-n_inline % 8]))


def frame_of(letter: bytes) -> Frame:
    """Read a letter of one frame, as the pipes of a node bring them."""
    header = Header._make(_HEADER.unpack_from(letter))
    start = HEADER_NBYTES + header.n_meta
    if header.where != 1:  # not inline
        return Frame(header, letter[HEADER_NBYTES:start], _EMPTY)
    start += -start % 8
    return Frame(
        header,
        letter[HEADER_NBYTES : HEADER_NBYTES + header.n_meta],
        memoryview(letter)[start : start + header.n_body],
    )


def frames(letter: bytes) -> Iterator[Frame]:
    """Read the frames of a letter.

    Raises:
        RingcommError: its end is missing.
    """
    view, at = memoryview(letter), 0
    while at < len(letter):
        start = at + HEADER_NBYTES
        if start > len(letter):
            raise RingcommError(f"ps: a letter of {len(letter)} bytes ends inside a header")
        header = Header._make(_HEADER.unpack_from(letter, at))
        body = start + _padded(header.n_meta)
        end = body + (header.n_body if header.where == Where.INLINE else 0)
        at = body + _padded(end - body)
        if at > len(letter):
            raise RingcommError(f"ps: a letter of {len(letter)} bytes ends inside a frame of {at}")
        yield Frame(header, bytes(view[start : start + header.n_meta]), view[body:end])


def _padded(n: int) -> int:
    return n + -n % 8
