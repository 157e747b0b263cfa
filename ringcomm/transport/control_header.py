"""The header of every control message, and the kinds of these messages. Pure."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

_FORMAT = struct.Struct("<HIQQQI?B")  # the fields of Header, in their order
NBYTES = _FORMAT.size  # 36
TEXT_MAX = 3000  # bytes of a text of News; a message has at most 4096, with ranks at its end


class ControlKind(IntEnum):
    """Kinds of control messages. Names in backticks are fields of the Header."""

    AGREE = 1  # the sender's operation: `key`, `fingerprint`; `value`: proposal; `flag`: all agree
    ASK = 2  # who has entered operation `key`, number `value` of the series `fingerprint`?
    HERE = 3  # the sender has entered operation `key`
    ELSEWHERE = 4  # the sender has not entered operation `key`; text: the operation that it is in;
    # if `flag`, it waits in operation `value` of the series `fingerprint`, to which both belong
    ABSENT = 5  # ranks have left and will never enter operation `key`; text says how they left
    LEFT = 6  # ranks leave; text says how
    FAILED = 7  # rank `about` failed; text says how
    GAVE_UP = 8  # the deadline of some ranks passed; text: see GaveUp
    BROKE = 11  # ranks take part in no operation any more, as rank `about` failed; text says how
    JOINED = 12  # the sender has called join() for the `value`-th time, at `key` us of its clock,
    # after `fingerprint` operations; `flag`: it knows that all others have joined, and has made
    # `key` steps
    INVITE = 13  # to a rank in join(): operation `value` of the series `fingerprint` has begun
    # in group `about`; text: part `round` of its call, the last part if `flag`
    DROPPED = 14  # message `round` of the barrier in which the ranks drop group `key`
    CONTROL = 15  # a command of `ringcomm ctl`: its identity `key`, a step `value`; `round`: see
    # engine/control/rounds.py
    WORK = 16  # question number `value` about a WorkQueue; `flag`: its answer. The text is JSON


LETTERS = (ControlKind.AGREE,)  # an operation waits for these, as for data
# Ranks pass these on, see News. The last line of the text lists the ranks from which they come.
OF_NEWS = (
    ControlKind.ABSENT,
    ControlKind.LEFT,
    ControlKind.FAILED,
    ControlKind.GAVE_UP,
    ControlKind.BROKE,
)


def cut(text: str, nbytes: int) -> str:
    """Return the longest beginning of a text that takes at most `nbytes` in a message."""
    return text.encode(errors="replace")[:nbytes].decode(errors="ignore")


class ControlHeader(NamedTuple):
    """36 bytes, little-endian."""

    kind: ControlKind
    ring_epoch: int  # the sender's Transport.ring_epoch; earlier transports' messages are dropped
    key: int = 0  # 64 bits that identify an operation, the same on all ranks
    fingerprint: int = 0  # 64-bit digest of the sender's call
    value: int = 0  # see Kind
    about: int = 0  # a rank or a group, see Kind
    flag: bool = False  # see Kind
    round: int = 0  # number of a round of an agreement, or see Kind

    def pack(self, text: str = "") -> bytes:
        return _FORMAT.pack(*self) + text.encode(errors="replace")

    @classmethod
    def unpack(cls, message: bytes) -> tuple[ControlHeader, str]:
        kind, *others = _FORMAT.unpack_from(message)
        return cls(ControlKind(kind), *others), message[NBYTES:].decode(errors="replace")
