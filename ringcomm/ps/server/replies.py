"""Replies of a server to its clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ringcomm.ps.protocol.frame_meta import READ_BLOCK, packed_json
from ringcomm.ps.protocol.frames import FrameHeader, FrameKind, OrderOption, Status
from ringcomm.ps.protocol.remote_errors import error_text

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.protocol.link import Delivery
    from ringcomm.ps.protocol.wire import Wire

NOTHING: Final = np.empty(0, np.uint8)


class Replies:
    """Sends replies, and frames of the server's own; in the thread that drives.

    Args:
        link: the wire.
        rank: of the server.

    Attributes:
        nbytes: of the bodies so far.
    """

    def __init__(self, link: Wire, rank: int) -> None:
        self._link, self._rank = link, rank
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
        header = FrameHeader(
            FrameKind.REPLY,
            status=status,
            view=to.header.view,
            origin=self._rank,
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
        """Answer an order of the server that leads; see ringcomm.ps.control.agreement."""
        header = FrameHeader(
            FrameKind.ANSWER, clock=order.header.clock, option=OrderOption.SERVER
        )  # fmt: skip
        self.send(order.source, header, packed_json(content))

    def send(
        self, dest: int, header: FrameHeader, meta: bytes = b"", body: Bytes = NOTHING
    ) -> None:
        self._link.send(dest, header._replace(origin=self._rank), meta, body)


def as_body(content: Any) -> Bytes:
    return np.frombuffer(packed_json(content), np.uint8).copy()
