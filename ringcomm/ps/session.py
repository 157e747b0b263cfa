"""The session: everything that ps.init() has set up in this process."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol
from weakref import WeakSet, ref

import numpy as np

from ringcomm.arrays.base import Bytes
from ringcomm.data.work_queue import keep_queues_at
from ringcomm.engine.api import init_rank_size
from ringcomm.engine.core.engine import Engine
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.layer_hooks import Extension
from ringcomm.errors import (
    CommTimeoutError,
    ConfigError,
    NotInitializedError,
    PeerFailedError,
    RingcommError,
)
from ringcomm.ps.client.client import Client
from ringcomm.ps.client.future import Future
from ringcomm.ps.client.json_requests import ask_leader, ask_servers, ignore
from ringcomm.ps.control.agreement import OrdersTaken
from ringcomm.ps.control.commands import COUNT, END, GO_ON, REFUSE, REPLACED
from ringcomm.ps.end_of_job import EndOfTraining, leave, rest, serve
from ringcomm.ps.protocol.frame_dispatcher import FrameDispatcher
from ringcomm.ps.protocol.frame_meta import packed_json
from ringcomm.ps.protocol.frames import INLINE_MAX, FrameHeader, FrameKind
from ringcomm.ps.protocol.link import Delivery
from ringcomm.ps.protocol.lost_server import Loss
from ringcomm.ps.roles import Layout, Takeovers
from ringcomm.status.run_events import record_event

_CACHE_LINE: Final = 64
_log: Final = logging.getLogger("ringcomm")


class Recovering(Protocol):
    """An optimizer of the program, which has values of tables.

    Attributes:
        number: ascends in the order in which they were made.
    """

    number: int

    def require_recoverable(self) -> None:
        """Raise RingcommError if a checkpoint has not all of it."""

    def on_recovered(self) -> None:
        """Begin anew: all tables are as they were in a checkpoint."""


@dataclass(eq=False)
class Session:
    """Everything that ps.init() has set up in this process.

    It lives as long as the engine, from ps.init() to rc.shutdown(): a job with servers goes on
    after deaths in the view in which it began. What would begin another view, with another engine,
    is refused; see refuse_view().

    Attributes:
        engine: of this rank.
        layout: the role of each rank.
        group: the ranks with this rank's role; the default group.
        dispatcher: takes requests and replies.
        client: of this rank.
        training: when it ends.
        n_replaced: how often the chief has replaced the values of tables.
        refusing: ranks whose end ends the job, because they could not restore a checkpoint, or open
            a table; see ringcomm.ps.control.commands.Refuse.
        has_refused: this rank is one of them, as the others know.
        orders: of the server that leads.
        functions: names of those that are marked @ps.function, by server's rank; of this one as -1.
        clock: steps that this worker has completed.
        snapshot: number of the one that pulls read; 0: the present values.
        lost_in: numbers of the snapshots that the loss of a server has ended.
        has_left: this rank has left the servers.
        has_rested: servers wait for no more steps of this rank.
        last_save: the latest checkpoint that it has begun to save.
        tables: that this process has opened, by name.
        n_recovered: how often ps.recover() has gone back to a checkpoint.
        recovers_from: the folder of ps.init(recover=); None: the program recovers.
        drops_step: the step that this worker is in trains nothing, for it has recovered within it.
        between_steps: called after each step of this worker, if set.
        is_ending: too few workers are left, and the job ends after this step.
        newcomers: wait until this worker has ended its step, and stands still; how often it was
            asked for that.
        members_said: who is in the next group of ps.live_workers(), by the worker that says so.
        begins: on a rank that took the place of a worker: the rounds that are not its own, by
            number of the table; on others empty.
        recovering: called by ps.recover() once tables have values again.
        takeovers: where each home runs.
        abandoned: tables of optimizers that are gone, and references to their parameters: once
            these are gone, too, a table is closed when this process opens another one.
        opening: held while one is opened.
        saving: held while a save begins.
    """

    engine: Engine
    layout: Layout
    group: Group
    dispatcher: FrameDispatcher
    client: Client
    training: EndOfTraining
    functions: dict[int, tuple[str, ...]]
    n_replaced: int = 0
    refusing: frozenset[int] = frozenset()
    has_refused: bool = False
    clock: int = 0
    snapshot: int = 0
    lost_in: set[int] = field(default_factory=set)
    has_left: bool = False
    has_rested: bool = False
    last_save: Future[Path] | None = None
    tables: dict[str, Any] = field(default_factory=dict)
    n_recovered: int = 0
    recovers_from: Path | None = None
    drops_step: bool = False
    between_steps: Callable[[], None] | None = None
    is_ending: bool = False
    newcomers: Counter[int] = field(default_factory=Counter)
    members_said: dict[int, list[int]] = field(default_factory=dict)
    begins: Mapping[int, int] = field(default_factory=dict)
    recovering: WeakSet[Recovering] = field(default_factory=WeakSet)
    takeovers: Takeovers = field(init=False)
    orders: OrdersTaken = field(init=False)
    _how: dict[int, str] = field(default_factory=dict)  # servers died, by rank
    abandoned: deque[tuple[Any, list[ref[Any]]]] = field(default_factory=deque)
    opening: threading.Lock = field(default_factory=threading.Lock)
    saving: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.takeovers = Takeovers(self.layout)
        layout = self.layout  # an engine that is over is not to hold this session
        self.engine.control.workers = lambda: layout.workers
        self.orders = OrdersTaken(
            {
                COUNT: lambda _: self.training.ask(),
                END: self.training.end_at,
                REPLACED: lambda _: self.note_replaced(),
                REFUSE: lambda rank: self._note_refusing(self.refusing | {rank}),
                GO_ON: lambda rank: self._note_refusing(self.refusing - {rank}),
            },
            lambda: layout.n_losses,
        )

    @property
    def may_be_chief(self) -> bool:
        """True on a worker that follows the chief if that one dies."""
        me = self.engine.job_rank
        return me in self.layout.workers and bool(self.engine.watch.peers.survivable - {me})

    def memory(self, nbytes: int) -> Bytes:
        return memory_of(self.engine, nbytes)

    def memory_for(self, server: int, nbytes: int) -> Bytes:
        """Return memory for a body that a server reads: shared if it is large and they share."""
        if nbytes > INLINE_MAX and self.client.shares_memory(server):
            return self.memory(nbytes)
        return self.client.link.memory_for_bodies.take(nbytes)

    def tick(self, clock: int | None = None) -> None:
        """Report to the servers that this worker has completed a step, behind its pushes."""
        self.client.wait_until_sent("tick")
        clock = self.clock + 1 if clock is None else clock
        ask_servers(self.client, "tick", FrameKind.TICK, self.client.servers, ignore, clock=clock)
        self.clock = clock

    @property
    def is_newcomer(self) -> bool:
        """True on a rank that has taken the place of another: nobody meets it in collectives."""
        return self.engine.job_rank in self.layout.joined

    @property
    def is_evaluator(self) -> bool:
        """True on a rank that evaluates, also in the place of another."""
        return self.layout.role_of(self.engine.job_rank) == "evaluator"

    @property
    def takes_what_servers_have(self) -> bool:
        """True where wrapping a model is no collective call: it fetches what the others have made.

        Each evaluator reads for itself, and goes on when another one dies.
        """
        return self.is_newcomer or self.is_evaluator

    def has_mode(self, *names: str) -> bool:
        return any(table.mode.name in names for table in [*self.tables.values()])

    def refuse_join(self) -> None:
        """Raise RingcommError if rc.join() would wait for servers, or rounds for this worker."""
        if self.layout.is_colocated and not self.has_mode("sync"):
            return
        raise RingcommError(
            "join(): it waits for all ranks of the job, also for servers, which do not call it, "
            "and takes no part in rounds of tables. A worker with fewer batches takes part by "
            "optimizer.set_samples(0) before backward(), or by table.push(None). Workers wait for "
            "each other in rc.barrier(); one that has finished for good calls rc.shutdown()"
        )

    def refuse_view(self, what: str) -> None:
        """Raise ConfigError: servers take part in no agreement on another view."""
        raise ConfigError(
            f"{what}: this job has parameter servers, and goes on after deaths without a new view: "
            'see "Failure" in docs/parameter_server.md. Leave it out; the loop calls '
            "ps.DistributedOptimizer.step(), or tables, and no collectives"
        )

    def rest(self) -> None:
        """Exempt this worker from rounds and bounded reads, which then do not wait for it.

        See ps.should_stop().

        Rounds of mode "sync" end on all workers at once, and go on as they are.
        """
        if not self.has_rested and self.has_mode("ssp", "first_of"):
            rest(self.client)
        self.has_rested = True

    def on_death(self, rank: int, how: str) -> None:
        """Go on without a rank that died; in the thread that drives."""
        layout, peers, server = self.layout, self.engine.watch.peers, self.dispatcher.server
        is_server = rank in layout.servers
        is_new_loss = is_server and layout.number_of(rank) in layout.server_numbers
        self.client.link.forget(rank)  # its blocks, before anything is acknowledged in its place
        has_other_chief = layout.lose(rank, peers.left)
        if is_server:
            self._note_survivable()
        if is_server and layout.replication > 1:
            self.takeovers.died(rank)
            self._how[rank] = how
            self._lose_homes()
        elif is_new_loss:
            self._lose_server(layout.number_of(rank), rank, how)
        if server is not None:
            server.on_death(rank)
            if server.answers_for(layout.leader):
                _log.warning(
                    "ps: %s, %s, %s; the job goes on without it%s",
                    self.engine.transport.label(rank), _role_in_words(layout, rank), how,
                    ", once ps.recover() has been called" if is_new_loss and layout.lost else "",
                    extra={"event": "death"},
                )  # fmt: skip
        if has_other_chief and layout.chief == self.engine.job_rank:
            _log.warning(
                "ps: rank %d is the chief now", self.engine.job_rank, extra={"event": "failover"}
            )
            self._begin_tables()

    def take_order(self, frame: Delivery) -> None:
        """Carry out an order of the server that leads, and answer."""
        order = json.loads(frame.meta)
        number = frame.header.sequence
        is_valid, answer = self.orders.take(number, order["do"], order["content"])
        if is_valid:
            header = FrameHeader(FrameKind.REPLY, origin=self.engine.job_rank, sequence=number)
            leader = self.layout.number_of(frame.header.origin)
            self.client.say(leader, header, packed_json(answer))

    def note_members(self, frame: Delivery) -> None:
        """Another worker, the chief, says who is in the next group of ps.live_workers()."""
        self.members_said[frame.source] = json.loads(frame.meta)

    def note_replaced(self) -> None:
        """Take note that the values of tables were replaced."""
        self.n_replaced += 1
        for table in [*self.tables.values()]:
            table.note_replaced()

    def refuse_for_all(self, label: str) -> None:
        """Let all ranks know that this one cannot go on: if it ends now, they all do.

        Returns once they know. The end of a step takes it back: the program has caught the error.
        """
        if not self.engine.watch.peers.survivable:
            return  # any death ends the job
        self.has_refused = True
        with contextlib.suppress(PeerFailedError):
            are_told = ask_leader(self.client, label, "refuse")
            self.client.drive_until(are_told.done, label, None)

    def take_back_refusal(self) -> None:
        if self.has_refused:
            self.has_refused = False
            ask_leader(self.client, "step", "go on")

    def _note_refusing(self, ranks: frozenset[int]) -> None:
        self.refusing = ranks
        self._note_survivable()

    def _note_survivable(self) -> None:
        peers = self.engine.watch.peers
        if self.engine.settings.elastic:
            peers.survivable = self.layout.survivable - self.refusing

    def on_homes(self, frame: Delivery) -> None:
        """A server says which homes it runs, after the death of another."""
        said = json.loads(frame.meta)
        taken = self.takeovers.said(frame.source, frame.header.clock, said["runs"])
        homes = self.dispatcher.homes
        if homes is not None:
            homes.on_homes(frame.source, frame.header.clock, said["copied"])
        for home in taken:
            self.client.take_over(home)
            if self.layout.chief == self.engine.job_rank:
                text = f"server {home} goes on from its copy on rank {frame.source}"
                record_event("failover", text)
            if homes is not None:
                homes.on_taken(home)
            if home == self.layout.leader:
                keep_queues_at(self.engine, frame.source)
        self._lose_homes()

    def _lose_homes(self) -> None:
        """End all calls for tables with an error if no copy of a home is left."""
        homes = self.dispatcher.homes
        for home in self.takeovers.lost():
            if home in self.layout.lost:
                continue
            rank = self.layout.rank_of(home)
            self.layout.lost.add(home)
            self._lose_server(home, rank, self._how[rank])
            if homes is not None:
                homes.on_loss(home)

    def _lose_server(self, number: int, rank: int, how: str) -> None:
        """End all calls for tables with an error: a part of their values is gone."""
        tables = [*self.tables.values()]
        before = self.client.loss
        whole = tables if before is None else ()
        names = tuple(table.name for table in whole if table.is_on(number))
        names += () if before is None else before.tables
        loss = Loss(
            number, rank, self.engine.transport.label(rank), how, names, self.layout.replication
        )
        for table in tables:
            table.lose(loss)
        self.client.lose(loss)
        self.training.give_up()

    def _begin_tables(self) -> None:
        """Send the first values of tables that the chief before this one may not have sent."""
        tables = [*self.tables.values()]

        def send() -> None:
            # ps.recover() restores them; or the program has left, or hears of it at its next call
            with contextlib.suppress(NotInitializedError, PeerFailedError):
                for table in tables:
                    self._begin_table(table)

        threading.Thread(target=send, name="ringcomm-ps-chief", daemon=True).start()

    def _begin_table(self, table: Any) -> None:
        """Send the first values of a table, however late servers are: nobody else would."""
        has_warned = False
        while self.engine.state.is_usable and not self.has_left:
            try:
                table.begin()
                return
            except CommTimeoutError as error:
                if not has_warned:
                    _log.warning(
                        "ps: rank %d, the chief now, goes on to send the first values of table[%s] "
                        "until servers have them; pulls of it wait: %s",
                        self.engine.job_rank, table.name, error,
                    )  # fmt: skip
                has_warned = True

    def leave(self) -> None:
        """Leave the servers, once nothing of this rank is under way; then serve on, on a server.

        Raises:
            CommTimeoutError: a server that it names does not answer.
            PeerFailedError: a rank died.
        """
        if self.has_left:
            return
        self.has_left = True
        leave(self.client)
        if self.dispatcher.server is not None:
            warn_after_s = self.engine.settings.stall_warning_or_inf
            serve(self.engine, self.dispatcher, "leave", warn_after_s=warn_after_s)


SESSION: Final = Extension[Session]()


def session() -> Session:
    """Return the session that ps.init() has set up.

    Raises:
        NotInitializedError: it has not run.
    """
    found = init_rank_size.engine().extensions.get(SESSION)
    if found is None:
        raise NotInitializedError("ps is not initialized: call ps.init() first")
    return found


def require_not_begun(what: str, why: str) -> None:
    if (
        init_rank_size.is_initialized()
        and init_rank_size.engine().extensions.get(SESSION) is not None
    ):
        raise ConfigError(f"{what}: must stand before ps.init(), {why}")


def _role_in_words(layout: Layout, rank: int) -> str:
    return f"{layout.role_of(rank)} {layout.place_of(rank)}"


def is_chief() -> bool:
    """Return True on the worker that initialises, checkpoints and logs: the lowest that lives."""
    current = session()
    return current.engine.job_rank == current.layout.chief


def acts_as_chief() -> bool:
    """Return True on the worker that does the work of the chief, also once that has left."""
    current = session()
    me, gone = current.engine.job_rank, current.engine.watch.peers.gone
    return me == current.layout.acting_chief(gone)


def memory_of(engine: Engine, nbytes: int) -> Bytes:
    """Return memory that the ranks of this node map; ordinary memory where none is shared."""
    memory = engine.shared_memory(nbytes)
    if memory is not None:
        return memory
    raw = np.empty(nbytes + _CACHE_LINE, np.uint8)
    start = -raw.ctypes.data % _CACHE_LINE  # aligned as shared memory is
    return raw[start : start + nbytes]
