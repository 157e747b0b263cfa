"""send(), recv(), sendrecv(), isend() and irecv(): messages from one rank to another.

C++ passes them on, through shared memory or by messages of the wire: csrc/p2p/peer_messages.hpp.
"""

from __future__ import annotations

import itertools
import math
import operator
import pickle
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from ringcomm._core import Correspondence, KnownHalo, PeerMessage, Refusal
from ringcomm.arrays import (
    AnyAdapter,
    Array,
    Bytes,
    adapter_for,
    any_adapter_for,
    arrived,
    device_adapter_for,
)
from ringcomm.arrays.base import overlap
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.call import shape_text
from ringcomm.engine.core.engine import Engine
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.handle import Handle
from ringcomm.engine.core.plan import Deferred
from ringcomm.engine.executors.mail import (
    Kind,
    Mail,
    mail_of,
    tag_in_64_bits,
)
from ringcomm.engine.operations.base import HostStaging, device_executor, int_of, rank_of
from ringcomm.engine.operations.objects import pickled
from ringcomm.engine.progress.task import CompletedTask, Task, TaskCoroutine
from ringcomm.errors import MismatchError
from ringcomm.integers import is_integer
from ringcomm.transport.base import ANY_SOURCE, PROC_NULL
from ringcomm.transport.channel import Channel

# The first message of an object has its number of bytes, a serial number, and as much as there is
# room for. What is left is a message to a mailbox of that number.
_HEAD, _BEGIN = 16, 4096  # bytes
_serials = itertools.count()


def send(x: Array, dest: int, *, tag: int = 0, group: Group | None = None) -> None:
    """Send x to another rank; return once x may be changed.

    A message of at most 16 KiB to a rank of the same node, or of 48 KiB to another host, may be on
    its way then. Any other has been received.

    Args:
        x: numpy array, torch tensor or cupy array; a strided one is copied, and one on a GPU goes
            through host memory.
        dest: rank within the group, not this one; or rc.PROC_NULL: nothing is sent.
        tag: any int; the receiver passes the same one.
        group: the group that numbers the ranks; None: all ranks.

    Raises:
        MismatchError: the receiver's array has another shape or dtype. The receiver raises it,
            too, and the engine stays usable. If this call has returned before, the next one of
            this rank that sends to that rank, or receives from it, raises the error instead.
        ValueError, TypeError: a bad argument.
        PeerFailedError: a rank of the group died, or the receiver left.
        CommTimeoutError: nobody received x within RINGCOMM_TIMEOUT_S; the engine is unusable.
    """
    mail = mail_of(group)
    rest = None
    if dest != mail.rank:
        try:
            rest = mail.send(x, dest, tag, mail.moment_s)
            if rest is True:
                return
        except BaseException as error:
            _break_after(error)
            raise
    if _is_nobody(dest):
        return
    outgoing = _Outgoing(x, dest, tag, group, rest)
    _refuse_self("dest", dest, group)
    _carry_out(outgoing)


def recv(out: Array, source: int = ANY_SOURCE, *, tag: int = 0, group: Group | None = None) -> int:
    """Receive a message into `out`, and return the rank that sent it.

    Args:
        out: array with the sender's shape and dtype. It is overwritten, and may be strided.
        source: rank within the group, not this one, or rc.ANY_SOURCE for the first that sends. Or
            rc.PROC_NULL: `out` stays as it is, and rc.PROC_NULL is returned at once.
        tag: the tag that the sender has passed to send().
        group: the group that numbers the ranks; None: all ranks.

    Messages of one rank and tag arrive in the order in which they were sent.

    Raises:
        MismatchError, ValueError, TypeError, PeerFailedError, CommTimeoutError: see send().
    """
    mail = mail_of(group)
    rest = None
    if source != mail.rank:
        try:
            rest = mail.receive(out, source, tag, mail.moment_s)
            if type(rest) is int:
                return rest
        except BaseException as error:
            _break_after(error)
            raise
    if _is_nobody(source):
        return PROC_NULL
    incoming = _Incoming(out, source, tag, group, rest)
    _refuse_self("source", source, group)
    sender: int = _carry_out(incoming)
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

    dest and source may be any ranks, also this one, or rc.PROC_NULL; and source may be
    rc.ANY_SOURCE.

    Raises:
        ValueError: x and out overlap, or another bad argument.
    """
    mail = mail_of(group)
    sent = rest = None
    try:
        sent, rest = mail.exchange(x, dest, sendtag, out, source, recvtag)
        if sent is True and type(rest) is int:
            return rest
    except BaseException as error:
        _break_after(error)
        raise
    if _is_nobody(dest):
        return recv(out, source, tag=recvtag, group=group)
    if _is_nobody(source):
        send(x, dest, tag=sendtag, group=group)
        return PROC_NULL
    if sent is None:
        _require_apart(x, out)
    incoming = _Incoming(out, source, recvtag, group, rest)  # both are checked before one begins
    outgoing = _Outgoing(x, dest, sendtag, group, sent)
    sender: int = _carry_out(incoming, outgoing)
    return sender


def send_object(obj: Any, dest: int, *, tag: int = 0, group: Group | None = None) -> None:
    """Send an object, pickled on the way, to a rank that calls recv_object(); see send().

    Objects and arrays do not meet: recv() receives no object, and recv_object() no array.

    Args:
        obj: anything that can be pickled.
        dest: rank within the group, not this one; or rc.PROC_NULL: nothing is sent.
        tag: any int; the receiver passes the same one.
        group: the group that numbers the ranks; None: all ranks.

    Raises:
        TypeError: obj cannot be pickled, or a bad argument.
        ValueError: a bad argument.
        PeerFailedError, CommTimeoutError: see send().
    """
    packed, tag = np.frombuffer(pickled("send_object", obj), np.uint8), int_of("tag", tag)
    if _is_nobody(dest):
        return
    serial = next(_serials)
    begin, head = np.zeros(_BEGIN, np.uint8), packed[: _BEGIN - _HEAD]
    begin[:_HEAD].view(np.int64)[:] = len(packed), serial
    begin[_HEAD : _HEAD + len(head)] = head
    _refuse_self("dest", dest, group, "object")
    _send_begin(begin, dest, tag, group)
    if len(packed) > len(head):
        part = _Part(Kind.REST, serial)
        _carry_out(_Outgoing(packed[len(head) :], dest, tag, group, part=part, by_count=True))


def recv_object(
    source: int = ANY_SOURCE, *, tag: int = 0, group: Group | None = None
) -> tuple[Any, int]:
    """Return an object that another rank sends by send_object(), and that rank.

    Objects of one rank and tag arrive in the order in which they were sent.

    Args:
        source: rank within the group, not this one, or rc.ANY_SOURCE for the first that sends. Or
            rc.PROC_NULL: (None, rc.PROC_NULL) is returned at once.
        tag: the tag that the sender has passed.
        group: the group that numbers the ranks; None: all ranks.

    Raises:
        ValueError, TypeError, PeerFailedError, CommTimeoutError: see recv().

    Unpickling runs code that the sender chose: the ranks of a job must trust each other.
    """
    tag = int_of("tag", tag)
    if _is_nobody(source):
        return None, PROC_NULL
    _refuse_self("source", source, group, "object")
    begin = np.empty(_BEGIN, np.uint8)
    sender = _recv_begin(begin, source, tag, group)
    nbytes, serial = begin[:_HEAD].view(np.int64).tolist()
    packed, head = np.empty(nbytes, np.uint8), begin[_HEAD : _HEAD + nbytes]
    packed[: len(head)] = head
    if nbytes > len(head):
        part, rest = _Part(Kind.REST, serial), packed[len(head) :]
        _carry_out(_Incoming(rest, sender, tag, group, part=part, by_count=True))
    return pickle.loads(packed.data), sender


class Begun(NamedTuple):
    """What is left to do of an exchange(): None where nothing."""

    receives: list[PeerMessage | None]
    sends: list[PeerMessage | None]


def begin_halo(known: KnownHalo, x: Array, mail: Mail) -> Literal[True] | Begun | None:
    """Begin an exchange of cells of x; True: it is over; None: it has not begun.

    Raises:
        MismatchError: an earlier message did not fit; this exchange has not begun.
    """
    try:
        begun = mail.run_halo(known, x)
    except BaseException as error:
        _break_after(error)
        raise
    if begun is None or begun is True:
        return begun
    if isinstance(begun, Refusal):
        raise _mismatch_of(begun, "")
    return Begun(*begun)


def exchange(
    sends: Sequence[tuple[Array, int, int]],
    receives: Sequence[tuple[Array, int, int]],
    group: Group,
    begun: Begun | None,
) -> None:
    """Send and receive several arrays, each (array, rank, tag), all at once.

    Raises the errors of sendrecv(), once none of the messages is under way any more.
    """
    sides: list[_Incoming | _Outgoing] = []
    for i, (out, source, tag) in enumerate(receives):
        left = None if begun is None else begun.receives[i] or source
        sides.append(_Incoming(out, source, tag, group, left))
    for i, (x, dest, tag) in enumerate(sends):
        rest: PeerMessage | Literal[True] | None = None
        if begun is not None:
            rest = begun.sends[i] or True
        sides.append(_Outgoing(x, dest, tag, group, rest))
    _carry_out_all(sides)


def isend(
    x: Array,
    dest: int,
    *,
    tag: int = 0,
    group: Group | None = None,
    timeout_s: float | None = None,
) -> Handle[None]:
    """Start to send x to another rank, and return a handle at once.

    handle.wait() returns once x may be changed, as send() does, or raises its errors. Messages that
    one rank sends to another arrive in the order of the calls, whether by isend() or send().

    Args:
        x: array, see send(). It must not be changed before the handle is done.
        dest: rank within the group, which may be this one, or rc.PROC_NULL.
        tag: any int; the receiver passes the same one.
        group: the group that numbers the ranks; None: all ranks.
        timeout_s: deadline in seconds, after which the engine is unusable; None:
            RINGCOMM_TIMEOUT_S. It may begin to count 0.3 s after the call.

    Raises:
        MismatchError: an earlier message to that rank was refused, see send(). Nothing has begun.
        ValueError, TypeError: a bad argument.
        RingcommError: too many operations are pending, or the engine is unusable.
    """
    if timeout_s is not None:
        _require_seconds(timeout_s)
    mail = mail_of(group)
    rest = None
    try:
        rest = mail.send(x, dest, tag, 0.0)
    except BaseException as error:
        _break_after(error)
        raise
    if rest is True:
        sent = CompletedTask(None, 0, lambda: f"send(dest={dest}, tag={tag})")
        return Handle(mail.completion, sent)
    if rest is not None:
        begin = lambda: _go_on(_Outgoing(x, dest, tag, group, rest), timeout_s)  # noqa: E731
        posted = mail.posted_send(rest, x.nbytes, begin)
        if posted is not None:
            return posted
    if _is_nobody(dest):
        return Handle(
            engine().completion, CompletedTask(None, 0, lambda: "send(dest=rc.PROC_NULL)")
        )
    return start(_Outgoing(x, dest, tag, group, rest), timeout_s)


def irecv(
    out: Array,
    source: int = ANY_SOURCE,
    *,
    tag: int = 0,
    group: Group | None = None,
    timeout_s: float | None = None,
) -> Handle[int]:
    """Start to receive a message into `out`, and return a handle at once.

    handle.wait() returns the rank that has sent, or raises the errors of recv(). Receives of one
    rank and tag are served in the order of the calls, whether by irecv() or recv().

    Args:
        out: array with the sender's shape and dtype. It must not be used before the handle is done.
        source: rank within the group, which may be this one, or rc.ANY_SOURCE, or rc.PROC_NULL.
        tag: the tag that the sender has passed.
        group: the group that numbers the ranks; None: all ranks.
        timeout_s: deadline in seconds, after which the engine is unusable; None:
            RINGCOMM_TIMEOUT_S. It may begin to count 0.3 s after the call.

    Raises:
        MismatchError, ValueError, TypeError, RingcommError: see isend().
    """
    if timeout_s is not None:
        _require_seconds(timeout_s)
    mail = mail_of(group)
    rest = None
    try:
        rest = mail.receive(out, source, tag, 0.0)
    except BaseException as error:
        _break_after(error)
        raise
    if type(rest) is int:
        sender = rest
        received = CompletedTask(sender, 0, lambda: f"recv(source={sender}, tag={tag})")
        return Handle(mail.completion, received)
    if isinstance(rest, PeerMessage):
        begin = lambda: _go_on(_Incoming(out, source, tag, group, rest), timeout_s)  # noqa: E731
        posted = mail.posted_receive(rest, out, out.nbytes, begin)
        if posted is not None:
            return posted
    if _is_nobody(source):
        return Handle(
            engine().completion, CompletedTask(PROC_NULL, 0, lambda: "recv(source=rc.PROC_NULL)")
        )
    return start(_Incoming(out, source, tag, group, rest), timeout_s)


def irecv_elements(
    out: Array, source: int, *, tag: int, group: Group, timeout_s: float | None
) -> Handle[int]:
    """Start to receive the elements of an array of one dimension into `out`; see irecv()."""
    return start(_Incoming(out, source, tag, group, by_count=True), timeout_s)


def _send_begin(x: Array, dest: int, tag: int, group: Group | None) -> None:
    """Send the first message of an object; as send()."""
    mail, rest = mail_of(group), None
    try:
        rest = mail.of(Kind.OBJECT).send(x, dest, tag, mail.moment_s)
        if rest is True:
            return
    except BaseException as error:
        _break_after(error)
        raise
    _carry_out(_Outgoing(x, dest, tag, group, rest, part=_Part(Kind.OBJECT, tag)))


def _recv_begin(out: Array, source: int, tag: int, group: Group | None) -> int:
    mail, rest = mail_of(group), None
    try:
        rest = mail.of(Kind.OBJECT).receive(out, source, tag, mail.moment_s)
        if type(rest) is int:
            return rest
    except BaseException as error:
        _break_after(error)
        raise
    part = _Part(Kind.OBJECT, tag)
    sender: int = _carry_out(_Incoming(out, source, tag, group, rest, part=part))
    return sender


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


def _require_seconds(timeout_s: float) -> None:
    if not (hasattr(timeout_s, "__float__") and timeout_s >= 0):
        raise ValueError(f"timeout_s is {timeout_s!r}; it must be a number of seconds >= 0")


def _is_nobody(rank: int) -> bool:
    """Return True for rc.PROC_NULL. Raises an error if the engine is unusable."""
    if not is_integer(rank) or operator.index(rank) != PROC_NULL:
        return False
    engine().state.require_usable()
    return True


def _refuse_self(what: str, rank: int, group: Group | None, thing: str = "") -> None:
    if is_integer(rank) and operator.index(rank) == engine().groups.or_default(group).rank:
        help_ = "" if thing else ": use sendrecv()"
        raise ValueError(f"{what} is this rank itself, so it would wait for ever{help_}")


def _break_after(error: BaseException) -> None:
    """Break the engine: what C++ had begun was interrupted, so the other rank may wait for it."""
    engine().completion.break_engine(error, "a message")


def _carry_out(*sides: _Outgoing | _Incoming) -> Any:
    """Carry out the two sides of a call, or its only one; return the result of the first."""
    current = engine()
    begun: list[Task] = []
    try:
        for side in sides:
            side.require_heard()
        stays = len(sides) == 1
        results = [_begun(current, side, begun, stays=stays) for side in sides]
        try:
            result = current.completion.result_of(results[0])
        finally:
            for other in results[1:]:
                current.completion.result_of(other)
    except BaseException as error:
        for task in begun:
            current.completion.break_unless_over(task, error)
        raise
    return result


def _carry_out_all(sides: Sequence[_Outgoing | _Incoming]) -> None:
    current = engine()
    begun: list[Task] = []
    mismatch = None
    try:
        for side in sides:
            side.require_heard()
        for task in [_begun(current, side, begun) for side in sides]:
            try:
                current.completion.result_of(task)
            except MismatchError as error:  # the others come to an end
                mismatch = mismatch or error
    except BaseException as error:
        if len(begun) < len(sides) and any(isinstance(s.rest, PeerMessage) for s in sides):
            _break_after(error)  # their other sides would wait for ever
        for task in begun:
            current.completion.break_unless_over(task, error)
        raise
    if mismatch is not None:
        raise mismatch


def start(side: _Outgoing | _Incoming, timeout_s: float | None) -> Handle[Any]:
    """Start one side of a message; return its handle."""
    current = engine()
    side.require_heard()
    task = _over_at_once(current, side)
    handle = None if task else side.posted(timeout_s)
    return handle or Handle(current.completion, task or _go_on(side, timeout_s))


def _go_on(side: _Outgoing | _Incoming, timeout_s: float | None = None) -> Task | CompletedTask:
    """Begin the task of one side of a message."""
    return _begun(engine(), side, [], is_awaited=False, timeout_s=timeout_s)


def _begun(
    current: Engine,
    side: _Outgoing | _Incoming,
    begun: list[Task],
    *,
    is_awaited: bool = True,
    stays: bool = False,
    timeout_s: float | None = None,
) -> Task | CompletedTask:
    """Begin one side of a message unless it has begun; add the task that it needs to `begun`."""
    done = _over_at_once(current, side, stays=stays)
    if done is not None:
        return done
    try:
        task = current.conversations.begin(
            side.label, side.members, side.talk, is_awaited=is_awaited, timeout_s=timeout_s
        )
    except BaseException as error:
        _break_if_begun(current, side, error)
        raise
    begun.append(task)
    return task


def _over_at_once(
    current: Engine, side: _Outgoing | _Incoming, *, stays: bool = False
) -> CompletedTask | None:
    """Begin one side of a message unless it has begun; return None if it is not over then.

    stays: stay for a moment with what begins now.
    """
    had_begun = side.rest is not None
    with current.pending.lock:
        current.state.require_usable()
        current.pending.require_room(current.job_rank)
    try:
        side.begin()
        if stays and not had_begun:
            side.stay()
    except BaseException as error:
        _break_if_begun(current, side, error)
        raise
    return CompletedTask(side.result, 0, lambda: side.label) if side.is_over else None


def _break_if_begun(current: Engine, side: _Outgoing | _Incoming, error: BaseException) -> None:
    if isinstance(side.rest, PeerMessage):
        current.completion.break_engine(error, side.label)


class _Part(NamedTuple):
    """What a message is of an object, see send_object()."""

    kind: Kind
    number: int  # replaces the tag in the mailbox


class _Side(NamedTuple):
    group: Group  # in which ranks are numbered
    tag: int
    adapter: AnyAdapter  # of the array that is sent or received
    staging: HostStaging | None  # moves the array through host memory if it is on a GPU
    by_count: bool  # compare numbers of elements, not shapes
    mail: Mail  # of the group
    kind: Kind
    number: int  # replaces the tag in the mailbox

    @classmethod
    def of(
        cls, x: Array, tag: int, group: Group | None, part: _Part | None, *, by_count: bool
    ) -> _Side:
        current = engine()
        group = current.groups.or_default(group)
        mail = mail_of(group)
        tag = int_of("tag", tag)
        on_gpu = device_adapter_for(x)
        staging = None if on_gpu is None else device_executor().stage(group, on_gpu, x)
        kind, number = part or (Kind.ARRAY, tag)
        return cls(
            group, tag, on_gpu or adapter_for(x), staging, by_count, mail.of(kind), kind, number
        )

    def outline(self, x: Array) -> str:
        shape = self.adapter.shape(x)
        if self.by_count:
            shape = (math.prod(shape),)
        return f"{self.adapter.dtype(x)} {shape_text(shape)}"

    def label(self, call: str, details: str) -> str:
        """Return the call; append the group unless it has all ranks of the job."""
        call = f"{call}{'' if self.kind is Kind.ARRAY else '_object'}({details}, tag={self.tag})"
        return self.of_group(call)

    def of_group(self, call: str) -> str:
        return call if self.group.ledger.context == 0 else f"{call} of {self.group!r}"

    def pair(self, peer: int) -> tuple[int, ...]:
        return tuple({self.group.ranks[self.group.index], self.group.ranks[peer]})

    def correspondence(self, peer: int, outline: str, nbytes: int) -> Correspondence:
        return self.mail.correspondence(peer, outline, nbytes)

    def channel(self, task: Task) -> Channel:
        channel = Channel(self.group.engine.watch, task.key, self.group.ranks)
        task.channels.append(channel)
        return channel

    def require_heard(self, peer: int, rest: object) -> None:
        """Raise MismatchError if an earlier message to a rank of the group was refused.

        rest: what is left to do of this one; None: it has not begun.
        """
        if isinstance(rest, PeerMessage):
            if rest.is_over and rest.refusal is not None and rest.refusal.is_of_earlier:
                self.require_fit(rest.refusal)
        elif rest is None and peer != ANY_SOURCE:
            self.require_fit(self.mail.earlier_refusal(peer))

    def is_over_soon(self, message: object) -> bool:
        """Return True once a message is over, False if it fails, or is not over in a moment."""
        if not isinstance(message, PeerMessage):
            return False
        is_over = message.drive(self.mail.moment_s)
        return is_over and message.refusal is None and not message.fault

    def require_fit(self, refusal: Refusal | None) -> None:
        """Raise MismatchError if a message did not fit its receive."""
        if refusal is None:
            return
        raise _mismatch_of(refusal, self.of_group(""))


def _mismatch_of(refusal: Refusal, of_group: str) -> MismatchError:
    label = f"message of rank {refusal.sender} to rank {refusal.receiver} with tag={refusal.tag}"
    label = f"an earlier {label}" if refusal.is_of_earlier else f"{label}{of_group}"
    return MismatchError(
        _text_of_mismatch(label, (refusal.sender, refusal.sent), (refusal.receiver, refusal.wanted))
    )


def _text_of_mismatch(label: str, sent: tuple[int, str], wanted: tuple[int, str]) -> str:
    return (
        f"{label}: rank {sent[0]} sent {sent[1]}, rank {wanted[0]} receives {wanted[1]}. "
        "Receive into an array of the shape and dtype that is sent."
    )


class _Outgoing:
    """A message to send, with checked arguments.

    Attributes:
        rest: what is left to do; True: nothing; None: it has not begun.
    """

    result = None

    def __init__(
        self,
        x: Array,
        dest: int,
        tag: int,
        group: Group | None,
        rest: PeerMessage | Literal[True] | None = None,
        *,
        part: _Part | None = None,
        by_count: bool = False,
    ) -> None:
        x = arrived(x)
        adapter = any_adapter_for(x)
        adapter.dtype(x)  # refuses an array without memory before it is copied
        self._x = x if adapter.is_contiguous(x) else adapter.copy(x)
        self._side = _Side.of(self._x, tag, group, part, by_count=by_count)  # stages the copy
        self._dest = rank_of("dest", dest, self._side.group)
        self._outline = self._side.outline(self._x)
        self.rest = rest

    @property
    def label(self) -> str:
        return self._side.label("send", f"dest={self._dest}")

    @property
    def members(self) -> tuple[int, ...]:
        return self._side.pair(self._dest)

    @property
    def is_over(self) -> bool:
        return self.rest is True

    def require_heard(self) -> None:
        self._side.require_heard(self._dest, self.rest)

    def stay(self) -> None:
        """Stay for a moment with a message that has begun."""
        if self._side.is_over_soon(self.rest):
            self.rest = True

    def posted(self, timeout_s: float | None) -> Handle[None] | None:
        """Return its handle if it has begun and needs no task yet."""
        mail, message = self._side.mail, self.rest
        if self._side.staging is not None or not isinstance(message, PeerMessage):
            return None
        nbytes = adapter_for(self._x).flat(self._x).bytes.nbytes
        return mail.posted_send(message, nbytes, lambda: _go_on(self, timeout_s))

    def begin(self) -> None:
        """Begin it if it is in host memory.

        Once a rank is lost, its task begins it: a message to that rank is refused.
        """
        side = self._side
        if self.rest is not None or side.staging is not None:
            return
        if not side.group.engine.watch.peers.has_lost:
            known = self._send(adapter_for(self._x).flat(self._x).bytes)
            if not side.by_count:
                side.mail.learn(self._x, self._dest, known, is_receive=False)

    def talk(self, task: Task, _: int) -> TaskCoroutine:
        task.ends_alone = self._side.staging is None
        return self._go_on(self._side.channel(task))

    def _send(self, data: Bytes) -> Correspondence:
        known = self._side.correspondence(self._dest, self._outline, data.nbytes)
        self.rest = known.send(data, tag_in_64_bits(self._side.number), 0.0)
        return known

    async def _go_on(self, t: Channel) -> None:
        t.awaited = (t.members[self._dest],)
        lease: object = None
        if self._side.staging is not None:
            mirror, lease = await self._side.staging.fetch(self._x)
            self._send(mirror.flat.bytes)
        elif self.rest is None:
            self._send(adapter_for(self._x).flat(self._x).bytes)
        if isinstance(self.rest, PeerMessage):
            await t.pass_on(self.rest, self._x, lease)
            self._side.require_fit(self.rest.refusal)
        t.awaited = ()


class _Incoming:
    """A message to receive, with checked arguments.

    Attributes:
        rest: what is left to do, or the rank of the group that has sent; None: it has not begun.
    """

    def __init__(
        self,
        out: Array,
        source: int,
        tag: int,
        group: Group | None,
        rest: PeerMessage | int | None = None,
        *,
        part: _Part | None = None,
        by_count: bool = False,
    ) -> None:
        self._out = out = arrived(out)
        self._side = side = _Side.of(out, tag, group, part, by_count=by_count)
        try:
            side.adapter.require_writable(out)
        except ValueError as error:
            raise ValueError(
                f"recv: {error}. Nothing was received: the sender of this message waits until "
                "another recv() receives it. Pass an array that has memory of its own"
            ) from error
        source = int_of("source", source, "a rank, an int")
        if source != ANY_SOURCE:
            source = rank_of("source", source, side.group)
        self._source = source
        self._wanted = side.outline(out)
        self._work = out
        if not side.adapter.is_contiguous(out):
            self._work = (side.staging or side.adapter).empty(out, side.adapter.shape(out))
        self.rest = rest

    @property
    def label(self) -> str:
        name = "rc.ANY_SOURCE" if self._source == ANY_SOURCE else str(self._source)
        return self._side.label("recv", f"source={name}")

    @property
    def members(self) -> tuple[int, ...]:
        if self._source == ANY_SOURCE:
            return self._side.group.ranks
        return self._side.pair(self._source)

    @property
    def is_over(self) -> bool:
        return isinstance(self.rest, int)

    @property
    def result(self) -> int:
        assert isinstance(self.rest, int)
        return self.rest

    def require_heard(self) -> None:
        self._side.require_heard(self._source, self.rest)

    def stay(self) -> None:
        """Stay for a moment with a message that has begun."""
        message = self.rest
        if isinstance(message, PeerMessage) and self._side.is_over_soon(message):
            self.rest = self._side.group.ranks.places[message.source]
            self._finish()

    def posted(self, timeout_s: float | None) -> Handle[int] | None:
        """Return its handle if it has begun and needs no task yet."""
        mail, message = self._side.mail, self.rest
        if self._side.staging is not None or not isinstance(message, PeerMessage):
            return None
        if self._work is not self._out:
            return None
        nbytes = adapter_for(self._out).flat(self._out).bytes.nbytes
        return mail.posted_receive(message, self._out, nbytes, lambda: _go_on(self, timeout_s))

    def begin(self) -> None:
        """Begin it if it goes to host memory."""
        if self.rest is not None or self._side.staging is not None:
            return
        known = self._receive(adapter_for(self._work).flat(self._work).bytes)
        if not self._side.by_count:
            self._side.mail.learn(self._out, self._source, known, is_receive=True)
        if self.is_over:
            self._finish()

    def talk(self, task: Task, _: int) -> TaskCoroutine:
        task.ends_alone = self._side.staging is None
        task.what_came_instead = self._side.mail.unasked
        return self._go_on(task)

    def _receive(self, out: Bytes) -> Correspondence:
        known = self._side.correspondence(self._source, self._wanted, out.nbytes)
        rest = known.receive(out, tag_in_64_bits(self._side.number), 0.0)
        places = self._side.group.ranks.places
        assert rest is not None
        self.rest = rest if isinstance(rest, PeerMessage) else places[rest]
        return known

    async def _go_on(self, task: Task) -> int | Deferred:
        t = self._side.channel(task)
        if self._source == ANY_SOURCE:
            t.awaited = t.members.others
        elif self._source != t.rank:
            t.awaited = (t.members[self._source],)
        if self._side.staging is None:
            await self._fill(t, adapter_for(self._work).flat(self._work).bytes)
            return self._finish()
        return await self._side.staging.bring(
            t,
            out=self._work,
            fill=lambda mirror: self._fill(t, mirror.flat.bytes),
            finish=self._finish,
        )

    def _finish(self) -> int:
        if self._work is self._out:
            self._side.adapter.written(self._out)
        else:
            self._side.adapter.assign(self._out, self._work)
        return self.result

    async def _fill(self, t: Channel, out: Bytes) -> None:
        """Receive the message into `out`; then `rest` is the rank that has sent it."""
        if self.rest is None:
            self._receive(out)
        if isinstance(self.rest, PeerMessage):
            message = self.rest
            await t.pass_on(message, out)
            self._side.require_fit(message.refusal)
            self.rest = t.members.places[message.source]
        t.awaited = ()
