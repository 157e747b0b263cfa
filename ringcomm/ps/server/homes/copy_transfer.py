"""Sends all that a home has to another server, and takes it there: the pieces of whole_copy.

Small pieces go together, and several frames of them are under way at a time: a reply to each says
that the follower has it, and the memory in which it may have read it is free. The home goes on
meanwhile: see ringcomm.ps.server.homes.replication.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from ringcomm.ps.partition_state import PartitionState
from ringcomm.ps.protocol.frames import CopyOption, FrameHeader, FrameKind
from ringcomm.ps.server.homes.records import AT, Entry, send_record
from ringcomm.ps.server.homes.replication import SentUnits, Way
from ringcomm.ps.server.homes.whole_copy import is_read, load, pieces, way_of

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.protocol.link import Delivery, Link
    from ringcomm.ps.server.clock import CopiedClock
    from ringcomm.ps.server.homes.home_link import HomeLink
    from ringcomm.ps.server.server import Server

FRAME_NBYTES: Final = 1 << 20  # of pieces that go together: no more are added beyond
WINDOW_NBYTES: Final = 8 << 20  # under way: no more frames are sent beyond
CHANGES_NBYTES: Final = 32 << 20  # under way, with frames: no more changes are sent beyond
_LINE: Final = 64  # where each piece begins, as State wants it


class _SentPiece(NamedTuple):
    """A frame of pieces that the follower may still read in place."""

    number: int
    body: Bytes
    nbytes: int  # of it, and of changes that were sent before it


class SendWholeCopy:
    """All that a home has, on its way to a server that is to be the follower.

    Args:
        home: number of the home.
        follower: rank of that server.
        server: of the home.
        home_link: its wire.
        clock: its clock.
        link: the wire of this rank.
        do: carries out a frame of the home.

    Attributes:
        has_sent_all: the last piece is under way; what comes behind it is no matter of this object.
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
        do: Callable[[Entry], None],
    ) -> None:
        self._home, self._follower, self._server = home, follower, server
        self._home_link, self._clock, self._link, self._do = home_link, clock, link, do
        self._units = SentUnits([unit.key for unit in server.core.units()])
        self._pieces = pieces(server, home_link, self._units)
        self.has_sent_all = False
        self._number = 0  # of the last frame
        self._in_transit: deque[_SentPiece] = deque()
        self._n_changes = 0  # bytes of those that were sent behind the last frame
        self._behind: deque[Entry] = deque()  # what waits

    # --- pieces ---------------------------------------------------------------------------------
    def send(self) -> None:
        """Send as much as may be under way, one frame at least. Raises MemoryError."""
        while not self.has_sent_all and (
            not self._in_transit or self._nbytes_in_transit < WINDOW_NBYTES
        ):
            self._send_frame()
        while self._behind and not self.has_sent_all and self._has_done(self._behind[0]):
            self._behind.popleft()

    def note_loaded(self, number: int) -> None:
        """Free the memory of frames up to a number: the follower has what was in them."""
        while self._in_transit and self._in_transit[0].number <= number:
            self._in_transit.popleft()

    @property
    def _nbytes_in_transit(self) -> int:
        return self._n_changes + sum(each.nbytes for each in self._in_transit)

    def _send_frame(self) -> None:
        """Send the next pieces; the first frame has the number 1."""
        whole: list[Bytes] = []
        sizes: list[int] = []
        while not self.has_sent_all and sum(sizes) < FRAME_NBYTES:
            state, self.has_sent_all = next(self._pieces)
            packed = state.packed()
            nbytes = sum(each.nbytes for each in packed)
            whole += [*packed, np.zeros(-nbytes % _LINE, np.uint8)]
            sizes.append(nbytes)
        self._number += 1
        body = self._server.transfer.staged(whole, self._follower)
        self._in_transit.append(_SentPiece(self._number, body, body.nbytes + self._n_changes))
        self._n_changes = 0
        header = FrameHeader(
            FrameKind.RECORD, home=self._home + 1, option=CopyOption.PIECE, sequence=self._number,
            clock=self.has_sent_all,
        )  # fmt: skip
        times = self._clock.monotonic_s, self._clock.time_s
        meta = AT.pack(self._follower, *times) + np.array(sizes, np.uint64).tobytes()
        self._link.send(self._follower, header, meta, body)

    # --- what the home does meanwhile -----------------------------------------------------------
    def take(self, entry: Entry) -> None:
        """Carry out a frame of the home, or keep it, until has_sent_all."""
        if self._behind or not self._has_done(entry):
            self._behind.append(entry)

    def take_behind(self) -> list[Entry]:
        behind = [*self._behind]
        self._behind.clear()
        return behind

    def _has_done(self, entry: Entry) -> bool:
        """Carry out a frame; return False if it must wait."""
        header = entry.delivery.header
        if is_read(header):
            self._do(entry)
            return True
        way = way_of(header, self._server, self._units)
        if way == Way.LATER or (way == Way.BOTH and self._nbytes_in_transit > CHANGES_NBYTES):
            return False
        before = self._home_link.outcome
        if way == Way.BOTH:
            send_record(self._link, self._home, self._follower, 0, entry)
            self._n_changes += entry.delivery.body.nbytes
        self._do(entry)
        if way == Way.HERE:
            self._home_link.outcome = before  # that of what both have done
        return True


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
            load(server, home_link, PartitionState.unpacked(frame.body[at : at + nbytes]))
            at += nbytes + -nbytes % _LINE
    except Exception as error:  # noqa: BLE001 - the primary gives this copy up, and says why
        why = f"{type(error).__name__}: {error}"[:2000]
    reply = FrameHeader(
        FrameKind.RECORD, home=header.home, option=CopyOption.LOADED, sequence=header.sequence,
        clock=header.clock,
    )  # fmt: skip
    link.send(frame.source, reply, why.encode())
    return why
