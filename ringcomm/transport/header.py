"""The tags of payload, and the header of every message that is not payload. Pure."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

_FORMAT = struct.Struct("<HBBIIIQQQ")
NBYTES = _FORMAT.size  # 40
TEXT_MAX = 3000  # bytes of what News passes on; ranks follow, and a control message has 4096


class Kind(IntEnum):
    """Kinds of control messages."""

    AGREE = 1  # this rank is in operation `key`: `fingerprint`, `flag` (all agree so far), `value`
    ASK = 2  # who has entered operation `key`? It is number `value` of those that `fingerprint` is
    HERE = 3  # this rank has entered operation `key`
    ELSEWHERE = 4  # this rank has not; text says what it is in
    ABSENT = 5  # ranks have left and will never enter operation `key`; text says how they left
    LEFT = 6  # ranks leave; text says how
    FAILED = 7  # rank `about` failed; text says how
    GAVE_UP = 8  # the deadline of ranks passed; text: see GaveUp
    OFFER = 9  # send(): a message for whoever receives `key`; `value` is its serial number
    ANSWER = 10  # recv(): the offer `key` is taken if `flag`; else text says why not
    BROKE = 11  # ranks take part in nothing more, because rank `about` failed; text says how
    JOINED = 12  # this rank has joined for the `value`-th time, after `fingerprint` operations, at
    # `key` us; `flag`: it knows that all others have, too
    INVITE = 13  # to a rank that has joined: operation `value` of those that `fingerprint` is, in
    # group `about`, has begun; text: part `round` of its call, the last one if `flag`
    DROPPED = 14  # this rank, and those it has heard of, have dropped the group `key`; see `round`


LETTERS = (Kind.AGREE, Kind.OFFER, Kind.ANSWER)  # an operation waits for these, as for data
# These are passed on, see News; behind a line break the text ends with the ranks that say so.
OF_NEWS = (Kind.ABSENT, Kind.LEFT, Kind.FAILED, Kind.GAVE_UP, Kind.BROKE)
OF_OPERATIONS = (*LETTERS, Kind.JOINED, Kind.INVITE)  # without these one may not come to its end


def cut(text: str, nbytes: int) -> str:
    """Return the beginning of a text that takes at most `nbytes` in a message."""
    return text.encode(errors="replace")[:nbytes].decode(errors="ignore")


@dataclass(frozen=True, slots=True)
class Header:
    """40 bytes, little-endian."""

    kind: Kind  # what it announces
    ring_epoch: int  # version of the membership; a message of an older one is dropped
    incarnation: int  # life of the sender
    key: int = 0  # 64 bits that name an operation, alike on all ranks
    fingerprint: int = 0  # 64-bit hash of what the sender does in that operation
    value: int = 0  # see Kind
    about: int = 0  # the rank it speaks of
    flag: bool = False  # see Kind
    round: int = 0  # of an agreement, or of the news that a group is over

    def pack(self, text: str = "") -> bytes:
        """Return the wire form, followed by text."""
        return _FORMAT.pack(
            self.kind,
            self.flag,
            self.round,
            self.ring_epoch,
            self.incarnation,
            self.about,
            self.key,
            self.fingerprint,
            self.value,
        ) + text.encode(errors="replace")

    @classmethod
    def unpack(cls, message: bytes) -> tuple[Header, str]:
        """Return the header and the text behind it."""
        kind, flag, round_, ring_epoch, incarnation, about, key, fingerprint, value = (
            _FORMAT.unpack_from(message)
        )
        header = cls(
            Kind(kind),
            ring_epoch,
            incarnation,
            key,
            fingerprint,
            value,
            about,
            bool(flag),
            round_,
        )
        return header, message[NBYTES:].decode(errors="replace")
