"""Hands arriving frames of the parameter server to the client or the server of this rank."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ringcomm.ps.protocol.frames import FrameKind, NewsOption

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.client.client import Client
    from ringcomm.ps.protocol.deaths import Deaths
    from ringcomm.ps.protocol.frames import FrameHeader
    from ringcomm.ps.protocol.link import Delivery, Link
    from ringcomm.ps.server.homes.local_homes import Homes
    from ringcomm.ps.server.server import Server


_REPORTS_MAX: Final = 10_000


class Reports:
    """Reports that have arrived, the newest only if they are many; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrived: deque[Delivery] = deque(maxlen=_REPORTS_MAX)

    def __len__(self) -> int:
        return len(self._arrived)

    def append(self, report: Delivery) -> None:
        with self._lock:
            self._arrived.append(report)

    def present(self) -> list[Delivery]:
        with self._lock:
            return [*self._arrived]

    def take_all(self) -> list[Delivery]:
        with self._lock:
            taken = [*self._arrived]
            self._arrived.clear()
            return taken


class FrameDispatcher:
    """Service that hands what arrives to the client or the server of this rank.

    Attributes:
        client: of this rank; None: it asks nothing.
        server: likewise; or the homes that run in this process.
        homes: these; None: there are none, or no copies of them.
        reports: of evaluators; for the chief.
        takes: takes news of a NewsOption; set before the first poll.
        take_order: takes orders for this rank; likewise.
        link: the wire; likewise.
        deaths: looked for at each poll; likewise.
    """

    link: Link
    deaths: Deaths
    take_order: Callable[[Delivery], None]

    def __init__(self) -> None:
        self.client: Client | None = None
        self.server: Server | Homes | None = None
        self.homes: Homes | None = None
        self.reports = Reports()
        self.takes: dict[int, Callable[[Delivery], None]] = {NewsOption.REPORT: self.reports.append}

    @property
    def has_news(self) -> bool:
        """True if something has come from this node."""
        return self.link.has_frames

    def poll(self, *, only_news: bool = False) -> bool:
        """Take what has arrived; return True if there was anything.

        Args:
            only_news: what has come from this node.
        """
        self.link.enter()
        try:
            if self.server is None:
                return self._look(only_news)
            self.server.display.own_time.begin()
            self.server.look()
            has_found = self._look(only_news)
            self.server.display.own_time.end(has_found=has_found)
            return has_found
        finally:
            self.link.leave()

    def _look(self, only_news: bool) -> bool:
        n_before = self.link.n_moved
        deliveries = self.link.poll(only_near=only_news)
        acks = self.link.take_acks()
        for sequence, clock in acks:
            assert self.client is not None
            self.client.on_ack(sequence, clock)
        has_taken = self._take(deliveries)
        self.deaths.look()  # what the dead have sent has come before
        return has_taken or bool(acks) or self.link.n_moved != n_before

    def _take(self, deliveries: list[Delivery]) -> bool:
        for delivery in deliveries:
            header = delivery.header
            if header.kind == FrameKind.REPLY and not header.home:
                assert self.client is not None
                self.client.on_reply(delivery)
            elif header.kind == FrameKind.NEWS and not header.home:
                self.takes[header.option](delivery)
            elif header.kind == FrameKind.ORDER and not header.home:
                self.take_order(delivery)
            else:
                assert self.server is not None
                self.server.on_request(delivery)
            if self.link.bodies.new:  # it leaves while the next delivery is carried out
                self.link.flush()
        if deliveries and self.link.waits_to_leave:
            self.link.flush()
        return bool(deliveries)

    @property
    def is_busy(self) -> bool:
        """True while this rank's part must go on although nobody here waits for it."""
        is_serving = self.server is not None and not self.server.is_over
        return is_serving or self.link.is_busy

    @property
    def is_streaming(self) -> bool:
        return self.link.is_streaming

    def place_for(self, header: FrameHeader) -> Bytes | None:
        is_reply = header.kind == FrameKind.REPLY and not header.home
        return self.client.place_for(header) if is_reply and self.client is not None else None
