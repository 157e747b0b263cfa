"""Sends all that a home has to another server, and takes it there: the pieces of whole_copy.

Small pieces go together, and several frames of them are under way at a time: a reply to each says
that the follower has it, and the memory in which it may have read it is free.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

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
FRAME_NBYTES: Final = 1 << 20  # of pieces that go together: no more are added beyond
WINDOW_NBYTES: Final = 8 << 20  # under way: no more frames are sent beyond
_LINE: Final = 64  # where each piece begins, as State wants it


class _Sent(NamedTuple):
    """A frame of pieces that the follower may still read in place."""

    number: int
    body: Bytes


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
        self._is_last = False  # all has been sent
        self._number = 0  # of the last frame
        self._in_transit: deque[_Sent] = deque()

    def send(self) -> None:
        """Send as much as may be under way, one frame at least. Raises MemoryError."""
        while not self._is_last and self._nbytes_in_transit < WINDOW_NBYTES:
            self._send_frame()

    def note_loaded(self, number: int) -> None:
        """Free the memory of frames up to a number: the follower has what was in them."""
        while self._in_transit and self._in_transit[0].number <= number:
            self._in_transit.popleft()

    @property
    def _nbytes_in_transit(self) -> int:
        return sum(each.body.nbytes for each in self._in_transit)

    def _send_frame(self) -> None:
        """Send the next pieces; the first frame has the number 1."""
        whole: list[Bytes] = []
        sizes: list[int] = []
        while not self._is_last and sum(sizes) < FRAME_NBYTES:
            state, self._is_last = next(self._pieces)
            packed = state.packed()
            nbytes = sum(each.nbytes for each in packed)
            whole += [*packed, np.zeros(-nbytes % _LINE, np.uint8)]
            sizes.append(nbytes)
        self._number += 1
        body = self._server.transfer.staged(whole, self._follower)
        self._in_transit.append(_Sent(self._number, body))
        header = Header(
            Kind.RECORD, status=self._home + 1, option=Copy.PIECE, sequence=self._number,
            clock=self._is_last,
        )  # fmt: skip
        times = self._clock.monotonic_s, self._clock.time_s
        meta = AT.pack(self._follower, *times) + np.array(sizes, np.uint64).tobytes()
        self._link.send(self._follower, header, meta, body)


def take_pieces(
    frame: Delivery, server: Server, home_link: HomeLink, *, clock: CopiedClock, link: Link
) -> str:
    """Put pieces into the new copy, and tell the primary; return why that cannot be, or nothing.

    See SendWholeCopy for the arguments.
    """
    _, clock.monotonic_s, clock.time_s = AT.unpack_from(frame.meta)
    why, header, at = "", frame.header, 0
    try:
        for nbytes in np.frombuffer(frame.meta, np.uint64, offset=AT.size).tolist():
            load(server, home_link, State.unpacked(frame.body[at : at + nbytes]))
            at += nbytes + -nbytes % _LINE
    except Exception as error:  # noqa: BLE001 - the primary gives this copy up, and says why
        why = f"{type(error).__name__}: {error}"[:2000]
    reply = Header(
        Kind.RECORD, status=header.status, option=Copy.LOADED, sequence=header.sequence,
        clock=header.clock,
    )  # fmt: skip
    link.send(frame.source, reply, why.encode())
    return why
