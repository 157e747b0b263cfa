"""What a rank does for parameter servers beside its operations: requests and replies."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from ringcomm.ps.frames import Kind

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.client import Client
    from ringcomm.ps.frames import Header
    from ringcomm.ps.link import Delivery, Link
    from ringcomm.ps.serving import Server


class Desk:
    """Service that hands what arrives to the client or the server of this rank.

    Attributes:
        client: of this rank; None: it asks nothing.
        server: likewise.
        reports: of evaluators; for the chief.
        link: the wire; set before the first poll.
    """

    link: Link

    def __init__(self) -> None:
        self.client: Client | None = None
        self.server: Server | None = None
        self.reports: deque[Delivery] = deque(maxlen=10_000)

    def poll(self) -> bool:
        """Take what has arrived; return True if there was anything."""
        deliveries = self.link.poll()
        for delivery in deliveries:
            if delivery.header.kind == Kind.REPLY:
                assert self.client is not None
                self.client.on_reply(delivery)
            elif delivery.header.kind == Kind.REPORT:
                self.reports.append(delivery)
            elif delivery.header.kind == Kind.VIEW and delivery.header.option:
                assert self.server is not None
                self.server.on_adopted(delivery)
            else:
                assert self.server is not None
                self.server.on_request(delivery)
        if deliveries:
            self.link.flush()
        return bool(deliveries)

    @property
    def is_busy(self) -> bool:
        """True while this rank's part must go on although nobody here waits for it."""
        is_serving = self.server is not None and not self.server.is_over
        return is_serving or self.link.is_busy

    def place_for(self, source: int, header: Header) -> Bytes | None:
        """Return where the body of a message shall go; see Link."""
        del source
        is_reply = header.kind == Kind.REPLY and self.client is not None
        return self.client.place_for(header) if is_reply and self.client is not None else None
