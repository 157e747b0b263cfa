"""Messages between ranks: one that is over within a moment takes one call of C++.

The first message with an array of some dtype and shape is prepared like any other. What its two
sides must agree on is remembered as a Correspondence, and the next ones look that up.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringcomm._core import Correspondence, KnownHalo, PeerMessage, Refusal, exchange_messages
from ringcomm.arrays import adapter_for
from ringcomm.engine.core.current_engine import engine
from ringcomm.engine.core.engine import Engine
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.handle import Handle
from ringcomm.engine.core.ledger import base_of
from ringcomm.engine.executors.posted_messages import (
    PostedMessages,
    posted_messages_of,
)
from ringcomm.engine.executors.short_calls import address_of, is_plain
from ringcomm.engine.progress.task import CompletedTask, Task
from ringcomm.transport.base import ANY_SOURCE

_MAX_KNOWN: Final = 4096
_SHOWN: Final = 4  # messages in a text
_MOMENT_S: Final = 1e-3  # where no memory is shared
_TAGS: Final = 1 << 64
_POSTED: Final = 256 << 10  # bytes that are copied in less time than a task takes


class Kind(Enum):
    """What a message is part of; those of different kinds do not meet, whatever their tags."""

    ARRAY = ""
    OBJECT = "object"  # its beginning
    REST = "rest of object"  # with a tag that no other has


class KnownCells(NamedTuple):
    """Cells of an array that are sent to a rank of a group, or received from it.

    Attributes:
        layout: offset in bytes, (length, stride in bytes) of each outer dimension, bytes of a run,
            and address of the buffer, or 0: as csrc/p2p/halo.hpp has it.
    """

    rank: int
    tag: int
    outline: str
    nbytes: int
    layout: tuple[int, list[tuple[int, int]], int, int]


class Mail:
    """The messages of a group between this rank and the others.

    Methods that send return True once the array may be changed; those that receive, the rank that
    has sent. Or they return the PeerMessage that is left to wait for; or None: nothing has begun,
    as the message must be prepared first.

    Attributes:
        is_in_node: all ranks of the group share memory.
        rank: this rank, within the group.
        moment_s: how long the methods stay with a message.
        completion: of the engine.
    """

    def __init__(self, engine: Engine, group: Group, kind: Kind = Kind.ARRAY) -> None:
        self._engine, self._state, self._peers = engine, engine.state, engine.watch.peers
        self.completion = engine.completion
        node = engine.transport.node
        self._messages = engine.transport.messages(may_read=bool(engine.settings.read_memory))
        self._ranks, self._places = group.ranks, group.ranks.places
        self.rank = group.index
        group_id = group.ledger_for(engine).group_id
        self._id = base_of(group_id, kind.value) if kind.value else group_id % _TAGS
        self._sends: dict[Any, Correspondence] = {}
        self._receives: dict[Any, Correspondence] = {}
        self.is_in_node = node is not None and all(node.shares_with(rank) for rank in group.ranks)
        self.moment_s = _MOMENT_S if node is None else node.moment_s
        self._posted: PostedMessages | None = None
        self._of_kinds = {kind: self}
        self._make = partial(Mail, engine, group)

    def of(self, kind: Kind) -> Mail:
        """Return the mail of the same group for another kind of messages."""
        if kind not in self._of_kinds:
            self._of_kinds[kind] = self._make(kind)
        return self._of_kinds[kind]

    def send(
        self, x: Any, dest: Any, tag: Any, seconds: float
    ) -> PeerMessage | Literal[True] | None:
        try:
            known = self._sends[dest, x.dtype, x.shape]
        except (AttributeError, KeyError, TypeError):  # no array, or what cannot be a key
            return None
        if self._must_prepare or type(dest) is not int:
            return None
        return known.send(x if type(x) is np.ndarray else address_of(x), tag, seconds)

    def receive(self, out: Any, source: Any, tag: Any, seconds: float) -> PeerMessage | int | None:
        try:
            known = self._receives[source, out.dtype, out.shape]
        except (AttributeError, KeyError, TypeError):
            return None
        if not self._state.is_usable or type(source) is not int:
            return None
        if type(out) is np.ndarray:
            rest = known.receive(out, tag, seconds)
            return self._places[rest] if type(rest) is int else rest
        return self._received(out, known.receive(address_of(out), tag, seconds))

    def exchange(  # noqa: PLR0917 - keywords take time
        self, x: Any, dest: Any, sendtag: Any, out: Any, source: Any, recvtag: Any
    ) -> tuple[PeerMessage | Literal[True] | None, PeerMessage | int | None]:
        """Send x and receive out. Both are begun, or neither."""
        try:
            to = self._sends[dest, x.dtype, x.shape]
            known = self._receives[source, out.dtype, out.shape]
        except (AttributeError, KeyError, TypeError):
            return None, None
        if self._must_prepare or type(dest) is not int or type(source) is not int:
            return None, None
        both = exchange_messages(
            to,
            x if type(x) is np.ndarray else address_of(x),
            sendtag,
            known,
            out if type(out) is np.ndarray else address_of(out),
            recvtag,
            self.moment_s,
        )
        return (None, None) if both is None else (both[0], self._received(out, both[1]))

    def posted_send(
        self, message: PeerMessage, nbytes: int, begin: Callable[[], Task | CompletedTask]
    ) -> Handle[None] | None:
        """Return the handle of a send that has begun, see PostedMessage; None if it needs a task.

        It does if it waits for room, or if its receiver would ask for its data.
        """
        if message.is_over or message.waits_for_room or nbytes > _POSTED:
            return None
        if message.is_by_wire or not self._messages.reads_memory:
            return None
        return self._all_posted.post(message, _nothing, begin)

    def posted_receive(
        self, message: PeerMessage, out: Any, nbytes: int, begin: Callable[[], Task | CompletedTask]
    ) -> Handle[int] | None:
        """Return the handle of a receive that has begun; see posted_send()."""
        if message.is_over or nbytes > _POSTED:
            return None
        if message.is_by_wire and nbytes > self._messages.most_whole_by_wire:
            return None

        def finish() -> int:
            self._received(out, message.source)
            return self._places[message.source]

        return self._all_posted.post(message, finish, begin)

    @property
    def _all_posted(self) -> PostedMessages:
        if self._posted is None:
            self._posted = posted_messages_of(self._engine, self.moment_s)
        return self._posted

    def known_halo(self, sends: list[KnownCells], receives: list[KnownCells]) -> KnownHalo:
        """Return an exchange of cells that C++ can carry out."""
        sides = [
            [
                (self.correspondence(each.rank, each.outline, each.nbytes), each.tag, each.layout)
                for each in side
            ]
            for side in (sends, receives)
        ]
        return KnownHalo(self._messages, *sides)

    def run_halo(
        self, known: KnownHalo, x: NDArray[Any]
    ) -> Literal[True] | tuple[list[PeerMessage | None], list[PeerMessage | None]] | Refusal | None:
        """Carry out an exchange of cells of x. See KnownHalo in csrc/bind_shm.cpp."""
        if self._must_prepare:
            return None
        is_buffer = x.dtype.kind != "V"  # bfloat16 is none
        return known.run(x if is_buffer else x.view(np.uint16), self.moment_s)

    @property
    def _must_prepare(self) -> bool:
        """True if the engine is unusable, or a message may be to a rank that is lost."""
        return not self._state.is_usable or self._peers.has_lost

    def _received(self, out: Any, rest: PeerMessage | int | None) -> PeerMessage | int | None:
        if type(rest) is not int:
            return rest
        if type(out) is not np.ndarray:
            adapter_for(out).written(out)
        return self._places[rest]

    def unasked(self) -> str:
        """Return a text: what has come that nobody has asked for; "" if there is nothing."""
        texts = [
            f"{outline} of rank {sender} with tag={tag}"
            for sender, tag, outline in self._messages.unasked(self.of(Kind.ARRAY)._id, _SHOWN)
        ]
        texts += [
            f"an object of rank {sender} with tag={tag}"
            for sender, tag, _ in self._messages.unasked(self.of(Kind.OBJECT)._id, _SHOWN)
        ]
        if not texts:
            return ""
        return f"What has waited here, and nobody has asked for: {', '.join(texts[:_SHOWN])}."

    @property
    def how_long_ones_come(self) -> str:
        if self._messages.reads_memory:
            return "copied once"
        error = self._messages.reading_error
        return f"copied twice ({errno.errorcode.get(error, error)})" if error else "copied twice"

    def earlier_refusal(self, peer: int) -> Refusal | None:
        """Return what an earlier message to a rank of the group was refused for, once for each."""
        return self._messages.earlier_refusal(self._ranks[peer])

    def correspondence(self, peer: int, outline: str, nbytes: int) -> Correspondence:
        """Return what is to be agreed on with a rank of the group, or with rc.ANY_SOURCE."""
        rank = None if peer == ANY_SOURCE else self._ranks[peer]
        return Correspondence(self._messages, rank, self._id, outline.encode(), nbytes)

    def learn(self, x: Any, peer: Any, correspondence: Correspondence, *, is_receive: bool) -> None:
        """Remember a correspondence for arrays like x, if C++ can take them as they are."""
        known = self._receives if is_receive else self._sends
        if len(known) < _MAX_KNOWN and x is not None and is_plain(x):
            known[peer, x.dtype, x.shape] = correspondence


def _nothing() -> None:
    pass


def mail_of(group: Group | None) -> Mail:
    """Return the mail of a group, or of all ranks. Raises ValueError, see Group.ledger_for()."""
    current = engine()
    group = current.groups.or_default(group)
    if group.mail is None:
        group.ledger_for(current)
        group.mail = Mail(current, group)
    mail: Mail = group.mail
    return mail


def how_long_messages_come() -> str:
    """Return "copied once", or "copied twice" and what refused the other; or "sent by MPI".

    If no long message has come yet, what is hoped for counts.
    """
    mail = mail_of(None)
    if not mail.is_in_node:
        return "sent by MPI"
    return mail.how_long_ones_come


def tag_in_64_bits(tag: int) -> int:
    """Return a tag as C++ holds it."""
    return (tag + _TAGS // 2) % _TAGS - _TAGS // 2
