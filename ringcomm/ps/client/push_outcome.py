"""Collects the replies to a push, and makes its outcome of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, Self

from ringcomm.ps.client.future import Future, FutureWaiter, Pushed
from ringcomm.ps.client.request import NO_BODY, Request
from ringcomm.ps.protocol.frame_meta import REJECTED, SQUARES
from ringcomm.ps.protocol.frames import FrameKind, Status

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.placement.partition_places_and_moves import Partition
    from ringcomm.ps.protocol.link import Delivery


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
    table = option = place = epoch = turn = 0
    clock_of = source = out = on_end = None

    def __init__(
        self, client: FutureWaiter, label: str, partition: Partition, *, clock: int, meta: bytes,
        body: Bytes, reuse: Callable[[Bytes], None],
    ) -> None:  # fmt: skip
        self._client = client
        self.label = label
        self.partition = partition
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


def table_of(request: AnyRequest) -> int:
    return request.table if request.partition is None else request.partition[0]


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
