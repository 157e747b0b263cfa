"""What a server has of a table, as the core's decisions need it: dense blocks, and rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ringcomm.ps.protocol.frame_meta import ASSIGN, HOLD, INITIAL, RELEASE, SKIP, PushMeta
from ringcomm.ps.protocol.frames import Status
from ringcomm.ps.server.core import actions as do
from ringcomm.ps.server.core import events as on

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.protocol.frames import FrameHeader
    from ringcomm.ps.protocol.link import Delivery
    from ringcomm.ps.server.core.actions import Key
    from ringcomm.ps.server.replies import Replies


class Values(Protocol):
    """The values of a unit: a DensePartition, or a Shard.

    What apply(), write() and end() return is the meta of the replies to pushes.

    Attributes:
        version: updates so far, or rounds.
        lets_in: a worker asks whether it is in a round of ps.FirstOf before it pushes.
        unchanged: the meta of a reply to a push that has changed nothing.
    """

    version: int

    @property
    def lets_in(self) -> bool: ...
    @property
    def unchanged(self) -> bytes: ...

    def decoded(
        self, header: FrameHeader, meta: PushMeta, body: Bytes, view: Callable[[int, int], Bytes]
    ) -> Any:
        """Return a push as the methods below take it.

        Args:
            header: of the request.
            meta: likewise.
            body: likewise.
            view: returns the memory of its sender at a place, so many bytes.

        Raises:
            ValueError: it does not fit.
        """

    def factor(self, meta: PushMeta) -> Any:
        """Return the content of a release. Raises ValueError."""

    def note_push(self, body: Bytes) -> None:
        """Count a push that came for the first time."""

    def note_late(self) -> None:
        """Count a push whose round was over."""

    def apply(self, push: Any) -> bytes:
        """Make an update at once."""

    def write(self, push: Any) -> bytes:
        """Replace values."""

    def hold(self, pushes: list[Any]) -> bytes:
        """Keep the mean of a round; return how large it is, as SQUARES packs it."""

    def end(
        self, number: int, pushes: list[Any], release: Any, *, drops: bool
    ) -> tuple[bytes, bytes]:
        """End a round: update with the mean of pushes, or of none: with the one that is held.

        Returns:
            Why it is no update, empty if it is one; and the meta of replies.
        """


class Pushes:
    """Decodes pushes for the core, and carries out what it decides on values.

    Args:
        view: returns the memory of a rank at a place, so many bytes.
        reply: sends answers.

    Attributes:
        performers: by action.
    """

    def __init__(self, view: Callable[[int, int, int], Bytes], reply: Replies) -> None:
        self._view, self._reply = view, reply
        self.performers: dict[type, Callable[[Any, Values], None]] = {
            do.Acknowledge: self._unchanged,
            do.Apply: self._apply,
            do.Write: self._write,
            do.Hold: self._hold,
            do.End: self._end,
            do.Late: self._late,
            do.ReleaseDone: self._unchanged,
        }

    def decoded(self, key: Key, request: Delivery, values: Values) -> on.Event:
        """Return the event for a push. Raises ValueError: it does not fit."""
        meta = PushMeta.of(request.meta)
        flags = meta.flags
        if flags & RELEASE:
            return on.Released(key, request, values.factor(meta), drops=bool(flags & SKIP))
        view = partial(self._view, request.source)
        push = values.decoded(request.header, meta, request.body, view)
        if flags & INITIAL:
            return on.Initialized(key, request, push)
        if flags & ASSIGN:
            return on.Assigned(key, request, push)
        is_held = bool(flags & HOLD)
        return on.Contributed(key, request, push, is_held=is_held, lets_in=values.lets_in)

    def _unchanged(self, action: do.Acknowledge | do.ReleaseDone, values: Values) -> None:
        self._reply(action.request, clock=values.version, meta=values.unchanged)

    def _apply(self, action: do.Apply, values: Values) -> None:
        meta = values.apply(action.payload)
        self._reply(action.request, clock=values.version, meta=meta)

    def _write(self, action: do.Write, values: Values) -> None:
        meta = values.unchanged if action.payload is None else values.write(action.payload)
        self._reply(action.request, clock=values.version, meta=meta)

    def _hold(self, action: do.Hold, values: Values) -> None:
        meta = values.unchanged + values.hold([each.payload for each in action.contributions])
        for each in action.contributions:
            self._reply(each.request, clock=values.version, meta=meta)

    def _end(self, action: do.End, values: Values) -> None:
        pushes = [each.payload for each in action.contributions]
        why, meta = values.end(action.number, pushes, action.release, drops=action.drops)
        status = Status.LATE if why else Status.OK
        for each in action.contributions:
            self._reply(each.request, status=status, clock=values.version, meta=meta + why)

    def _late(self, action: do.Late, values: Values) -> None:
        values.note_late()
        request, meta = action.contribution.request, values.unchanged + b"late"
        self._reply(request, status=Status.LATE, clock=values.version, meta=meta)
