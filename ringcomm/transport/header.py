"""The header of every message that is not payload: which life of which ring it speaks of."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

_FORMAT = struct.Struct("<HHIIIQQ")
NBYTES = _FORMAT.size  # 32


class Kind(IntEnum):
    """What a header announces."""

    AGREE = 1  # `fingerprint` is what this rank is about to do; `flag` says that all so far agree
    ASK = 2  # who has entered operation `sequence`?
    HERE = 3  # this rank has entered operation `sequence`
    LEFT = 4  # this rank leaves; `sequence` was its last operation; text says how
    FAILED = 5  # rank `about` failed; text says how
    GAVE_UP = 6  # this rank's deadline passed in operation `sequence`; text: see GaveUp


@dataclass(frozen=True)
class Header:
    """32 bytes, little-endian.

    Attributes:
        kind: what it announces.
        ring_epoch: version of the membership; a message of an older one is dropped.
        incarnation: life of the sender.
        sequence: number of the operation, counted alike on all ranks.
        fingerprint: 64-bit hash of what the sender does in that operation.
        about: the rank it speaks of.
        flag: see Kind.AGREE.
    """

    kind: Kind
    ring_epoch: int
    incarnation: int
    sequence: int
    fingerprint: int = 0
    about: int = 0
    flag: bool = False

    def pack(self, text: str = "") -> bytes:
        """Return the wire form, followed by text."""
        return _FORMAT.pack(
            self.kind,
            self.flag,
            self.ring_epoch,
            self.incarnation,
            self.about,
            self.sequence,
            self.fingerprint,
        ) + text.encode(errors="replace")

    @classmethod
    def unpack(cls, message: bytes) -> tuple[Header, str]:
        """Return the header and the text behind it."""
        kind, flag, ring_epoch, incarnation, about, sequence, fingerprint = _FORMAT.unpack_from(
            message
        )
        header = cls(Kind(kind), ring_epoch, incarnation, sequence, fingerprint, about, bool(flag))
        return header, message[NBYTES:].decode(errors="replace")
