"""Sends all that a home has to another server, and takes it there: the pieces of whole_copy."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from ringcomm.ps.partition_state import State
from ringcomm.ps.protocol.frames import Copy, Header, Kind
from ringcomm.ps.server.homes.whole_copy import load, pieces

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.protocol.link import Delivery, Link
    from ringcomm.ps.server.clock import CopiedClock
    from ringcomm.ps.server.homes.home_link import HomeLink
    from ringcomm.ps.server.server import Server

AT: Final = struct.Struct("<Qdd")  # the rank that sent it, and the times at which it is done


class SendWholeCopy:
    """All that a home has, on its way to a server that is to be the follower.

    Args:
        home: number of the home.
        follower: rank of that server.
        server: of the home, which does nothing meanwhile.
        home_link: its wire.
        clock: its clock.
        link: the wire of this rank.
    """

    def __init__(
        self,
        home: int,
        follower: int,
        server: Server,
        home_link: HomeLink,
        *,
        clock: CopiedClock,
        link: Link,
    ) -> None:
        self._home, self._follower, self._server = home, follower, server
        self._clock, self._link = clock, link
        self._pieces = pieces(server, home_link)
        self._in_transit: Bytes | None = None  # the last piece, which may be read in place

    def send(self, number: int) -> None:
        """Send the next piece; the first has the number 1. Raises MemoryError."""
        self._in_transit = None
        state, is_last = next(self._pieces)
        body = self._in_transit = self._server.transfer.staged(state, self._follower)
        header = Header(
            Kind.RECORD, status=self._home + 1, option=Copy.PIECE, sequence=number, clock=is_last,
        )  # fmt: skip
        times = self._clock.monotonic_s, self._clock.time_s
        self._link.send(self._follower, header, AT.pack(self._follower, *times), body)


def take_piece(
    piece: Delivery, server: Server, home_link: HomeLink, *, clock: CopiedClock, link: Link
) -> str:
    """Put a piece into the new copy, and tell the primary; return why that cannot be, or nothing.

    See SendWholeCopy for the arguments.
    """
    _, clock.monotonic_s, clock.time_s = AT.unpack(piece.meta)
    why, header = "", piece.header
    try:
        load(server, home_link, State.unpacked(piece.body))
    except Exception as error:  # noqa: BLE001 - the primary gives this copy up, and says why
        why = f"{type(error).__name__}: {error}"[:2000]
    reply = Header(
        Kind.RECORD, status=header.status, option=Copy.LOADED, sequence=header.sequence,
        clock=header.clock,
    )  # fmt: skip
    link.send(piece.source, reply, why.encode())
    return why
