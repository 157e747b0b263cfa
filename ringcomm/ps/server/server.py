"""A server: gives its core what arrives, and has the core's decisions carried out.

Everything here runs in the thread that drives the rank. Requests of one client are carried out in
the order in which they were made. A request that must wait holds up no other.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from ringcomm._version import __version__
from ringcomm.errors import RingcommError
from ringcomm.ps.control.agreement import Member
from ringcomm.ps.control.commands import (
    COMMIT,
    DRAIN,
    DROP,
    FREEZE,
    GIVE,
    HOLD,
    HOW_FAR,
    LET,
    MAKE,
    MAKE_ALL,
    RETRACT,
    STOP,
    TAKE,
    TAKE_PLACE,
    THAW,
    WITHOUT,
    Migrate,
    Open,
    command_of,
    failed,
)
from ringcomm.ps.placement.replacement_workers import Beginning, Newcomer
from ringcomm.ps.protocol.frames import (
    FilesOption,
    FrameHeader,
    FrameKind,
    NewsOption,
    ServerOption,
    is_one_way,
)
from ringcomm.ps.server.clock import Clock, OwnClock
from ringcomm.ps.server.core import events as on
from ringcomm.ps.server.display import Display
from ringcomm.ps.server.perform_actions import ActionPerformer
from ringcomm.ps.server.user_functions import Function
from ringcomm.ps.table_spec import Spec

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.protocol.link import Delivery
    from ringcomm.ps.protocol.wire import Wire
    from ringcomm.ps.roles import Layout

_MISSING_MAX: Final = 100  # things for which requests wait, in an answer
_OF_MOVES: Final = frozenset((FREEZE, DRAIN, GIVE, COMMIT, THAW))
_UNIT_KINDS: Final = frozenset(
    (
        FrameKind.PUSH,
        FrameKind.PULL,
        FrameKind.CALL,
        FrameKind.ENTER,
    )
)


class Server:
    """A server process: gives requests to the core, or carries them out.

    Args:
        index: of this server among the servers.
        layout: who is who.
        link: the wire.
        memory: returns memory that clients on this node map.
        functions: that clients may call, by name.
        clock: the time by which it decides; None: that of this process.

    Attributes:
        index, layout: see above.
        core: decides.
        catalog: the tables.
        transfer: takes out and puts in partitions.
        store: its part in checkpoints.
        orders: those that it has given.
        job: a name of this job alone.
        n_copies: processes that have what it has; see ringcomm.ps.server.homes.
        display: what others see of it.
    """

    def __init__(
        self,
        index: int,
        layout: Layout,
        link: Wire,
        memory: Callable[[int], Bytes],
        functions: Mapping[str, Function],
        *,
        clock: Clock | None = None,
    ) -> None:
        self.index = index
        self.layout, self._link = layout, link
        self._performer = performer = ActionPerformer(
            index, layout, link, memory, functions, clock=clock or OwnClock()
        )
        self.core, self.catalog = performer.core, performer.catalog
        self.transfer, self.store = performer.transfer, performer.store
        self.orders = performer.orders
        self._handle, self._replies = performer.handle, performer.replies
        self.job = uuid.uuid4().hex
        self.n_requests = self._nbytes_in = 0
        self.n_copies = 1
        self._began_at = time.monotonic()
        self.display = Display()
        self._handlers: dict[int, Callable[[Delivery], None]] = {
            FrameKind.PULLS: performer.pull_many,
            FrameKind.TICK: self._tick,
            FrameKind.SERVER: self._of_server,
            FrameKind.FILES: self._on_files,
            FrameKind.NEWS: self._noted,
            FrameKind.ASK: self._ask,
            FrameKind.ORDER: self._carry_out,
            FrameKind.REPLY: self._hear_answer,
        }
        self._orders: dict[str, Callable[[Delivery, Any], None]] = {
            MAKE: self._answering(self.catalog.make),
            MAKE_ALL: self._answering(self.catalog.make_all),
            DROP: self._answering(self.catalog.forget),
            STOP: lambda order, number: self._handle(on.Stopped(order, number)),
            HOLD: self._hold,
            LET: lambda order, what: self._handle(on.MomentEnded(order, *what)),
            HOW_FAR: lambda order, dead: self._handle(on.HowFar(order, dead)),
            TAKE_PLACE: self._take_place,
            RETRACT: lambda order, rank: self._handle(on.Retracted(order, rank)),
            TAKE: self._take,
            WITHOUT: self._answering(lambda content: self._handle(on.Without(*content))),
        }

    def answers_for(self, number: int) -> bool:
        return number == self.index

    @property
    def is_over(self) -> bool:
        return self.core.departures.is_over

    def look(self) -> None:
        """Do what is due by now; at each poll."""
        if self.core.awaits_time:
            self.let_time_pass()
        self.store.settle()
        self.display.show(self.what_it_has)

    def let_time_pass(self) -> None:
        self._handle(on.TimePassed())

    def what_it_has(self) -> Counter[str]:
        """Return how much of the tables this server has, and of requests, by its name in `top`."""
        contents = self.catalog.contents.values()
        n_requests, _ = self._link.carried_out
        return Counter(
            slices=sum(len(each.parts) for each in contents),
            shards=sum(each.shard is not None for each in contents),
            requests=self.n_requests + n_requests,
            waiting=self.core.n_waiting,
        )

    def on_request(self, request: Delivery) -> None:
        """Carry out a request; a mistake is replied to its sender, and changes nothing."""
        if request.source in self.core.dead:  # it may have been said by another server
            return
        self.n_requests += 1
        self._nbytes_in += request.body.nbytes
        try:
            if request.header.kind in _UNIT_KINDS:
                self._performer.arrived(request)
                return
            handler = self._handlers.get(request.header.kind)
            if handler is None:
                raise RingcommError(
                    f"server {self.index} knows no request {request.header.kind}: this is "
                    f"ringcomm {__version__}"
                )
            handler(request)
        except Exception as error:
            if is_one_way(request.header):  # nobody waits for a reply
                raise RingcommError(
                    f"server {self.index}: cannot do what rank {request.source} says with "
                    f"{_named(request.header)}: {type(error).__name__}: {error}. This is a defect"
                ) from error
            self._replies.fail(request, error)

    @property
    def job(self) -> str:
        return self.core.name

    @job.setter
    def job(self, name: str) -> None:
        self.core.name = name

    @property
    def is_copy(self) -> bool:
        """Another server like this one answers, and touches files."""
        return self.store.is_copy

    @is_copy.setter
    def is_copy(self, is_copy: bool) -> None:
        self.store.is_copy = self.catalog.is_copy = is_copy

    def on_death(self, rank: int) -> None:
        self.store.give_up(rank)
        self.orders.forget(Member(rank))
        self._handle(on.Died(rank))

    def on_process_death(self, rank: int) -> None:
        """A process died that had servers, of which there are other copies."""
        self.orders.forget(Member(rank))
        self._handle(on.ProcessDied(rank))

    def on_loss(self, number: int) -> None:
        self.layout.lost.add(number)
        self.on_death(self.layout.address_of(number))

    def say_again(self) -> None:
        """Say again what the copy that answered before may not have said before it died."""
        self._performer.perform(self.core.notices())
        self.orders.again()

    # --- commands, see ringcomm.ps.control ------------------------------------------------------
    def _ask(self, request: Delivery) -> None:
        """A rank asks for a command. One about tables is void if the rank is to hear of a loss."""
        content = json.loads(request.body.tobytes() or request.meta)
        is_behind = request.header.view < self.layout.n_losses
        if content["command"] not in ("open", "places"):
            command = command_of(content, request)
            if not (is_behind and command.is_about_tables):
                self._handle(on.Asked(request, command))
        elif is_behind:
            return
        elif content["command"] == "open":
            number = self.catalog.begin(Spec.of_json(content["spec"]), request.source)
            self._handle(on.Asked(request, Open(number)))
        else:
            self.change_places(request, content)

    def _carry_out(self, order: Delivery) -> None:
        """Carry out an order of the server that leads; some are answered later."""
        do, content = (json.loads(order.meta)[name] for name in ("do", "content"))
        try:
            if do in _OF_MOVES:
                (table, unit), more = content
                self._handle(on.MoveOrdered(order, do, (table, unit), more))
            else:
                self._orders[do](order, content)
        except Exception as error:  # noqa: BLE001 - who has asked for the command hears of it
            self._replies.answer(order, failed(error))

    def _answering(self, carry_out: Callable[[Any], None]) -> Callable[[Delivery, Any], None]:
        def carry_out_and_answer(order: Delivery, content: Any) -> None:
            carry_out(content)
            self._replies.answer(order, None)

        return carry_out_and_answer

    def _hold(self, order: Delivery, content: Any) -> None:
        number, save_to, rounds = content
        if save_to is None:
            self._performer.snapshots.begin(number)
        else:
            self.store.begin(number, save_to)
        self._handle(on.Held(order, number, {int(table): n for table, n in rounds.items()}))

    def _take_place(self, order: Delivery, content: Any) -> None:
        newcomer, begins, beside = content
        beginning = begins and Beginning.of_json(begins)
        self._handle(on.TookPlace(order, Newcomer(*newcomer), beginning, beside))

    def _hear_answer(self, reply: Delivery) -> None:
        self.orders.answered(reply.header.sequence, json.loads(reply.meta))

    def _take(self, order: Delivery, content: Any) -> None:
        number, part = content
        why_not = self.transfer.install(number, part, order.body)
        self._replies.answer(order, why_not and f"server {self.index} {why_not}")

    # --- clocks, snapshots, checkpoints ---------------------------------------------------------
    def _tick(self, request: Delivery) -> None:
        """Note a worker's clock; option 1: reply when the slowest has reached one."""
        self._handle(on.ClockAwaited(request) if request.header.option else on.Ticked(request))

    def _of_server(self, request: Delivery) -> None:
        option = request.header.option
        if option == ServerOption.STATS:
            self._stats(request)
        elif option == ServerOption.MISSING:
            self._missing(request)
        elif option == ServerOption.SETTLE:
            self._handle(on.Settling(request))
        elif option in (ServerOption.REST, ServerOption.LEAVE):
            self._leave(request)
        else:
            raise KeyError(f"server {self.index} is asked for {option}, which it does not know")

    def _leave(self, request: Delivery) -> None:
        """A client leaves, or rests; without a number nobody waits for a reply."""
        header = request.header
        asked, rests = request if header.sequence else None, header.option == ServerOption.REST
        if not rests:
            self.orders.forget(Member(header.origin))
        self._handle(on.Left(header.origin, asked, still_asks=rests))

    def _on_files(self, request: Delivery) -> None:
        if request.header.option == FilesOption.SAVE:
            self.store.on_save(request)
            return
        for key in self.store.on_restore(request):
            self._handle(on.Loaded(key))

    # --- moves ----------------------------------------------------------------------------------
    def _noted(self, news: Delivery) -> None:
        header = news.header
        key = header.table, header.partition
        self._handle(on.Noted(news.source, key, header.clock))

    def change_places(self, request: Delivery | None, asked: dict[str, Any]) -> None:
        """Give servers a place, take one's or swap two; move what is on servers without one.

        If a client has asked for it, the reply says what has moved.
        """
        places = self.catalog.places
        if servers := asked.get("remove"):
            if stay := self.catalog.that_stay(servers):
                raise ValueError(
                    f"ps.remove_server: server {servers[0]} has partitions of hash tables that "
                    f"stay where they are, as ps.Evict(max_rows=) is small: {', '.join(stay[:8])}"
                )
            places.remove(*servers)
        elif "add" in asked:
            places.add(asked["add"])
        elif asked["swap"]:
            places.swap(*asked["swap"])
        moves = tuple(self.catalog.displaced(dict(asked["hosts"])))
        if request is None:
            self._handle(on.Begun(Migrate(moves, None, 0, changes_places=True)))
            return
        owner, number = request.source, request.header.sequence
        self._handle(on.Asked(request, Migrate(moves, owner, number, changes_places=True)))

    # --- what it has done, and what it waits for ------------------------------------------------
    def _missing(self, request: Delivery) -> None:
        missing = self.core.progress.missing(request.source, self.layout.chief)
        missing += self.core.agreement.missing(request.source)
        self._replies.json(request, missing[:_MISSING_MAX])

    def _stats(self, request: Delivery) -> None:
        contents = self.catalog.contents
        dense = {n: c for n, c in contents.items() if c.shard is None}
        shards = {n: c.shard for n, c in contents.items() if c.shard is not None}
        n_requests, nbytes_in = self._link.carried_out
        n_waiting = self.core.n_waiting
        stats = {
            "server": self.index,
            "copies": self.n_copies,
            "requests": self.n_requests + n_requests,
            "seconds": time.monotonic() - self._began_at,
            "waiting": n_waiting,
            "queue": n_waiting + self._link.n_queued,
            "nbytes_in": self._nbytes_in + nbytes_in,
            "nbytes_out": self._replies.nbytes,
            "numbers": {c.spec.name: n for n, c in dense.items()},
            "tables": {
                c.spec.name: {n: part.stats() for n, part in c.parts.items()}
                for c in dense.values()
            },
            "hashtables": {shard.spec.name: shard.stats() for shard in shards.values()},
        }
        if json.loads(request.meta).get("keys"):
            stats["vacant"] = sorted(self.catalog.places.vacant)
            stats["keys"] = {
                number: {
                    "owned": shard.partitions,
                    "nbytes": shard.heat(),
                    "stays": shard.is_capped_on_few(self.catalog.places.n_at_first),
                }
                for number, shard in shards.items()
            }
        self._replies.json(request, stats)


def _named(header: FrameHeader) -> str:
    kind = FrameKind(header.kind).name
    return f"{kind}/{NewsOption(header.option).name}" if header.kind == FrameKind.NEWS else kind
