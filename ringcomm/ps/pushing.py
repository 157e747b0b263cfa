"""A push to a dense table, under way: what its blocks answer, and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from ringcomm.ps.frames import Kind, Status
from ringcomm.ps.future import Future, Pushed
from ringcomm.ps.messages import SQUARES

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.client import Client
    from ringcomm.ps.link import Delivery
    from ringcomm.ps.table import Table


_NO_BODY: Final = np.empty(0, np.uint8)


class Pushing(Future[Pushed]):
    """The future of a push.

    Args:
        client: which made it.
        label: "push[w]".
        n: how many blocks are to answer.
        timestamp: number of the request.
        is_held: answers say how large the mean of a round is.
    """

    def __init__(
        self, client: Client, label: str, n: int, timestamp: int, *, is_held: bool
    ) -> None:
        self._told: dict[int, Delivery | int] = {}  # by block; a clock if it says no more
        self._is_held = is_held
        super().__init__(client, label, n, _nothing, timestamp)

    def note_of(self, part: int) -> Callable[[Delivery | int], None]:
        """Return what takes the answer of a block, or its clock if that is all."""
        return partial(self._told.__setitem__, part)

    def _made(self) -> Pushed:
        told = self._told
        return _outcome([told[part] for part in sorted(told)], is_held=self._is_held)


class PlainPush(Future[Pushed]):
    """A push of a gradient of a whole table of one block: request and future in one, as most are.

    It has all that Client wants of an Ask; see there.

    Args:
        table: that it is for.
        clock: version that the gradient was computed of.
        meta: explains it.
        body: the gradient, in memory that stays, where Link.send() wants it.
    """

    kind: Final = Kind.PUSH
    table = option = place = epoch = turn = 0
    clock_of = out = on_end = None

    def __init__(self, table: Table, clock: int, meta: bytes, body: Bytes) -> None:
        self._table = table
        self._client = table.client
        self.partition = table.number, 0
        self.clock = clock
        self.meta = meta
        self.body = body
        self.server = -1
        self._callbacks = ()

    @property
    def label(self) -> str:  # type: ignore[override]
        """See Future."""
        return self._table.push_label

    @property
    def future(self) -> Self:
        """What is told of the answer."""
        return self

    @property
    def timestamp(self) -> int:  # type: ignore[override]
        """Number of the request."""
        return self.acked_by

    @property
    def awaited(self) -> set[int]:  # type: ignore[override]
        """The server that has not answered."""
        return set() if self._is_done else {self.server}

    def on_ack(self, clock: int) -> None:
        """Take note that it was carried out."""
        self._result = Pushed(True, "", clock)

    def take(self, reply: Delivery) -> None:
        """Likewise, of an answer that may say more."""
        self._result = _outcome([reply], is_held=False)

    def replied(self, server: int) -> None:
        """Take note of a good reply."""
        del server
        self._end()

    def _end(self) -> None:
        self._table.keep_room(self.body)
        self.body = _NO_BODY  # whoever keeps this keeps no gradient
        super()._end()


def _nothing() -> Pushed:
    raise AssertionError("a push ends by what its blocks say")


def _outcome(told: Sequence[Delivery | int], *, is_held: bool) -> Pushed:
    """Return what became of a push, by the answers of its blocks in order."""
    if len(told) == 1 and isinstance(told[0], int):  # as a rule
        return Pushed(True, "", told[0])
    replies = [each for each in told if not isinstance(each, int)]
    clocks = [each if isinstance(each, int) else each.header.clock for each in told]
    version = min(clocks, default=0)
    if not replies:
        return Pushed(True, "", version)
    whys = [reply.meta.decode() for reply in replies if reply.header.status == Status.LATE]
    why = "" if not whys else "late" if "late" in whys else whys[0]
    means = [SQUARES.unpack(reply.meta) for reply in replies] if is_held and not whys else []
    squares, is_finite = sum(each[0] for each in means), all(each[1] for each in means)
    return Pushed(not whys, why, version, squares=squares, is_finite=is_finite)
