"""A request of a client to one server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.client.future import Future
    from ringcomm.ps.placement.partition_places_and_moves import Partition
    from ringcomm.ps.protocol.frames import FrameKind
    from ringcomm.ps.protocol.link import Delivery

NO_BODY: Final = np.empty(0, np.uint8)


@dataclass(slots=True, eq=False)
class Request:
    """One request to one server.

    Attributes:
        kind: see ringcomm.ps.protocol.frames.
        partition: its owner gets the request; None: `server` does.
        server: number of the server.
        table: number of the table, if partition is None.
        clock: see Header.
        option: see Header.
        place: see Header.
        meta: explains the request.
        body: the payload, as Link.send() takes it; kept until the reply.
        source: what fill() is to copy to `body`, which is not sent before; None: nothing.
        out: memory for the body of a reply that comes as a message; None: any memory.
        epoch: of the table, if partition is None; see rows/split_calls_over_servers.py.
        on_reply: takes a good reply before `future` does; may return a request to send instead.
        on_ack: takes the clock of a good reply that says no more; None: on_reply takes that, too.
        clock_of: returns `clock` when the request is sure to be sent.
        on_end: takes every reply first, also one that says that another server has the rows.
        turn: ascends with the calls of Client.send(), from 1 on; other requests have 0.
        future: completes with the reply, and perhaps with others.
    """

    kind: FrameKind
    partition: Partition | None = None
    server: int = -1
    table: int = 0
    clock: int = 0
    option: int = 0
    place: int = 0
    meta: bytes = b""
    body: Bytes = field(default_factory=lambda: NO_BODY)
    source: Bytes | None = None
    out: Bytes | None = None
    epoch: int = 0
    on_reply: Callable[[Delivery], Request | None] | None = None
    on_ack: Callable[[int], object] | None = None
    clock_of: Callable[[], int] | None = None
    on_end: Callable[[Delivery], None] | None = None
    turn: int = 0
    future: Future[Any] = field(init=False)

    def fill(self) -> None:
        if self.source is not None:
            self.body[:] = self.source
            self.source = None

    def take(self, reply: Delivery) -> Request | None:
        """Call on_reply, and drop it: it mostly refers to this request."""
        on_reply, self.on_reply = self.on_reply, None
        return None if on_reply is None else on_reply(reply)


def fill(requests: Sequence[Request], go_on: Callable[[], object]) -> None:
    """Fill the bodies of requests that were submitted, one after the other.

    Args:
        requests: see Request.source.
        go_on: lets each leave while the next one is filled.
    """
    try:
        go_on()
        for request in requests:
            request.fill()
            go_on()
    finally:  # an interrupt takes back nothing that was submitted
        for request in requests:
            request.fill()
