"""send(), recv() and sendrecv(): messages from one rank to another.

The sender offers its message on the control channel, the receiver answers, then the data moves. So
a mismatch is the same error on both sides, ANY_SOURCE needs no wildcard on the wire, and a send()
returns after its message has been received.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

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
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.call import shape_text
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.handle import Handle
from ringcomm.engine.core.ledger import base_of
from ringcomm.engine.core.plan import Deferred
from ringcomm.engine.executors.gpu_loader import HostStaging, device_executor
from ringcomm.engine.operations.base import int_of, rank_of
from ringcomm.engine.peers.tasks_outside_collectives import Talk
from ringcomm.engine.progress.task import Task, TaskCoroutine
from ringcomm.errors import MismatchError
from ringcomm.transport.base import ANY_SOURCE
from ringcomm.transport.channel import Channel
from ringcomm.transport.control_header import ControlKind
from ringcomm.transport.tags import P2P

_MAILBOXES = 1 << 33  # replaces the id of a group in base_of(), for mailboxes

_Conversation = tuple[str, tuple[int, ...], Talk]  # arguments of Conversations.begin()


def send(x: Array, dest: int, *, tag: int = 0, group: Group | None = None) -> None:
    """Send x to another rank; return when that rank has received it.

    Args:
        x: numpy array, torch tensor or cupy array; a strided one is copied, and one on a GPU goes
            through host memory.
        dest: rank within the group, not this one.
        tag: any int; the receiver passes the same one.
        group: the group that numbers the ranks; None: all ranks.

    Raises:
        MismatchError: the receiver's array has another shape or dtype. The receiver raises it,
            too, and the engine stays usable.
        ValueError, TypeError: a bad argument.
        PeerFailedError: a rank of the group died, or the receiver left.
        CommTimeoutError: nobody received x within RINGCOMM_TIMEOUT_S; the engine is unusable.
    """
    conversation = _sender(x, dest, tag, group)
    _refuse_self("dest", dest, group)
    engine().conversations.hold(*conversation)


def recv(out: Array, source: int = ANY_SOURCE, *, tag: int = 0, group: Group | None = None) -> int:
    """Receive a message into `out`, and return the rank that sent it.

    Args:
        out: array with the sender's shape and dtype. It is overwritten, and may be strided.
        source: rank within the group, not this one, or rc.ANY_SOURCE for the first that sends.
        tag: the tag that the sender has passed to send().
        group: the group that numbers the ranks; None: all ranks.

    Messages of one rank and tag arrive in the order in which they were sent.

    Raises:
        MismatchError, ValueError, TypeError, PeerFailedError, CommTimeoutError: see send().
    """
    conversation = _receiver(out, source, tag, group)
    _refuse_self("source", source, group)
    sender: int = engine().conversations.hold(*conversation)
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
    """Send x to `dest` while receiving `out`; return the rank that sent `out`. See send().

    dest and source may be any ranks, also this one, and source may be rc.ANY_SOURCE.

    Raises:
        ValueError: x and out overlap, or another bad argument.
    """
    _require_apart(x, out)
    receive = _receiver(out, source, recvtag, group)
    send = _sender(x, dest, sendtag, group)  # both sides are checked before one begins
    current = engine()
    begun: list[Task] = []
    try:
        begun.append(current.conversations.begin(*receive))
        begun.append(current.conversations.begin(*send))
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
    if device_adapter_for(x) is not None or device_adapter_for(out) is not None:
        return
    sent, received = adapter_for(x), adapter_for(out)
    if not (sent.is_contiguous(x) and received.is_contiguous(out)):
        return  # one of the two is copied
    if overlap(sent.flat(x), received.flat(out)):
        raise ValueError(
            "sendrecv: x and out overlap, so the received data would overwrite data that is still "
            "being sent. Pass x.copy(), or an `out` that does not overlap with x"
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
    """Start send(), also to this rank itself. x must not change until the handle is done.

    by_count: compare numbers of elements instead of shapes; the same on both sides.
    """
    return _start(_sender(x, dest, tag, group, by_count=by_count), timeout_s)


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
    return _start(_receiver(out, source, tag, group, by_count=by_count), timeout_s)


def _start(conversation: _Conversation, timeout_s: float | None) -> Handle[Any]:
    current = engine()
    begin = current.conversations.begin
    return Handle(current.completion, begin(*conversation, is_awaited=False, timeout_s=timeout_s))


@dataclass(frozen=True)
class _Side:
    group: Group  # in which ranks are numbered
    mailbox: int  # 64 bits that identify the group and the tag
    adapter: AnyAdapter  # of the array that is sent or received
    staging: HostStaging | None  # moves the array through host memory if it is on a GPU
    by_count: bool  # compare numbers of elements, not shapes

    @classmethod
    def of(cls, x: Array, tag: int, group: Group | None, *, by_count: bool) -> _Side:
        current = engine()
        group = current.groups.or_default(group)
        ledger = group.ledger_for(current)
        mailbox = base_of(_MAILBOXES, f"{ledger.group_id}:{int_of('tag', tag)}")
        on_gpu = device_adapter_for(x)
        staging = None if on_gpu is None else device_executor().stage(group, on_gpu, x)
        return cls(group, mailbox, on_gpu or adapter_for(x), staging, by_count)

    def outline(self, x: Array) -> str:
        shape = self.adapter.shape(x)
        if self.by_count:
            shape = (math.prod(shape),)
        return f"{self.adapter.dtype(x)} {shape_text(shape)}"

    def label(self, call: str) -> str:
        """Return the call; append the group unless it has all ranks of the job."""
        return call if self.group.ledger.context == 0 else f"{call} of {self.group!r}"

    def channel(self, task: Task, serial: int) -> Channel:
        watch = self.group.engine.watch
        channel = Channel(
            watch,
            task.key,
            self.group.ranks,
            context=self.group.ledger.context,
            stream=serial % watch.transport.tags.n_streams,
            channel=P2P,
        )
        task.channels.append(channel)
        return channel


def _sender(
    x: Array, dest: int, tag: int, group: Group | None, *, by_count: bool = False
) -> _Conversation:
    x = arrived(x)
    adapter = any_adapter_for(x)
    adapter.dtype(x)  # refuses an array without memory before it is copied
    whole = x if adapter.is_contiguous(x) else adapter.copy(x)
    side = _Side.of(whole, tag, group, by_count=by_count)  # stages the copy
    dest = rank_of("dest", dest, side.group)
    outline = side.outline(whole)

    def talk(task: Task, serial: int) -> TaskCoroutine:
        task.ends_alone = side.staging is None
        return _send(side, side.channel(task, serial), whole, outline, dest=dest, serial=serial)

    return side.label(f"send(dest={dest}, tag={tag})"), _pair(side.group, dest), talk


def _receiver(
    out: Array, source: int, tag: int, group: Group | None, *, by_count: bool = False
) -> _Conversation:
    out = arrived(out)
    side = _Side.of(out, tag, group, by_count=by_count)
    try:
        side.adapter.require_writable(out)
    except ValueError as error:
        raise ValueError(
            f"recv: {error}. Nothing was received: the sender of this message waits until another "
            "recv() receives it. Pass an array that has memory of its own"
        ) from error
    source = int_of("source", source, "a rank, an int")
    if source != ANY_SOURCE:
        source = rank_of("source", source, side.group)
    name = "rc.ANY_SOURCE" if source == ANY_SOURCE else str(source)
    members = side.group.ranks if source == ANY_SOURCE else _pair(side.group, source)
    label = side.label(f"recv(source={name}, tag={tag})")

    def talk(task: Task, _: int) -> TaskCoroutine:
        task.ends_alone = side.staging is None
        return _recv(side, task, out, source)

    return label, members, talk


async def _send(side: _Side, t: Channel, x: Array, outline: str, *, dest: int, serial: int) -> None:
    t.tell(dest, ControlKind.OFFER, outline, key=side.mailbox, value=serial)
    t.awaited = (t.members[dest],)
    answer = await t.hear(ControlKind.ANSWER, serial, dest)
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


async def _recv(side: _Side, task: Task, out: Array, source: int) -> int | Deferred:
    t = side.channel(task, 0)
    if source == ANY_SOURCE:
        t.awaited = t.members.others
    elif source != t.rank:
        t.awaited = (t.members[source],)
    offer = await t.hear(ControlKind.OFFER, side.mailbox, source)
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
        t.tell(sender, ControlKind.ANSWER, text, key=serial, flag=False)
        raise MismatchError(text)
    work = out
    if not side.adapter.is_contiguous(out):
        work = (side.staging or side.adapter).empty(out, side.adapter.shape(out))
    data = side.channel(task, serial)
    t.tell(sender, ControlKind.ANSWER, key=serial, flag=True)

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


def _refuse_self(what: str, rank: int, group: Group | None) -> None:
    if operator.index(rank) == engine().groups.or_default(group).rank:
        raise ValueError(f"{what} is this rank itself, so it would wait for ever: use sendrecv()")
