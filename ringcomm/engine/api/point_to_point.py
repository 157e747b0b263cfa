"""send(), recv() and sendrecv(): one rank to another, matched in software.

The sender offers its message on the control channel, the receiver answers, then the data moves. So
a mismatch is the same error on both sides, ANY_SOURCE needs no wildcard on the wire, and a send()
that returns has been received.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ringcomm.arrays import (
    AnyAdapter,
    Array,
    Flat,
    adapter_for,
    any_adapter_for,
    arrived,
    device_adapter_for,
)
from ringcomm.arrays.base import overlap
from ringcomm.engine.api.world import engine
from ringcomm.engine.core.call import shape_text
from ringcomm.engine.core.execution import Deferred
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.handle import Handle
from ringcomm.engine.core.ledger import base_of
from ringcomm.engine.executors.device import Staging, device_executor
from ringcomm.engine.operations.base import int_of
from ringcomm.engine.progress.task import Task, TaskCoroutine
from ringcomm.errors import MismatchError
from ringcomm.transport.base import ANY_SOURCE
from ringcomm.transport.channel import Channel
from ringcomm.transport.header import Kind
from ringcomm.transport.tags import P2P
from ringcomm.transport.watch import Watch

_MAILBOXES = 1 << 33  # no id of a group: names of (group, tag)


def send(x: Array, dest: int, *, tag: int = 0, group: Group | None = None) -> None:
    """Send x to another rank; returns when that rank has received it.

    Args:
        x: numpy array, torch tensor or cupy array; a strided one is copied. What is on a GPU goes
            through host memory.
        dest: rank within the group, not this one.
        tag: any int; recv() names the same one.
        group: None: all ranks.

    Raises:
        MismatchError: the receiver's array is of another shape or dtype; raised there, too, and
            the engine stays usable.
        ValueError, TypeError: a bad argument.
        PeerFailedError: a rank of the group died, or the receiver left.
        CommTimeoutError: nobody received it within RINGCOMM_TIMEOUT_S; the engine is unusable.
    """
    engine().completion.complete(_sender(x, dest, tag, group, _Form(may_be_self=False)))


def recv(out: Array, source: int = ANY_SOURCE, *, tag: int = 0, group: Group | None = None) -> int:
    """Fill `out` with what a rank has sent, and return that rank.

    Args:
        out: array of the shape and dtype that was sent. Overwritten; may be strided.
        source: rank within the group, not this one, or rc.ANY_SOURCE: whoever sends first.
        tag: as passed to send().
        group: None: all ranks.

    Messages of one rank and tag arrive in the order in which they were sent. Raises: see send().
    """
    begin = _receiver(out, source, tag, group, _Form(may_be_self=False))
    sender: int = engine().completion.complete(begin)
    return sender


def sendrecv(
    x: Array,
    dest: int,
    out: Array,
    source: int,
    *,
    sendtag: int = 0,
    recvtag: int = 0,
    group: Group | None = None,
) -> int:
    """Send x to one rank while receiving `out` from another, and return the latter; see send().

    dest and source may be any ranks, this one too.

    Raises:
        ValueError: x and out overlap, or another bad argument.
    """
    _require_apart(x, out)
    receive = _receiver(out, source, recvtag, group, _Form())
    send = _sender(x, dest, sendtag, group, _Form())  # refuse both before either begins
    current = engine()
    begun: list[Task] = []
    try:
        begun.append(receive())
        begun.append(send())
        try:
            source = current.completion.result_of(begun[0])
        finally:
            current.completion.result_of(begun[1])
    except BaseException as error:
        for task in begun:
            current.completion.break_unless_over(task, error)
        raise
    return source


def _require_apart(x: Array, out: Array) -> None:
    """Raise ValueError if what is received would be written over what is being sent."""
    if device_adapter_for(x) is not None or device_adapter_for(out) is not None:
        return
    sent, received = adapter_for(x), adapter_for(out)
    if not (sent.is_contiguous(x) and received.is_contiguous(out)):
        return  # one of the two goes through memory of its own
    if overlap(sent.flat(x), received.flat(out)):
        raise ValueError(
            "sendrecv: x and out overlap, so that what is received would be written over what is "
            "being sent. Pass x.copy(), or an out of its own memory"
        )


def send_async(
    x: Array,
    dest: int,
    *,
    tag: int = 0,
    group: Group | None = None,
    timeout_s: float | None = None,
    by_count: bool = False,
) -> Handle[None]:
    """Start send(); dest may be this rank. x must stay as it is until the handle is done.

    Args:
        timeout_s: deadline, in seconds; None: RINGCOMM_TIMEOUT_S.
        by_count: x and what receives it need but as many elements, not the same shape; alike on
            both sides.
    """
    begin = _sender(x, dest, tag, group, _Form(True, False, timeout_s, by_count))
    return Handle(engine().completion, begin())


def recv_async(
    out: Array,
    source: int = ANY_SOURCE,
    *,
    tag: int = 0,
    group: Group | None = None,
    timeout_s: float | None = None,
    by_count: bool = False,
) -> Handle[int]:
    """Start recv(); the handle's result is the rank that has sent. See send_async()."""
    begin = _receiver(out, source, tag, group, _Form(True, False, timeout_s, by_count))
    return Handle(engine().completion, begin())


class _Form(NamedTuple):
    """How a message is sent or received."""

    may_be_self: bool = True  # the other rank may be this one
    is_awaited: bool = True  # the caller waits
    timeout_s: float | None = None  # deadline, in seconds; None: RINGCOMM_TIMEOUT_S
    by_count: bool = False  # arrays fit if they have as many elements

    def begin(
        self,
        label: str,
        members: tuple[int, ...],
        talk: Callable[[Task, int], TaskCoroutine],
    ) -> Task:
        """Begin a conversation."""
        begin = engine().conversations.begin
        return begin(label, members, talk, is_awaited=self.is_awaited, timeout_s=self.timeout_s)


@dataclass(frozen=True)
class _Side:
    """This rank's side of a conversation."""

    watch: Watch  # the control channel
    group: Group  # in which the ranks are numbered
    context: int  # of the group's messages
    mailbox: int  # 64 bits for the group and the tag
    adapter: AnyAdapter  # of the array that is sent or received
    staging: Staging | None  # what moves it through host memory, if it is on a GPU
    by_count: bool  # arrays fit if they have as many elements

    @classmethod
    def of(cls, x: Array, tag: int, group: Group | None, *, by_count: bool) -> _Side:
        """Check the arguments."""
        current = engine()
        group = current.groups.or_default(group)
        ledger = group.ledger_for(current)
        mailbox = base_of(_MAILBOXES, f"{ledger.group_id}:{int_of('tag', tag)}")
        on_gpu = device_adapter_for(x)
        staging = None if on_gpu is None else device_executor().stage(group, on_gpu, x)
        adapter = on_gpu or adapter_for(x)
        return cls(current.watch, group, ledger.context, mailbox, adapter, staging, by_count)

    def outline(self, x: Array) -> str:
        """Return "float32 (2, 3)"."""
        shape = self.adapter.shape(x)
        if self.by_count:
            shape = (math.prod(shape),)
        return f"{self.adapter.dtype(x)} {shape_text(shape)}"

    def empty(self, like: Array) -> Array:
        """Return a contiguous array of this shape."""
        of = self.staging or self.adapter
        return of.empty(like, self.adapter.shape(like))

    @property
    def where(self) -> str:
        """Return the group for a label, "" for all ranks."""
        return "" if self.context == 0 else f" of {self.group!r}"

    def channel(self, task: Task, serial: int) -> Channel:
        """Return the messages of the sender's serial-th conversation."""
        channel = Channel(
            self.watch,
            task.key,
            self.group.ranks,
            context=self.context,
            stream=serial % self.watch.transport.tags.n_streams,
            channel=P2P,
        )
        task.channels.append(channel)
        return channel


def _sender(x: Array, dest: int, tag: int, group: Group | None, form: _Form) -> Callable[[], Task]:
    """Check the arguments; return what begins to send."""
    x = arrived(x)
    adapter = any_adapter_for(x)
    adapter.dtype(x)  # refuses what has no memory to look at
    whole = x if adapter.is_contiguous(x) else adapter.copy(x)
    side = _Side.of(whole, tag, group, by_count=form.by_count)  # its moment is behind the copy
    dest = _peer("dest", dest, side.group, may_be_self=form.may_be_self)
    outline = side.outline(whole)

    def talk(task: Task, serial: int) -> TaskCoroutine:
        return _send(side, side.channel(task, serial), whole, outline, dest=dest, serial=serial)

    label = f"send(dest={dest}, tag={tag}){side.where}"
    pair = _pair(side.group, dest)
    return lambda: form.begin(label, pair, talk)


def _receiver(
    out: Array, source: int, tag: int, group: Group | None, form: _Form
) -> Callable[[], Task]:
    """Check the arguments; return what begins to receive."""
    out = arrived(out)
    side = _Side.of(out, tag, group, by_count=form.by_count)
    _require_room(side, out)
    source = int_of("source", source, "a rank, an int")
    if source != ANY_SOURCE:
        source = _peer("source", source, side.group, may_be_self=form.may_be_self)
    name = "rc.ANY_SOURCE" if source == ANY_SOURCE else str(source)
    members = side.group.ranks if source == ANY_SOURCE else _pair(side.group, source)
    label = f"recv(source={name}, tag={tag}){side.where}"
    return lambda: form.begin(label, members, lambda task, _: _recv(side, task, out, source))


async def _send(side: _Side, t: Channel, x: Array, outline: str, *, dest: int, serial: int) -> None:
    t.tell(dest, Kind.OFFER, outline, key=side.mailbox, value=serial)
    t.awaited = (t.members[dest],)
    answer = await t.hear(Kind.ANSWER, serial, dest)
    t.awaited = ()
    assert answer.header is not None
    if not answer.header.flag:
        raise MismatchError(answer.text)
    if side.staging is None:
        await t.wait(t.isend(adapter_for(x).flat(x).bytes, dest))
        return
    mirror, lease = await side.staging.fetch(x)
    await t.wait(t.isend(mirror.flat.bytes, dest))
    del lease


def _require_room(side: _Side, out: Array) -> None:
    """Raise ValueError, before anybody is asked to send, if nothing can be received into `out`."""
    try:
        side.adapter.require_writable(out)
    except ValueError as error:
        raise ValueError(
            f"recv: {error}. Nothing was received: a rank that sends this message waits until "
            "another recv() takes it, into an array of its own memory"
        ) from error


async def _recv(side: _Side, task: Task, out: Array, source: int) -> int | Deferred:
    t = side.channel(task, 0)
    if source == ANY_SOURCE:
        t.awaited = t.members.others
    elif source != t.rank:
        t.awaited = (t.members[source],)
    offer = await t.hear(Kind.OFFER, side.mailbox, source)
    t.awaited = ()
    assert offer.header is not None
    serial = offer.header.value
    sender = t.members.places[offer.source]
    wanted = side.outline(out)
    if offer.text != wanted:
        text = (
            f"{task.label}: rank {offer.source} sent {offer.text}, rank {t.members[t.rank]} "
            f"receives {wanted}. Receive into an array of the shape and dtype that is sent."
        )
        t.tell(sender, Kind.ANSWER, text, key=serial, flag=False)
        raise MismatchError(text)
    work = out if side.adapter.is_contiguous(out) else side.empty(out)
    data = side.channel(task, serial)
    t.tell(sender, Kind.ANSWER, key=serial, flag=True)

    def finish() -> int:
        if work is out:
            side.adapter.written(out)
        else:
            side.adapter.assign(out, work)
        return sender

    async def fill(flat: Flat) -> None:
        await data.wait(data.irecv(flat.bytes, sender))

    if side.staging is None:
        await fill(adapter_for(work).flat(work))
        return finish()
    return await side.staging.bring(
        t, out=work, fill=lambda mirror: fill(mirror.flat), finish=finish
    )


def _pair(group: Group, peer: int) -> tuple[int, ...]:
    return tuple({group.ranks[group.index], group.ranks[peer]})


def _peer(what: str, rank: int, group: Group, *, may_be_self: bool) -> int:
    rank = int_of(what, rank, "a rank, an int")
    if not 0 <= rank < group.size:
        raise ValueError(f"{what} is {rank}; ranks are 0 to {group.size - 1}")
    if rank == group.rank and not may_be_self:
        raise ValueError(f"{what} is this rank itself, which would wait for ever: use sendrecv()")
    return rank
