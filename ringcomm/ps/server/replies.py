"""What a server sends: replies to its clients, and orders and news of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ringcomm.ps.control.agreement import Member
from ringcomm.ps.protocol.frame_meta import READ_BLOCK, packed_json
from ringcomm.ps.protocol.frames import FrameHeader, FrameKind, Status
from ringcomm.ps.protocol.remote_errors import error_text

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.protocol.link import Delivery
    from ringcomm.ps.protocol.wire import Wire
    from ringcomm.ps.roles import Layout

NOTHING: Final = np.empty(0, np.uint8)


class Replies:
    """Sends replies, and frames of the server's own; in the thread that drives.

    Args:
        link: the wire.
        layout: who is who.
        index: of the server.

    Attributes:
        nbytes: of the bodies so far.
    """

    def __init__(self, link: Wire, layout: Layout, index: int) -> None:
        self._link, self._layout, self._rank = link, layout, layout.address_of(index)
        self.nbytes = 0

    def __call__(
        self,
        to: Delivery,
        *,
        status: Status = Status.OK,
        meta: bytes = b"",
        body: Bytes = NOTHING,
        clock: int = 0,
        option: int = 0,
    ) -> None:
        self.nbytes += body.nbytes // 2 if option == READ_BLOCK else body.nbytes  # of two
        is_to_server = to.header.kind == FrameKind.ORDER
        header = FrameHeader(
            FrameKind.REPLY,
            status=status,
            view=to.header.view,
            origin=self._rank,
            home=self._layout.number_of(to.source) + 1 if is_to_server else 0,
            sequence=to.header.sequence,
            table=to.header.table,
            partition=to.header.partition,
            clock=clock,
            option=option,
        )
        self._link.send(to.source, header, meta, body)

    def json(self, to: Delivery, content: Any) -> None:
        self(to, body=as_body(content))

    def fail(self, to: Delivery, error: Exception) -> None:
        status = Status.REFUSED if isinstance(error, ValueError | KeyError) else Status.FAILED
        self(to, status=status, meta=error_text(error))

    def answer(self, order: Delivery, content: Any) -> None:
        self(order, meta=packed_json(content))

    def order(self, member: Member, number: int, order: tuple[bytes, Bytes]) -> None:
        """Send an order, its meta and body, to a rank; or to a server, wherever it runs."""
        dest, home = member.number, 0
        if member.is_server:
            dest, home = self._layout.address_of(dest), dest + 1
        self.send(dest, FrameHeader(FrameKind.ORDER, home=home, sequence=number), *order)

    def send(
        self, dest: int, header: FrameHeader, meta: bytes = b"", body: Bytes = NOTHING
    ) -> None:
        self._link.send(dest, header._replace(origin=self._rank), meta, body)


def as_body(content: Any) -> Bytes:
    return np.frombuffer(packed_json(content), np.uint8).copy()
