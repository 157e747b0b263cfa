"""A wire that misbehaves on purpose, to test what stands above it.

It wraps any Transport and does to the messages that this rank sends what networks, and MPI within
its rules, do: loses them, holds them back, lets those of different peers or tags overtake each
other; or lets the rank die at a chosen one. Control messages of an agreement and of join()
count as messages, for operations depend on them; the others, which speak of faults, do not.
The messages of send() and recv() do not come here: C++ passes them on.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ringcomm.arrays.base import Bytes
from ringcomm.transport.base import Event, Transport, WireRequest
from ringcomm.transport.control_header import LETTERS, ControlHeader, ControlKind

_CONTROL = -1  # stands for a tag: control messages of one peer do not overtake each other
_OF_OPERATIONS = (
    *LETTERS,
    ControlKind.JOINED,
    ControlKind.INVITE,
)  # an operation may need these to complete


class PlannedDeath(BaseException):
    """Raised at the message at which the rank was to die; not an Exception: nobody survives it."""


@dataclass
class Faults:
    """The faults of one rank. Messages are counted from 0; -1 stands for none.

    Attributes:
        drop: the message that is lost; its sender believes that it was sent.
        drop_control: every control message is lost that speaks of faults.
        delay: the message that is held back, and with it those behind it for the same peer and tag.
        delay_s: for how long, in seconds.
        reorder_seed: if not None, every message is held back for a random number of looks at it,
            so that messages of different (peer, tag) overtake each other, as MPI allows.
        die: the message, sent or received, at which `kill` is called.
        kill: by default raises PlannedDeath.
    """

    drop: int = -1
    drop_control: bool = False
    delay: int = -1
    delay_s: float = 0.0
    reorder_seed: int | None = None
    die: int = -1
    kill: Callable[[], None] | None = None


@dataclass(eq=False)
class _Held:
    """A send that is not on the wire yet."""

    post: Callable[[], WireRequest | None]
    line: deque[_Held]  # sends of the same peer and tag, oldest first: these never overtake
    looks: int = 0
    not_before: float = 0.0
    sent: WireRequest | None = None
    is_out: bool = False
    source: int = field(default=-1)

    def test(self) -> bool:
        self.looks -= 1
        while self.line and self.line[0].is_due():
            held = self.line.popleft()
            held.sent = held.post()
            held.is_out = True
        return self.is_out and (self.sent is None or self.sent.test())

    def is_due(self) -> bool:
        return self.looks <= 0 and time.monotonic() >= self.not_before

    def cancel(self) -> None:
        if self in self.line:
            self.line.remove(self)


class _Lost:
    """A send that never arrives and looks as if it had."""

    source = -1

    def test(self) -> bool:
        return True

    def cancel(self) -> None:
        """Do nothing."""


class FaultyTransport:
    """Transport that hands everything to `inner`, except for the faults.

    Every message goes through here, so none can do without Python.
    """

    runner = None

    def __init__(self, inner: Transport, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self._random = random.Random(faults.reorder_seed)
        self._n_sent = 0
        self._n_messages = 0
        self._lines: dict[tuple[int, int], deque[_Held]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def isend(self, data: Bytes, dest: int, tag: int) -> WireRequest:
        """Start to send, or not."""
        return self._send(lambda: self._inner.isend(data, dest, tag), (dest, tag))

    def irecv(self, out: Bytes, source: int, tag: int) -> WireRequest:
        """Start to receive."""
        self._count()
        return self._inner.irecv(out, source, tag)

    def control(self, dest: int, message: bytes) -> None:
        """Send a control message, or not."""
        header, _ = ControlHeader.unpack(message)
        if header.kind in _OF_OPERATIONS:
            self._send(lambda: self._inner.control(dest, message), (dest, _CONTROL))
        elif not self._faults.drop_control:
            self._inner.control(dest, message)

    def poll(self) -> list[Event]:
        """Return what happened since the last call."""
        for line in list(self._lines.values()):
            for held in tuple(line):
                held.test()
        return self._inner.poll()

    def abandon(self, requests: list[WireRequest]) -> None:
        """Withdraw what is held back; the inner transport keeps the rest."""
        inner: list[WireRequest] = []
        for request in requests:
            if isinstance(request, _Held):
                request.cancel()
                if request.sent is not None:
                    inner.append(request.sent)
            elif not isinstance(request, _Lost):
                inner.append(request)
        self._inner.abandon(inner)

    def flush(self) -> None:
        """Deliver what is held back: its rank does not look at the wire any more."""
        for line in self._lines.values():
            while line:
                line[0].looks, line[0].not_before = 0, 0.0
                line[0].test()

    def _send(self, post: Callable[[], WireRequest | None], lane: tuple[int, int]) -> WireRequest:
        self._count()
        number = self._n_sent
        self._n_sent += 1
        if number == self._faults.drop:
            return _Lost()
        line = self._lines.setdefault(lane, deque())
        held = _Held(post, line)
        if number == self._faults.delay:
            held.not_before = time.monotonic() + self._faults.delay_s
        if self._faults.reorder_seed is not None:
            held.looks = self._random.randrange(8)
        line.append(held)
        held.test()
        return held

    def _count(self) -> None:
        number = self._n_messages
        self._n_messages += 1
        if number != self._faults.die:
            return
        if self._faults.kill is not None:
            self._faults.kill()
        raise PlannedDeath(f"dies at message {number}")
