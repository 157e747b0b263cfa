"""Carries out the actions that a server's core returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ringcomm.errors import RingcommError
from ringcomm.ps.checkpoint.server import Store
from ringcomm.ps.control.agreement import Member, OrdersGiven
from ringcomm.ps.control.commands import TAKE
from ringcomm.ps.protocol.frame_meta import ASSIGN, INITIAL, flags_of, packed_json, packed_owners
from ringcomm.ps.protocol.frames import (
    CallOption,
    EntryOption,
    FrameHeader,
    FrameKind,
    NewsOption,
    Status,
)
from ringcomm.ps.server.catalog import Catalog
from ringcomm.ps.server.core import actions as do
from ringcomm.ps.server.core import events as on
from ringcomm.ps.server.core.core import Core
from ringcomm.ps.server.dense.partition import DensePartition
from ringcomm.ps.server.dense.reads import DenseReads
from ringcomm.ps.server.partition_transfer import Transfer
from ringcomm.ps.server.replies import NOTHING, Replies
from ringcomm.ps.server.rows.reads import RowReads
from ringcomm.ps.server.snapshots import Snapshots
from ringcomm.ps.server.user_functions import Calls, Function
from ringcomm.ps.server.values import Pushes

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.protocol.frame_meta import KeyedPull
    from ringcomm.ps.protocol.link import Delivery
    from ringcomm.ps.protocol.wire import Wire
    from ringcomm.ps.roles import Layout
    from ringcomm.ps.server.clock import Clock
    from ringcomm.ps.server.contents import Contents
    from ringcomm.ps.server.core.actions import Action, Key
    from ringcomm.ps.server.rows.hash_shard import Shard
    from ringcomm.ps.server.values import Values


class ActionPerformer:
    """Gives events to the core of one server, and carries out the actions that it returns.

    Args:
        index: of the server.
        layout: who is who.
        link: the wire.
        memory: returns memory that clients on this node map.
        functions: that clients may call, by name.
        clock: the time by which the core decides, and by which rows age.

    Attributes:
        core: decides.
        catalog: the tables.
        replies: sends answers.
        orders: those that it has given.
        snapshots: that are held for pulls.
        store: what is held for checkpoints.
        transfer: partitions on their way.
    """

    def __init__(
        self,
        index: int,
        layout: Layout,
        link: Wire,
        memory: Callable[[int], Bytes],
        functions: Mapping[str, Function],
        *,
        clock: Clock,
    ) -> None:
        self._monotonic = clock.monotonic
        self._index, self._layout, self._link = index, layout, link
        self.core = core = Core(index, lambda: layout)
        self.replies = replies = Replies(link, layout, index)
        self.orders = OrdersGiven(replies.order, lambda: layout.n_losses)
        self.catalog = Catalog(
            index,
            layout,
            core,
            memory=memory,
            replies=replies,
            perform=self.perform,
            time_of_rows=clock.time,
        )
        self.transfer = Transfer(core, self.catalog, link=link, memory=memory)
        self.snapshots = Snapshots(memory)
        self.store = Store(index, core, self.catalog.contents, replies)
        self.catalog.on_forget = self.store.forget
        self.catalog.on_restart = self._restart
        self._of_before: list[Contents] = []  # evaluators may still read the memory
        self._dense = DenseReads(link, replies, self.snapshots)
        self._rows = RowReads(link, replies)
        self._pushes = Pushes(link.view, replies)
        self._calls = Calls(index, replies, functions)
        self._performers: dict[type, Callable[[Any], None]] = {
            do.Carry: lambda a: self._carry(a.request, self._key_of(a.request)),
            do.Retry: lambda a: self._retry(a.request),
            do.Redirect: lambda a: self._redirect(a.request),
            do.Serve: lambda a: self._serve(a.request),
            do.Reply: self._reply,
            do.Open: lambda a: self._open(a.key, a.epoch),
            do.Close: lambda a: self._close(a.key),
            do.Retire: lambda a: self.transfer.retire(a.key, a.epoch),
            do.Free: lambda a: self.transfer.free(a.key, a.epoch),
            do.Take: self._take,
            do.Drop: self._drop,
            do.Export: self._export,
            do.Forget: lambda a: self.transfer.forget(a.key, a.part),
            do.Moved: self.catalog.note_moved,
            do.Discard: lambda a: self.catalog.forget(a.table),
            do.Tell: self._tell,
            do.Fail: lambda a: replies.fail(a.request, RingcommError(a.why)),
            do.Reopen: lambda a: self.catalog.reopen(a.users),
            do.Step: self._perform_step,
            do.Notify: self._notify,
            do.Settled: lambda a: self.handle(on.Finished(a.key)),
        }

    def handle(self, event: on.Event) -> None:
        self.perform(self.core.handle(event, self._monotonic()))

    def perform(self, actions: Iterable[Action]) -> None:
        """Carry out actions in order. An error is sent to the client whose request it is of."""
        for action in actions:
            try:
                perform = self._pushes.performers.get(type(action))
                if perform is None:
                    self._performers[type(action)](action)
                else:
                    perform(action, self._unit(action.key))  # type: ignore[union-attr, arg-type]
            except Exception as error:
                requests = _requests_of(action)
                if not requests:
                    raise
                for request in requests:
                    self.replies.fail(request, error)

    def _restart(self) -> None:
        contents = [*self.catalog.contents.values()]
        self.catalog.clear()
        self.core.restart()
        self.snapshots.clear()
        self.store.clear()
        self.transfer.clear()
        self._of_before = contents if self._layout.evaluators else []

    # --- requests for values --------------------------------------------------------------------
    def arrived(self, request: Delivery) -> None:
        header = request.header
        if header.kind == FrameKind.ENTER and header.option in (EntryOption.ASK, EntryOption.JOIN):
            is_ask = header.option == EntryOption.ASK
            self.handle(on.Entered(request) if is_ask else on.Joined(request, header.place))
            return
        table = self.core.tables.get(header.table)
        if table is None:
            if 0 < header.table <= self.catalog.last_lost:
                return  # its sender is about to hear of the loss, which ends the call there
            raise KeyError(f"server {self._index} has no table {header.table}")
        key = table.key_of(header.partition)
        if self.core.admits(key, header.view):
            self._carry(request, key)
            return
        round_of = None
        if header.kind == FrameKind.PUSH and table.mode.has_rounds:
            round_of = None if flags_of(request.meta) & (ASSIGN | INITIAL) else header.clock
        self.handle(on.Arrived(request, key, round_of))

    def pull_many(self, request: Delivery) -> None:
        """Answer several pulls; the core hears of those that cannot be served at once."""
        for each in self._rows.serve_many(request, self._shard_to_read):
            self._retry(each)

    def _shard_to_read(self, pull: KeyedPull) -> Shard | None:
        core, key = self.core, (pull.table, 0)
        if pull.table not in core.tables or not core.admits(key, pull.epoch):
            return None
        may_read = core.unit_of(key).has_enough(pull.clock, core.clocks)
        return self.catalog.contents[pull.table].shard if may_read else None

    def _retry(self, request: Delivery) -> None:
        try:
            self.arrived(request)
        except Exception as error:  # noqa: BLE001 - it is for who asked, and others are behind it
            self.replies.fail(request, error)

    def _key_of(self, request: Delivery) -> Key:
        return self.core.tables[request.header.table].key_of(request.header.partition)

    def _unit(self, key: Key) -> Any:
        return self.catalog.contents[key[0]].unit(key[1])

    def _reads(self, key: Key) -> Any:
        return self._dense if self.catalog.contents[key[0]].shard is None else self._rows

    def _carry(self, request: Delivery, key: Key) -> None:
        """Decode a request for a unit that may be carried out now."""
        kind, values = request.header.kind, self._unit(key)
        if kind == FrameKind.PUSH:
            self._push(request, key, values)
        elif kind == FrameKind.PULL:
            if not self._reads(key).serve_held(request, key, values):
                self.handle(on.Read(key, request))
        elif kind == FrameKind.ENTER:
            if self.core.tables[key[0]].mode.name != "first_of":
                raise ValueError(f"[{values.spec.name}]: nobody enters rounds of its mode")
            self.handle(on.Decided(key, request, request.header.option == EntryOption.IN))
        elif not isinstance(values, DensePartition):
            self._rows.maintain(request, values)
        elif request.header.option == CallOption.FUNCTION:
            self._calls.on_call(request, values, self.core.unit_of(key))
        elif request.header.option <= CallOption.SET_STATE:
            if self._dense.state(request, values):
                self.handle(on.Loaded(key))
        else:
            raise KeyError(f"server {self._index} has no hash table {key[0]}")

    def _push(self, request: Delivery, key: Key, values: Values) -> None:
        event = self._pushes.decoded(key, request, values)
        unit = self.core.unit_of(key)
        waits = not unit.is_ready and type(event) is not on.Initialized
        if not (waits or type(event) is on.Released or unit.came_before(request)):
            values.note_push(request.body)
        self.handle(event)

    def _serve(self, request: Delivery) -> None:
        key = self._key_of(request)
        self._reads(key).serve(request, self._unit(key))

    def _redirect(self, request: Delivery) -> None:
        key = self._key_of(request)
        self.replies(request, status=Status.WRONG_VIEW, meta=self._owners(key))

    def _owners(self, key: Key) -> bytes:
        table = self.core.tables[key[0]]
        owners = [table.owners[key[1]]] if table.is_dense else table.owners
        return packed_owners(table.epoch_of(key), owners)

    def _reply(self, action: do.Reply) -> None:
        content = action.content
        if action.request.header.kind == FrameKind.ORDER:
            self.replies.answer(action.request, content)
            return
        self.replies(
            action.request,
            status=Status.LATE if action.is_late else Status.OK,
            clock=action.clock,
            meta=b"" if content is None else packed_json(content),
        )

    # --- whether C++ may answer -----------------------------------------------------------------
    def _open(self, key: Key, epoch: int) -> None:
        part = self._unit(key)
        if isinstance(part, DensePartition):
            part.may_read = self._link.may_read
            if not (part.spec.mode.has_rounds or part.segments):
                part.may_ack = True
                self._link.open(key, epoch, part)

    def _close(self, key: Key) -> None:
        part = self.catalog.contents[key[0]].parts.get(key[1])
        if part is not None:
            self._link.close(key)
            part.may_read = part.may_ack = False

    # --- snapshots and moves --------------------------------------------------------------------
    def _take(self, action: do.Take) -> None:
        part = self._unit(action.key)
        keeper = self.snapshots if action.moment in self.snapshots else self.store
        keeper.take(action.moment, action.key, part)

    def _drop(self, action: do.Drop) -> None:
        self.snapshots.drop(action.moment)
        if not action.keeps_copies:
            self.store.drop(action.moment)

    def _tell(self, action: do.Tell) -> None:
        member = Member(action.dest, action.is_server)

        def hear(answer: Any) -> None:
            self.handle(on.Answered(member, action.step, answer))

        order = packed_json({"do": action.do, "content": action.content})
        self.orders.give(member, (order, NOTHING), hear if action.step else None)

    def _perform_step(self, step: do.Step) -> None:
        why_not = ""
        try:
            for action in step.actions:
                self._performers[type(action)](action)
        except Exception as error:  # noqa: BLE001 - who has asked for the command hears of it
            why_not = f"server {self._index}: {error}"
        self.handle(on.StepDone(step.key, why_not))

    def _export(self, action: do.Export) -> None:
        key, part, dest = action

        def taken(why_not: str) -> None:
            self.handle(on.Taken(key, part, why_not))

        try:
            pieces = self.transfer.state_of(key, part).packed()
            body = self.transfer.staged(pieces, self._layout.address_of(dest))
        except MemoryError as error:
            taken(f"no memory to send it: {error}")
            return
        order = packed_json({"do": TAKE, "content": [key[0], part]})
        self.orders.give(Member(dest, is_server=True), (order, body), taken)

    def _notify(self, action: do.Notify) -> None:
        table, part = action.key
        epoch = self.core.tables[table].epoch_of(action.key)
        header = FrameHeader(
            FrameKind.NEWS, option=NewsOption.MOVED, table=table, partition=part, clock=epoch
        )  # fmt: skip
        for rank in action.ranks:
            self.replies.send(rank, header, self._owners(action.key))


def _requests_of(action: Action) -> list[Delivery]:
    """Return the requests that end with an action."""
    if isinstance(action, do.Hold | do.End):
        return [each.request for each in action.contributions]
    if isinstance(action, do.Late):
        return [action.contribution.request]
    request = getattr(action, "request", None)
    return [] if request is None else [request]
