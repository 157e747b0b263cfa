"""Messages between ranks other than data: agreements, and news of ranks that failed or left."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ringcomm.ranks_as_text import ranks_in
from ringcomm.transport.base import ANY_SOURCE, ArrivedMessage, PeerDied, Transport
from ringcomm.transport.control_header import (
    LETTERS,
    OF_NEWS,
    TEXT_MAX,
    ControlHeader,
    ControlKind,
    cut,
)
from ringcomm.transport.failure_news import WAITS, Fact, News, NewsMessage
from ringcomm.transport.peer_state import GaveUp, PeerTable

# Called with a message: the rank that sent it, its header and its text.
Listener = Callable[[int, ControlHeader, str], None]
_Address = tuple[ControlKind, int, int]  # kind, key and round
_Boxes = dict[_Address, deque[tuple[int, ControlHeader, str]]]


@dataclass(eq=False)
class Letter:
    """A control message to wait for, used like a receive. `header` is None until it comes."""

    boxes: _Boxes
    address: _Address
    wanted: int
    source: int = ANY_SOURCE
    header: ControlHeader | None = None
    text: str = ""

    def test(self) -> bool:
        """Return True if the message has come; take it out of its box."""
        if self.header is not None:
            return True
        box = self.boxes.get(self.address)
        for index, (source, header, text) in enumerate(tuple(box or ())):
            if box and self.wanted in (source, ANY_SOURCE):
                del box[index]
                if not box:
                    del self.boxes[self.address]
                self.source, self.header, self.text = source, header, text
                return True
        return False

    def cancel(self) -> None:
        """Do nothing: no other rank writes into a Letter."""


def _is_not_crossed(_: int) -> bool:
    return False


class Watch:
    """Receives control messages and deaths; updates one PeerTable and the letter boxes.

    Attributes:
        peers: the state of the other ranks.
        own_failure: how another thread of this rank failed, which ends all waits; None: none did.
        listeners: functions by kind, for messages that this class does not handle itself.
        line_of: function that returns the file and line at which a rank is, or "".
        is_crossed: function that tells whether a rank that has not entered the operation of a key
            waits, elsewhere, in one that this rank has not entered.
        before_poll: function that each poll() calls first; None: there is none.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.peers = PeerTable(transport.rank, transport.size)
        self.own_failure: str | None = None
        self.listeners: dict[ControlKind, Listener] = {}
        self.before_poll: Callable[[], None] | None = None
        self.line_of: Callable[[int], str] = lambda _: ""
        self.is_crossed: Callable[[int], bool] = _is_not_crossed
        self._left: str | None = None
        self._news = News(transport.rank, transport.size)
        self._lock = threading.Lock()  # guards _news
        self._boxes: _Boxes = {}

    def poll(self) -> None:
        """Process the events since the last call, and send the news that is due; never blocks."""
        if self.before_poll is not None:
            self.before_poll()
        for event in self.transport.poll():
            if isinstance(event, PeerDied):
                if event.rank not in self.peers.dead and event.blames == event.rank:
                    self.announce_failed(event.rank, event.reason)  # other nodes cannot see it
                self.peers.note_dead(event.rank, event.reason, blames=event.blames)
                with self._lock:
                    self._news.lose(event.rank, time.monotonic())
            else:
                self._hear(event)
        self._send_news()

    def forget_engine(self) -> None:
        """Hold no function of the engine, which holds this, any more."""
        self.listeners.clear()
        self.is_crossed = _is_not_crossed

    @property
    def has_left(self) -> bool:
        """True once this rank has announced that it enters no operation any more."""
        return self._left is not None

    def letter(self, kind: ControlKind, key: int, source: int, round_: int = 0) -> Letter:
        return Letter(self._boxes, (kind, key, round_), source)

    def tell(self, dest: int, kind: ControlKind, text: str = "", **fields: Any) -> None:
        self.transport.control(dest, self._pack(kind, text, **fields))

    def tell_all(self, kind: ControlKind, **fields: Any) -> None:
        """Send a control message directly to every other live rank; compare _announce()."""
        message = self._pack(kind, "", **fields)
        for rank in range(self.transport.size):
            if rank != self.transport.rank and rank not in self.peers.dead:
                self.transport.control(rank, message)

    def announce_gave_up(self, gave_up: GaveUp) -> None:
        self._announce(Fact(ControlKind.GAVE_UP, gave_up.text()))
        self.peers.note_gave_up(self.transport.rank, gave_up)

    def announce_left(self, how: str, key: int = WAITS) -> None:
        """Announce that this rank enters no operation any more; answer each AGREE with ABSENT.

        Args:
            how: the reason, such as "called shutdown()".
            key: WAITS if this rank waits until all have left, else RESTS; see failure_news.py.
        """
        self._left = how
        self._announce(Fact(ControlKind.LEFT, how, key=key))
        for kind, operation, _ in self._boxes:
            if kind is ControlKind.AGREE:
                self.say_absent(operation)

    def end_rest(self) -> None:
        """Send this rank's goodbye to each rank that does not rest: this rank stops polling."""
        with self._lock:
            messages = self._news.end_of_rest()
        self._send(messages)

    def announce_failed(self, rank: int, reason: str) -> None:
        """Announce that `rank` failed: this rank, or the rank whose failure this rank noticed."""
        self._announce(Fact(ControlKind.FAILED, reason, about=rank))

    def announce_broken(self, rank: int, reason: str) -> None:
        """Announce that this rank takes part in no operation any more, because `rank` failed."""
        self._announce(Fact(ControlKind.BROKE, reason, about=rank))

    def _announce(self, fact: Fact) -> None:
        """Send a fact to every rank, directly or through others; any thread may call this."""
        fact = fact._replace(text=cut(fact.text, TEXT_MAX))
        with self._lock:
            self._news.say(fact, time.monotonic())
        self._send_news()

    def _send_news(self) -> None:
        if self._news.due_at == math.inf:
            return
        with self._lock:
            due = self._news.due(time.monotonic())
        self._send(due)

    def _send(self, messages: list[NewsMessage]) -> None:
        for dest, (kind, text, about, key), ranks, is_round in messages:
            self.tell(dest, kind, f"{text}\n{ranks}", about=about, key=key, flag=is_round)

    def _pack(self, kind: ControlKind, text: str, **fields: Any) -> bytes:
        return ControlHeader(kind, self.transport.ring_epoch, **fields).pack(text)

    def _hear(self, event: ArrivedMessage) -> None:
        header, text = ControlHeader.unpack(event.message)
        if header.ring_epoch != self.transport.ring_epoch:
            return  # a message of an earlier transport
        kind, peers, source = header.kind, self.peers, event.source
        if kind in LETTERS:
            self._deliver(source, header, text)
        elif kind is ControlKind.HERE:
            peers.note_entered(source, header.key)
        elif kind is ControlKind.ELSEWHERE:
            waits_in = (header.fingerprint, header.value) if header.flag else None
            peers.note_elsewhere(source, header.key, text, waits_in)
        elif kind in OF_NEWS:
            self._hear_news(header, text)
        elif kind in self.listeners:
            self.listeners[kind](source, header, text)

    def _hear_news(self, header: ControlHeader, message: str) -> None:
        text, _, ranges = message.rpartition("\n")
        kind, about, peers = header.kind, header.about, self.peers
        fact = Fact(kind, text, about, header.key)
        with self._lock:
            new = self._news.hear(fact, ranks_in(ranges), time.monotonic(), is_round=header.flag)
            if kind is ControlKind.FAILED and about != self.transport.rank:
                self._news.lose(about, time.monotonic())
        for rank in new:
            if kind is ControlKind.FAILED and about != self.transport.rank:
                peers.note_failed(about, text)
            elif kind is ControlKind.ABSENT:
                peers.note_absent(rank, header.key, text)
            elif kind is ControlKind.GAVE_UP:
                peers.note_gave_up(rank, GaveUp.of_text(text))
            elif kind is ControlKind.BROKE:
                peers.note_broken(rank, about, text)
            elif kind is ControlKind.LEFT:
                peers.note_left(rank, text)

    def _deliver(self, source: int, header: ControlHeader, text: str) -> None:
        box = self._boxes.setdefault((header.kind, header.key, header.round), deque())
        box.append((source, header, text))
        if self._left is not None and header.kind is ControlKind.AGREE:
            self.say_absent(header.key)

    def say_absent(self, key: int) -> None:
        """Announce that this rank has left and will never enter operation `key`."""
        assert self._left is not None
        self._announce(Fact(ControlKind.ABSENT, self._left, key=key))
