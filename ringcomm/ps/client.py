"""A rank's requests to servers: sent, matched with their replies, waited for, and held back.

Requests of one rank to one server are answered in any order, but carried out in the order in which
they were sent. What large requests may hold of the servers' memory is bounded by credit: past it,
the call that would send more waits. A call of several requests sends all of them or none. What
waits for credit may be overtaken by what is for other tables.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ringcomm.engine.progress.deadlines import refuse_hopeless
from ringcomm.errors import CommTimeoutError, MismatchError, RingcommError
from ringcomm.files import BrokenFileError
from ringcomm.ps.backlog import Backlog
from ringcomm.ps.credit import Credit, table_of
from ringcomm.ps.frames import Header, Kind, Status, Step
from ringcomm.ps.lanes import Lane
from ringcomm.ps.link import Delivery
from ringcomm.ps.placement import View

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.engine.core.engine import Engine
    from ringcomm.ps.future import Future
    from ringcomm.ps.link import Link
    from ringcomm.ps.placement import Partition
    from ringcomm.ps.pushing import PlainPush
    from ringcomm.ps.roles import Layout
    from ringcomm.ps.row_calls import RowCalls

CREDIT_NBYTES: Final = 64 << 20  # of bodies on their way from one rank to one server
CREDIT_REQUESTS: Final = 4096  # likewise
STALL_S: Final = 1.0  # without credit for that long, a push goes on in the background
ACK_NBYTES: Final = 256 << 10  # a push of more takes longer than this rank should stay awake
ACK_NS: Final = 100_000
LISTEN_S: Final = 0.05  # between looks of a rank that only reads
_NOTHING: Final = np.empty(0, np.uint8)
_ERRORS: Final[dict[str, type[Exception]]] = {
    each.__name__: each
    for each in (
        ValueError, TypeError, KeyError, OSError, FileNotFoundError, BrokenFileError, MismatchError,
        RingcommError,
    )
}  # fmt: skip


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
        table: number of the table where no partition is named.
        clock: see Header.
        option: see Header.
        place: see Header; of requests it says where the result shall go, + 1.
        meta: explains it.
        body: its payload, as Link.send() wants it; kept until the reply.
        out: where a body of the reply that comes as a message shall go; None: anywhere.
        epoch: of the request where no partition is named, see ringcomm.ps.row_calls.
        on_reply: called with a good reply before its future is told; may return what is to be
            asked instead.
        on_ack: called with the clock of a good reply instead, if that says no more; None: on_reply.
        clock_of: returns the clock once there is credit: what is never sent takes no number.
        on_end: called before that with any reply, also with one that says that it is another
            server's.
        turn: of one of ask(), in the order of its calls, from 1 on; others have 0.
    """

    kind: Kind
    partition: Partition | None = None
    server: int = -1
    table: int = 0
    clock: int = 0
    option: int = 0
    place: int = 0
    meta: bytes = b""
    body: Bytes = field(default_factory=lambda: _NOTHING)
    out: Bytes | None = None
    epoch: int = 0
    on_reply: Callable[[Delivery], Ask | None] | None = None
    on_ack: Callable[[int], object] | None = None
    clock_of: Callable[[], int] | None = None
    on_end: Callable[[Delivery], None] | None = None
    turn: int = 0
    future: Any = None

    def take(self, reply: Delivery) -> Ask | None:
        """Call on_reply, if there is one, and forget it: it mostly knows this."""
        on_reply, self.on_reply = self.on_reply, None
        return None if on_reply is None else on_reply(reply)


class Client:
    """This rank's side of all its requests.

    Args:
        engine: drives it.
        link: the wire.
        layout: who is a server.
        deadline_s: of each wait, in seconds.

    Attributes:
        deadline_s: of each wait, in seconds.
        view: who owns what, as far as this rank has heard.
        n_moved: how often requests had to go to another server than the one they were sent to.
        row_calls: of hash tables, by number.
        undecided: futures that tell whether this worker is in a round; see ringcomm.ps.entering.
    """

    def __init__(self, engine: Engine, link: Link, layout: Layout, deadline_s: float) -> None:
        self._engine = engine
        self._link = link
        self._layout = layout
        self.deadline_s = deadline_s
        self._me = engine.job_rank
        self._life = engine.transport.incarnation
        self._sequence = itertools.count(1)
        self._turns = itertools.count(1)
        self._asked: dict[int, Ask | PlainPush] = {}
        self._credit = Credit(lambda: (CREDIT_NBYTES, CREDIT_REQUESTS))
        self._backlog = Backlog(self._credit.allows)
        self.view: View | None = None
        self.n_moved = 0
        self.undecided: set[Future[Any]] = set()
        self._lanes: dict[Partition, Lane] = {}
        self.row_calls: dict[int, RowCalls] = {}
        self._notices: list[tuple[Partition, int, int, int]] = []
        self._lock = threading.Lock()  # of sequence numbers, lanes, and the order of sending
        self._listened_at = 0.0
        self._taken = 0  # the last ack that was taken without driving

    @property
    def n_servers(self) -> int:
        """How many servers there are."""
        return len(self._layout.servers)

    def shares_memory(self, server: int) -> bool:
        """Return True if a server reads this rank's memory where it stands."""
        return self._link.shares_memory(self._layout.servers[server])

    def place_of(self, x: Bytes) -> int:
        """Return where shared memory of this rank is, as servers on its node find it."""
        return self._link.place_of(x)

    def memory_of(self, rank: int, place: int, nbytes: int) -> Bytes:
        """Return memory of a rank on this node where it stands."""
        return self._link.view(rank, place, nbytes)

    def has_nothing_under_way(self, partition: Partition) -> int:
        """Return the epoch of a partition of which this rank awaits nothing; -1 if it does.

        Also -1 once a rank has died: who asks then hears of it.
        """
        if self._backlog.n_waiting and self._backlog.has(partition):
            return -1
        lane = self._lanes[partition]
        return lane.epoch if lane.is_empty and not self._engine.watch.peers.dead else -1

    def listen(self) -> None:
        """Hear, now and then, what others have to say; for who waits for nothing that drives."""
        now = time.monotonic()
        if now - self._listened_at > LISTEN_S:
            self._listened_at = now
            self._engine.nudge()

    def timestamp(self) -> int:
        """Return the number of a new request."""
        return next(self._sequence)

    def ask(
        self,
        asks: list[Ask],
        future: Future[Any],
        *,
        is_admitted: bool = False,
        before_wait: Callable[[], object] | None = None,
    ) -> None:
        """Send requests, whose replies make `future` complete: all of them, or none.

        Waits for credit if it must: for the first, and while some of the others leave. Once none
        has for STALL_S, or the deadline, the rest leaves as credit comes back, which this rank may
        have to push another table for; it is for the future's wait() to raise. In a callback, which
        cannot wait, the rest leaves so at once.

        Args:
            asks: in the order in which they are to leave.
            future: of all of them.
            is_admitted: admit() has returned.
            before_wait: called before it waits for credit: it may bring some back.

        Raises:
            CommTimeoutError: there was no credit for the first; nothing was sent.
            RingcommError: likewise, in a callback.
        """
        self._engine.state.require_usable()
        for ask in asks:
            ask.future = future
            if ask.partition is not None:
                ask.server = self._owner(ask.partition)
            future.awaited.add(ask.server)
        if not asks:
            return
        if not (is_admitted or self._may_begin(asks[0])):
            self._await_credit(asks[0], future.label, before_wait)
        with self._lock:
            for ask in asks:  # nothing can go wrong any more: rounds are counted
                if ask.clock_of is not None:
                    ask.clock = ask.clock_of()
                ask.turn = next(self._turns)
                if self._may_leave(ask):
                    self._submit(ask)
                else:
                    self._backlog.add(ask)
        if self._backlog.n_waiting:
            if before_wait is not None:
                before_wait()
            if not self._engine.progress.is_own_turn:
                self._await_departure(future)
        if self._link.waits_to_leave:
            self._engine.nudge()

    def admit(
        self, first: Ask, label: str, before_wait: Callable[[], object] | None = None
    ) -> None:
        """Return once there is credit for the first request of a call; ask() is to send it.

        For who cannot take back what it does to make requests.

        Raises:
            CommTimeoutError: there is none.
        """
        self._engine.state.require_usable()
        assert first.partition is not None
        first.server = self._owner(first.partition)
        if not self._may_begin(first):
            self._await_credit(first, label, before_wait)

    def _send_backlog(self) -> None:
        """Send what waits for credit, as far as there is some now; with the lock."""
        for ask in self._backlog.due():
            self._submit(ask)

    def _await_departure(self, future: Future[Any]) -> None:
        """Return once all requests of a call have left, or none has for so long; see ask()."""
        limit_s = min(STALL_S, self.deadline_s)
        n = self._backlog.n_of(future)
        while n and self.drive_until(
            lambda before=n: self._backlog.n_of(future) < before,  # type: ignore[misc]
            future.label,
            limit_s,
        ):
            n = self._backlog.n_of(future)

    def wait_until_sent(self, label: str) -> None:
        """Drive until all requests have left that earlier calls made; see wait_for()."""
        if self._backlog.n_waiting:
            busy = self._credit.busy()
            self._wait_until(lambda: not self._backlog.n_waiting, label, busy, self.deadline_s)

    @property
    def n_bytes(self) -> dict[int, int]:
        """How many bytes of bodies are on their way, by server."""
        return self._credit.n_bytes

    def push(self, push: PlainPush) -> None:
        """Send a push that is request and future in one; waits for credit if it must."""
        self._engine.state.require_usable()
        push.server = self._owner(push.partition)
        if not self._may_begin(push):
            self._await_credit(push, push.label)
        with self._lock:
            self._submit(push)
        if self._link.waits_to_leave:
            self._engine.nudge()

    def reserve(self, asks: list[Ask], future: Future[Any]) -> None:
        """Wait until there is credit for requests that submit() is to send."""
        for ask in asks:
            future.awaited.add(ask.server)
            if not self._may_begin(ask):
                self._await_credit(ask, future.label)

    def submit(self, asks: list[Ask]) -> None:
        """Send requests, whose futures are set, one right behind the other."""
        with self._lock:
            for ask in asks:
                ask.future.awaited.add(ask.server)
                self._submit(ask)

    def post(self, asks: list[Ask], future: Future[Any]) -> None:
        """Send requests without a body behind all that their partitions are asked before.

        They need no credit, for what waits for them may hold it all. Any thread; waits for nothing.
        """
        with self._lock:
            for ask in asks:
                ask.future = future
                if ask.partition is not None:
                    ask.server = self._owner(ask.partition)
                future.awaited.add(ask.server)
                if self._backlog.n_waiting and self._backlog.has(ask.partition):
                    self._backlog.add_behind(ask)
                else:
                    self._submit(ask)
        if self._link.waits_to_leave:
            self._engine.nudge()

    def nudge(self) -> None:
        """Let what was submitted leave soon."""
        self._engine.nudge()

    def know(self, number: int, owners: list[int], epochs: Mapping[int, int]) -> None:
        """Take note of who owns the partitions of a table.

        Args:
            number: of the table.
            owners: by partition.
            epochs: of partitions that have moved, see ringcomm.ps.lanes.
        """
        with self._lock:
            known = self.view or View()
            changes = {}
            for part, owner in enumerate(owners):
                partition, epoch = (number, part), epochs.get(part, 0)
                lane = self._lanes.get(partition)
                if lane is None:
                    self._lanes[partition] = Lane(epoch)
                elif epoch <= lane.epoch:
                    continue
                else:  # what was sent to the server before will come back
                    lane.moved(epoch, ())
                changes[partition] = (owner,)
            self.view = known.with_(changes)

    @property
    def is_settled(self) -> bool:
        """True if nothing waits for credit, or to be let into a round, or is on its way back."""
        with self._lock:
            is_settled = not (self._backlog.n_waiting or self.undecided)
            is_settled &= all(lane.is_settled for lane in self._lanes.values())
        return is_settled and all(each.is_settled for each in list(self.row_calls.values()))

    def _owner(self, partition: Partition) -> int:
        assert self.view is not None
        return self.view.owner(partition)

    def _submit(self, ask: Ask | PlainPush) -> None:
        """Send a new request, or keep it while its partition moves; with the lock."""
        sequence = next(self._sequence)
        if ask.partition is not None:
            ask.server = self._owner(ask.partition)
        self._asked[sequence] = ask
        self._credit.note(ask, 1)
        if ask.on_ack is not None:
            ask.future.acked_by = sequence
        lane = None if ask.partition is None else self._lanes[ask.partition]
        if lane is None or lane.ask(sequence):
            self._send(ask, sequence, ask.epoch if lane is None else lane.epoch)

    def _send(self, ask: Ask | PlainPush, sequence: int, epoch: int) -> None:
        table, part = ask.partition or (ask.table, 0)
        header = (
            ask.kind, epoch, self._me, self._life, sequence, table, part, ask.clock, ask.option,
            ask.place,
        )  # fmt: skip
        self._link.ask(self._layout.servers[ask.server], header, ask.meta, ask.body)

    # --- partitions that move -------------------------------------------------------------------
    def on_notice(self, delivery: Delivery) -> None:
        """A partition has moved; called by whoever drives."""
        partition = delivery.header.table, delivery.header.partition
        said = json.loads(delivery.meta)
        with self._lock:
            self._notices.append((partition, said["epoch"], said["source"], said["dest"]))
            lane = self._lanes.get(partition)
            if lane is not None:
                self._follow(partition, lane, said["dest"], said["epoch"])
                self._send_again(partition, lane.moved(said["epoch"], said["along"]))
            self._answer_notices()

    def on_rows_notice(self, delivery: Delivery) -> None:
        """Rows of a hash table have moved; called by whoever drives."""
        table = delivery.header.table
        if table in self.row_calls:
            self.row_calls[table].on_notice(delivery)
        else:
            self.say_noted(table, delivery.header.clock)

    def say_noted(self, table: int, epoch: int) -> None:
        """Tell all servers that nothing is on its way that was made in an older view."""
        header = Header(
            Kind.MOVE, origin=self._engine.job_rank, table=table, clock=epoch, option=Step.NOTED
        )
        for rank in self._layout.servers:
            self._link.send(rank, header)

    def _on_wrong_view(self, ask: Ask | PlainPush, delivery: Delivery) -> None:
        told = json.loads(delivery.meta)
        assert ask.partition is not None
        with self._lock:
            lane = self._lanes[ask.partition]
            self._follow(ask.partition, lane, told["owner"], told["epoch"])
            due = lane.came_back(delivery.header.sequence, told["epoch"])
            self._send_again(ask.partition, due)
            self._answer_notices()

    def _follow(self, partition: Partition, lane: Lane, owner: int, epoch: int) -> None:
        if epoch > lane.epoch:
            assert self.view is not None
            self.view = self.view.with_({partition: (owner,)})

    def _send_again(self, partition: Partition, sequences: list[int]) -> None:
        """Send what was kept, or came back, to the owner of now."""
        server = self._owner(partition)
        for sequence in sequences:
            ask = self._asked[sequence]
            self.n_moved += 1
            self._credit.note(ask, -1)
            ask.server = server
            self._credit.note(ask, 1)
            ask.future.awaited.add(server)
            ask.body = self._reachable(ask.body, server)
            self._send(ask, sequence, self._lanes[partition].epoch)

    def _reachable(self, body: Bytes, server: int) -> Bytes:
        """Return a body that was meant for another server where this one can read it."""
        if not body.nbytes or not self.shares_memory(server):
            return body
        memory = self._engine.shared_memory(body.nbytes)
        assert memory is not None
        memory[:] = body
        return memory

    def _answer_notices(self) -> None:
        """Say NOTED of partitions of which nothing is on its way to the server before."""
        waiting = []
        for notice in self._notices:
            partition, epoch, *servers = notice
            lane = self._lanes.get(partition)
            if lane is not None and not lane.is_settled:
                waiting.append(notice)
                continue
            header = Header(
                Kind.MOVE, origin=self._engine.job_rank, table=partition[0],
                partition=partition[1], clock=epoch, option=Step.NOTED,
            )  # fmt: skip
            for server in servers:
                self._link.send(self._layout.servers[server], header)
        self._notices = waiting

    def _may_leave(self, ask: Ask | PlainPush) -> bool:
        """Return True if a new request has credit, and overtakes none that waits for it."""
        is_behind = self._backlog.n_waiting and self._backlog.has(ask.partition)
        return not is_behind and self._credit.allows(ask)

    def _may_begin(self, ask: Ask | PlainPush) -> bool:
        """Return True if a new call may begin with a request; one push per table may wait."""
        if not self._backlog.n_waiting:
            return self._credit.allows(ask)
        is_second = ask.kind == Kind.PUSH and self._backlog.has_table(table_of(ask))
        return not is_second and self._may_leave(ask)

    def _await_credit(
        self,
        ask: Ask | PlainPush,
        label: str,
        before_wait: Callable[[], object] | None = None,
    ) -> None:
        if before_wait is not None:
            before_wait()
        if self._engine.progress.is_own_turn:
            raise RingcommError(
                f"{label}: server {ask.server} takes no more until it has answered what is under "
                "way, and a callback of then() cannot wait for that; nothing was sent. Call it "
                "where the program waits for its futures"
            )
        self._wait_until(lambda: self._may_begin(ask), label, {ask.server}, self.deadline_s)

    # --- replies --------------------------------------------------------------------------------
    def place_for(self, header: Header) -> Bytes | None:
        """Return where the body of a reply that comes as a message shall go."""
        ask = self._asked.get(header.sequence)
        out = None if ask is None else ask.out
        return out if out is not None and out.nbytes == header.n_body else None

    def on_ack(self, sequence: int, clock: int) -> None:
        """Take note of a good reply that says no more than its clock; called by whoever drives."""
        with self._lock:
            ask = self._asked.get(sequence)
            if ask is None:
                return  # of a request that was given up
            is_plain = ask.on_ack is not None and ask.on_end is None
            if is_plain:
                self._note_answered(ask, sequence)
        if is_plain:
            assert ask.on_ack is not None
            ask.on_ack(clock)
            ask.future.replied(ask.server)
            return
        rank = self._layout.servers[ask.server]
        table, part = ask.partition or (ask.table, 0)
        header = Header(
            Kind.REPLY, origin=rank, sequence=sequence, table=table,
            partition=part, clock=clock,
        )  # fmt: skip
        self.on_reply(Delivery(rank, header, b"", _NOTHING))

    def on_reply(self, delivery: Delivery) -> None:
        """Take note of a reply; called by whoever drives."""
        header = delivery.header
        with self._lock:
            ask = self._asked.get(header.sequence)
        if ask is None:
            return  # of a request that was given up
        if header.status == Status.WRONG_VIEW and ask.on_end is None:
            self._on_wrong_view(ask, delivery)
            return
        with self._lock:
            self._note_answered(ask, header.sequence)
        if ask.on_end is not None:
            ask.on_end(delivery)
            ask.on_end = None  # it knows the request: both would wait for the collector
        if header.status == Status.WRONG_VIEW:
            return
        if header.status in (Status.OK, Status.LATE):
            again = ask.take(delivery)
            if again is None:
                ask.future.replied(ask.server)
            else:
                again.future, again.server = ask.future, ask.server
                with self._lock:
                    self._submit(again)
        else:
            ask.future.fail(_error_of(delivery.meta))

    def _note_answered(self, ask: Ask | PlainPush, sequence: int) -> None:
        del self._asked[sequence]
        self._credit.note(ask, -1)
        if ask.partition is not None:
            due = self._lanes[ask.partition].answered(sequence)
            if due:
                self._send_again(ask.partition, due)
            if self._notices:
                self._answer_notices()
        if self._backlog.n_waiting:
            self._send_backlog()

    # --- waiting --------------------------------------------------------------------------------
    def wait_for(self, future: Future[Any], timeout_s: float | None) -> None:
        """Drive until a future is done.

        Raises:
            CommTimeoutError: it is not, by then.
            PeerFailedError: a rank died.
        """
        limit = self.deadline_s if timeout_s is None else timeout_s
        if future.acked_by and limit > ACK_NS / 1e9 and self._is_acked(future):
            return
        self._wait_until(future.done, future.label, future.awaited, limit)

    def _is_acked(self, future: Future[Any]) -> bool:
        """Look, for a moment, for nothing but the ack that ends a small push: most come so soon."""
        sequence = future.acked_by
        ask = self._asked.get(sequence)
        if ask is None or ask.body.nbytes > ACK_NBYTES:
            return future.done()
        dest = self._layout.servers[ask.server]
        clock = self._link.await_ack(dest, sequence, ACK_NS, self._taken)  # an interrupt loses none
        if clock >= 0:
            try:
                self.on_ack(sequence, clock)
            except BaseException as error:  # an interrupt half-way, which nothing can mend
                self._engine.completion.break_engine(error)
                raise
            self._taken = sequence
            self.listen()
        return future.done()

    def wait_until_settled(self, label: str) -> None:
        """Drive until is_settled; see wait_for()."""
        self._wait_until(lambda: self.is_settled, label, self._credit.busy(), self.deadline_s)

    def drive_until(self, is_over: Callable[[], bool], label: str, timeout_s: float | None) -> bool:
        """Return True once it is over, False if that takes longer than timeout_s; None: deadline_s.

        Raises:
            PeerFailedError: a rank died.
        """
        limit_s = self.deadline_s if timeout_s is None else timeout_s
        engine = self._engine
        n_looks = 0
        hopeless: list[RingcommError] = []

        def is_enough() -> bool:
            nonlocal n_looks
            if is_over():
                return True
            n_looks += 1
            if n_looks % 16:
                return False
            try:
                refuse_hopeless(Wait(label, tuple(range(engine.job_size))), engine.watch)
            except RingcommError as error:  # raised by who waits, not by who drives
                hopeless.append(error)
            return bool(hopeless)

        engine.run_until(is_enough, is_done=is_over, timeout_s=limit_s)
        if is_over():
            return True
        if hopeless:
            raise hopeless[0]
        return False

    def _wait_until(
        self, is_over: Callable[[], bool], label: str, servers: set[int], limit_s: float
    ) -> None:
        if self.drive_until(is_over, label, limit_s):
            return
        label_of = self._engine.transport.label
        ranks = ", ".join(
            f"server {s} ({label_of(self._layout.servers[s])})" for s in sorted(servers)
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
