"""A rank's requests to servers: sent, matched with their replies, waited for, and held back.

Requests of one rank to one server are answered in any order, but carried out in the order in which
they were made. What large requests may hold of the servers' memory is bounded by credit: past it,
the call that would send more waits.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ringcomm.engine.patience import refuse_hopeless
from ringcomm.errors import CommTimeoutError, MismatchError, RingcommError
from ringcomm.ps.frames import Header, Kind, Status

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.engine.engine import Engine
    from ringcomm.ps.future import Future
    from ringcomm.ps.link import Delivery, Link
    from ringcomm.ps.placement import Partition, View
    from ringcomm.ps.roles import Layout

CREDIT_NBYTES: Final = 64 << 20  # of bodies on their way from one rank to one server
CREDIT_REQUESTS: Final = 4096  # likewise
_NOTHING: Final = np.empty(0, np.uint8)
_ERRORS: Final[dict[str, type[Exception]]] = {
    each.__name__: each
    for each in (ValueError, TypeError, KeyError, OSError, MismatchError, RingcommError)
}


def error_text(error: Exception) -> bytes:
    """Return an error as the meta of a reply."""
    kind = type(error).__name__
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    if kind not in _ERRORS:
        kind, text = "RingcommError", f"{kind}: {text}"
    return json.dumps([kind, text[:8000]]).encode()


def _error_of(meta: bytes) -> Exception:
    kind, text = json.loads(meta)
    return _ERRORS[kind](text)


@dataclass(slots=True)
class Ask:
    """One request to one server.

    Attributes:
        partition: whose owner is asked; None: `server` itself.
        kind: see ringcomm.ps.frames.
        server: number of the server that is asked.
        clock: see Header.
        option: see Header.
        place: see Header; of requests it says where the result shall go, + 1.
        meta: explains it.
        body: its payload, as Link.send() wants it; kept until the reply.
        out: where a body of the reply that comes as a message shall go; None: anywhere.
        on_reply: called with a good reply before its future is told; may return what is to be
            asked instead.
    """

    kind: Kind
    partition: Partition | None = None
    server: int = -1
    clock: int = 0
    option: int = 0
    place: int = 0
    meta: bytes = b""
    body: Bytes = field(default_factory=lambda: _NOTHING)
    out: Bytes | None = None
    on_reply: Callable[[Delivery], Ask | None] | None = None
    future: Any = None


class Client:
    """This rank's side of all its requests.

    Args:
        engine: drives it.
        link: the wire.
        layout: who is a server.
        deadline_s: of each wait, in seconds.

    Attributes:
        n_bytes: of bodies on their way to each server.
        view: who owns what, as far as this rank has heard.
        on_view: called when it has changed.
    """

    def __init__(self, engine: Engine, link: Link, layout: Layout, deadline_s: float) -> None:
        self._engine = engine
        self._link = link
        self._layout = layout
        self._deadline_s = deadline_s
        self._sequence = itertools.count(1)
        self._asked: dict[int, Ask] = {}
        self.n_bytes: Counter[int] = Counter()
        self._n_asked: Counter[int] = Counter()
        self._counts = threading.Lock()  # who asks, and who drives, change them
        self.view: View | None = None
        self.on_view: Callable[[bytes], None] = lambda _: None

    @property
    def n_servers(self) -> int:
        """How many servers there are."""
        return len(self._layout.servers)

    def shares_memory(self, server: int) -> bool:
        """Return True if a server reads this rank's memory where it stands."""
        return self._link.shares_memory(self._layout.servers[server])

    def timestamp(self) -> int:
        """Return the number of a new request."""
        return next(self._sequence)

    def ask(self, asks: list[Ask], future: Future[Any]) -> None:
        """Send requests, whose replies make `future` complete; waits for credit if it must."""
        for ask in asks:
            ask.future = future
            if ask.partition is not None:
                ask.server = self._owner(ask.partition)
            future.awaited.add(ask.server)
            self._await_credit(ask, future.label)
            self._send(ask, next(self._sequence))
        self._engine.nudge()

    def _owner(self, partition: Partition) -> int:
        assert self.view is not None
        return self.view.owner(partition)

    def _send(self, ask: Ask, sequence: int) -> None:
        table, part = ask.partition or (0, 0)
        header = Header(
            ask.kind,
            view=0 if self.view is None else self.view.number,
            origin=self._engine.job_rank,
            incarnation=self._engine.transport.incarnation,
            sequence=sequence,
            table=table,
            partition=part,
            clock=ask.clock,
            option=ask.option,
            place=ask.place,
        )
        self._asked[sequence] = ask
        self._count(ask, 1)
        self._link.send(self._layout.servers[ask.server], header, ask.meta, ask.body)

    def _count(self, ask: Ask, sign: int) -> None:
        with self._counts:
            self.n_bytes[ask.server] += sign * ask.body.nbytes
            self._n_asked[ask.server] += sign

    def _await_credit(self, ask: Ask, label: str) -> None:
        server, nbytes = ask.server, ask.body.nbytes

        def has_credit() -> bool:
            held = self.n_bytes[server]
            is_small = held == 0 or held + nbytes <= CREDIT_NBYTES
            return is_small and self._n_asked[server] < CREDIT_REQUESTS

        if not has_credit():
            self._wait_until(has_credit, label, {server}, self._deadline_s)

    # --- replies --------------------------------------------------------------------------------
    def place_for(self, header: Header) -> Bytes | None:
        """Return where the body of a reply that comes as a message shall go."""
        ask = self._asked.get(header.sequence)
        out = None if ask is None else ask.out
        return out if out is not None and out.nbytes == header.n_body else None

    def on_reply(self, delivery: Delivery) -> None:
        """Take note of a reply; called by whoever drives."""
        header = delivery.header
        ask = self._asked.pop(header.sequence, None)
        if ask is None:
            return  # of a request that was given up
        self._count(ask, -1)
        if header.status == Status.WRONG_VIEW:
            self.on_view(delivery.body.tobytes())
            assert ask.partition is not None
            ask.server = self._owner(ask.partition)
            ask.future.awaited.add(ask.server)
            self._send(ask, header.sequence)
        elif header.status in (Status.OK, Status.LATE):
            again = None if ask.on_reply is None else ask.on_reply(delivery)
            if again is None:
                ask.future.replied(ask.server)
            else:
                again.future, again.server = ask.future, ask.server
                self._send(again, next(self._sequence))
        else:
            ask.future.fail(_error_of(delivery.meta))

    # --- waiting --------------------------------------------------------------------------------
    def wait_for(self, future: Future[Any], timeout_s: float | None) -> None:
        """Drive until a future is done.

        Raises:
            CommTimeoutError: it is not, by then.
            PeerFailedError: a rank died.
        """
        limit = self._deadline_s if timeout_s is None else timeout_s
        self._wait_until(future.done, future.label, future.awaited, limit)

    def _wait_until(
        self, is_over: Callable[[], bool], label: str, servers: set[int], limit_s: float
    ) -> None:
        engine = self._engine
        wait = Wait(label, tuple(range(engine.job_size)))
        end = time.monotonic() + limit_s
        looks = itertools.count(1)
        hopeless: list[RingcommError] = []

        def is_enough() -> bool:
            if is_over():
                return True
            if next(looks) % 16:
                return False
            try:
                refuse_hopeless(wait, engine.watch)
            except RingcommError as error:  # raised by who waits, not by who drives
                hopeless.append(error)
            return bool(hopeless) or time.monotonic() >= end

        engine.run_until(is_enough)
        if is_over():
            return
        if hopeless:
            raise hopeless[0]
        ranks = ", ".join(
            f"server {s} ({engine.transport.label(self._layout.servers[s])})"
            for s in sorted(servers)
        )
        raise CommTimeoutError(
            f"{label}: no answer within {limit_s:g} s from {ranks or 'the servers'}. It is busy, "
            "or waits for other workers; wait again, or raise the limit with ps.init(deadline_s=)",
            missing=[self._layout.servers[s] for s in sorted(servers)],
        )


@dataclass
class Wait:
    """What refuse_hopeless() needs to know of a wait: any death ends it."""

    label: str
    members: tuple[int, ...]
    key: int = 0
    base: int = 0
    number: int = 0
    timeout_s: float | None = None
    awaited: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
