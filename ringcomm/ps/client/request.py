"""A request of a client to one server; the replies to those of a push, and its outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from ringcomm.ps.client.future import Future, FutureWaiter, Pushed
from ringcomm.ps.protocol.frame_meta import REJECTED, SQUARES
from ringcomm.ps.protocol.frames import FrameKind, Status

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.placement.partitions import Partition
    from ringcomm.ps.protocol.link import Delivery

NO_BODY: Final = np.empty(0, np.uint8)


@dataclass(slots=True, eq=False)
class Request:
    """One request to one server.

    Attributes:
        kind: see ringcomm.ps.protocol.frames.
        partition: its owner gets the request; None: `server` does.
        server: number of the server.
        table: number of the table; that of the partition, if there is one.
        clock: see Header.
        option: see Header.
        place: see Header.
        meta: explains the request.
        body: the payload, as Link.send() takes it; kept until the reply.
        source: what fill() is to copy to `body`, which is not sent before; None: nothing.
        out: memory for the body of a reply that comes as a message; None: any memory.
        epoch: of the table, if partition is None: see rows/row_calls.py; of a command: see
            request_command().
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

    def __post_init__(self) -> None:
        if self.partition is not None:
            self.table = self.partition[0]

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


# --- pushes ---------------------------------------------------------------------------------------
class PlainPush(Future[Pushed]):
    """A push of a gradient to a whole table of one block: most are such.

    It is future and request in one, with all attributes of Request.

    Args:
        client: which made it.
        label: "push[w]".
        partition: see Request, as for clock, meta and body.
        clock: version of which the gradient was computed.
        meta: with the updater.
        body: the gradient.
        reuse: takes the body once it is not needed any more.
    """

    kind: Final = FrameKind.PUSH
    option = place = epoch = turn = 0
    clock_of = source = out = on_end = None

    def __init__(
        self, client: FutureWaiter, label: str, partition: Partition, *, clock: int, meta: bytes,
        body: Bytes, reuse: Callable[[Bytes], None],
    ) -> None:  # fmt: skip
        self._client = client
        self.label = label
        self.partition = partition
        self.table = partition[0]
        self.clock = clock
        self.meta = meta
        self.body = body
        self._reuse = reuse
        self.server = -1
        self._callbacks = ()

    @property
    def future(self) -> Self:
        return self

    @property
    def timestamp(self) -> int:  # type: ignore[override]
        return self.acked_by

    def on_ack(self, clock: int) -> None:
        self._result = Pushed(True, "", clock)

    def take(self, reply: Delivery) -> None:
        self._result = outcome_of([reply])

    def replied(self) -> None:
        self._end()

    def _end(self) -> None:
        self._reuse(self.body)
        self.body = NO_BODY  # a caller that keeps this keeps no gradient
        super()._end()


AnyRequest = Request | PlainPush


class PushReplies:
    """The replies to a push, and its outcome.

    Args:
        is_held: the replies say how large the mean of the round is.
        is_sparse: they are about rows, and say how many were rejected.
    """

    def __init__(self, *, is_held: bool = False, is_sparse: bool = False) -> None:
        self._is_held, self._is_sparse = is_held, is_sparse
        self._replies: dict[int, Delivery | int] = {}  # the clock of one that says no more

    def taking(self, place: int) -> Callable[[Delivery | int], None]:
        """Return the function that takes one reply, or its clock if it has nothing else.

        The order of the places decides in which order means are added.
        """
        return partial(self._replies.__setitem__, place)

    def clear(self) -> None:
        self._replies.clear()

    def outcome(self) -> Pushed:
        replies = [reply for _, reply in sorted(self._replies.items())]
        return outcome_of(replies, is_held=self._is_held, is_sparse=self._is_sparse)


def outcome_of(
    replies: Sequence[Delivery | int], *, is_held: bool = False, is_sparse: bool = False
) -> Pushed:
    if len(replies) == 1 and isinstance(replies[0], int):  # as a rule
        return Pushed(True, "", replies[0])
    full = [each for each in replies if not isinstance(each, int)]
    clocks = [each if isinstance(each, int) else each.header.clock for each in replies]
    rejected, start = 0, 0
    if is_sparse:
        rejected, start = sum(REJECTED.unpack_from(reply.meta)[0] for reply in full), REJECTED.size
    whys = {reply.meta[start:].decode() or "late" for reply in full if is_late(reply)}
    why = "late" if "late" in whys else min(whys, default="")
    means = [reply.meta[start:] for reply in full if is_held and not is_late(reply)]
    squares = [SQUARES.unpack(mean) for mean in means if mean]
    return Pushed(
        not why,
        why,
        min(clocks, default=0),
        rejected,
        sum(square for square, _ in squares),
        all(is_finite for _, is_finite in squares),
    )


def is_late(reply: Delivery) -> bool:
    """Return True if a push was applied to nothing."""
    return reply.header.status == Status.LATE
