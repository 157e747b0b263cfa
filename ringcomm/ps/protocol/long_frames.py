"""Sends frames that are too long for a message or a pipe in pieces, and joins them."""

from __future__ import annotations

from collections.abc import Iterator

from ringcomm.errors import RingcommError
from ringcomm.ps.protocol.frames import HEADER_NBYTES, Frame, Header, Kind, frame_of, packed


def pieces(frame: bytes, number: int, most: int) -> Iterator[bytes]:
    """Yield a frame in pieces, each of which is a frame itself.

    Args:
        frame: as bytes.
        number: that no other long frame of this sender has.
        most: bytes of a piece; a multiple of 8.
    """
    room = most - HEADER_NBYTES
    for at in range(0, len(frame), room):
        header = Header(Kind.PIECE, sequence=number, clock=len(frame), place=at)
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
