"""ps.init(): ranks become workers, servers and evaluators; and what a worker knows of the job."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ringcomm import config
from ringcomm.arrays.base import Bytes
from ringcomm.engine import world
from ringcomm.engine.engine import Engine
from ringcomm.engine.group import Group
from ringcomm.engine.ops import allgather_object
from ringcomm.engine.patience import refuse_hopeless
from ringcomm.errors import ConfigError, NotInitializedError, RingcommError
from ringcomm.ps.client import Ask, Client, Wait
from ringcomm.ps.desk import Desk
from ringcomm.ps.frames import Kind
from ringcomm.ps.future import Future
from ringcomm.ps.link import Link
from ringcomm.ps.roles import Layout, Role, Wish, assign
from ringcomm.ps.serving import Server

_LINE = 64
_sessions: weakref.WeakKeyDictionary[Engine, Session] = weakref.WeakKeyDictionary()


@dataclass(eq=False)
class Session:
    """What ps.init() has set up in this process.

    Attributes:
        engine: of this rank.
        layout: who is who.
        group: those that have this rank's role; the default group.
        everyone: all ranks of the job.
        desk: takes requests and replies.
        client: of this rank.
        clock: steps that this worker has completed.
        snapshot: number of the one that pulls see; 0: the values of now.
    """

    engine: Engine
    layout: Layout
    group: Group
    everyone: Group
    desk: Desk
    client: Client
    clock: int = 0
    snapshot: int = 0
    has_left: bool = False

    def memory(self, nbytes: int) -> Bytes:
        """Return memory that this node maps, or ordinary memory where none is shared."""
        return memory_of(self.engine, nbytes)

    def tick(self) -> None:
        """Tell the servers that this worker has completed a step: all it pushed is on its way."""
        self.clock += 1
        client = self.client
        future: Future[None] = Future(
            client, "tick", client.n_servers, lambda: None, client.timestamp()
        )
        servers = range(client.n_servers)
        client.ask([Ask(Kind.TICK, server=s, clock=self.clock) for s in servers], future)

    def leave(self) -> None:
        """Tell the servers that this rank asks nothing more; waits for what is under way."""
        if self.has_left:
            return
        self.has_left = True
        n = self.client.n_servers
        future: Future[None] = Future(
            self.client, "leave", n, lambda: None, self.client.timestamp()
        )
        self.client.ask([Ask(Kind.LEAVE, server=server) for server in range(n)], future)
        future.wait()


def memory_of(engine: Engine, nbytes: int) -> Bytes:
    """Return memory that the ranks of this node map; ordinary memory where none is shared."""
    memory = engine.shared_memory(nbytes)
    if memory is not None:
        return memory
    raw = np.empty(nbytes + _LINE, np.uint8)
    start = -raw.ctypes.data % _LINE  # as the other begins, with a line of the cache
    return raw[start : start + nbytes]


def init(
    servers: int | None = None,
    *,
    evaluators: int = 0,
    role: Role | None = None,
    replication: int = 1,
    placement: str = "balanced",
    colocated: bool = False,
    deadline_s: float = 60.0,
) -> None:
    """Make this rank a worker, a server or an evaluator. Collective over all ranks of the job.

    Calls rc.init(). Workers become the default group: rc.rank(), rc.size() and whatever asks them
    speak of workers. On a server this does not return: it serves until all workers and evaluators
    have left, and raises SystemExit(0).

    Args:
        servers: how many; None: RINGCOMM_PS_SERVERS, or as many as declare the role, or 1. They are
            taken one per host in turn from the highest rank down.
        evaluators: how many of the ranks below the servers evaluate.
        role: what this command says it is; None: what remains. Where one command declares servers
            (`python -m ringcomm.ps.server`), no others are made.
        replication: copies of each partition; more than 1 is not there yet.
        placement: "balanced": slices go to the server with the fewest bytes.
        colocated: servers live in the processes of workers.
        deadline_s: of each wait for a server, in seconds.

    Raises:
        ConfigError: ranks contradict each other, or too few are there; the same on every rank.
    """
    world.init()
    engine = world.engine()
    if engine in _sessions:
        return
    if servers is None and role != "server":
        servers = config.settings().ps_servers or None
    marked = _evaluation
    wish = Wish(role, servers, evaluators, colocated, replication, placement, marked is not None)
    nodes = engine.nodes_of(engine.world)
    layout = assign(allgather_object(wish), nodes)
    if replication > 1:
        raise ConfigError(f"ps.init: replication={replication} is not there yet; leave it out")
    if placement != "balanced":
        raise ConfigError(f"ps.init: placement is {placement!r}; it must be 'balanced'")
    session = _start(engine, layout, deadline_s)
    _sessions[engine] = session
    engine.set_default(session.group)
    if session.desk.server is None:
        engine.before_leaving(session.leave)
        is_evaluator = layout.role_of(engine.job_rank) == "evaluator"
        if is_evaluator and role is None and marked is not None:
            marked.run(session, marked.function, marked.every)
            session.leave()
            sys.exit(0)
    elif layout.is_colocated:
        engine.before_leaving(session.leave)
        engine.work_in_background()
    else:
        _serve(session)
        sys.exit(0)


class _Evaluation(NamedTuple):
    """What evaluators do, and what calls it: run(session, function, every)."""

    function: Callable[[int], object]
    every: int
    run: Callable[[Session, Callable[[int], object], int], None]


_evaluation: _Evaluation | None = None


def evaluate_by(
    function: Callable[[int], object],
    every: int,
    run: Callable[[Session, Callable[[int], object], int], None],
) -> None:
    """Let ps.init() call run(session, function, every) on ranks that evaluate.

    Raises:
        ConfigError: ps.init() has run already.
    """
    global _evaluation  # noqa: PLW0603 - one program has one evaluation
    if world.is_initialized() and world.engine() in _sessions:
        raise ConfigError("ps.evaluator: must stand before ps.init(), which calls it")
    _evaluation = _Evaluation(function, every, run)


def _start(engine: Engine, layout: Layout, deadline_s: float) -> Session:
    everyone = Group.of_job(range(engine.job_size))
    desk = Desk()
    context = everyone.ledger_for(engine).context
    transport = engine.transport
    desk.link = link = Link(transport, transport.mail(), context, desk.place_for)
    desk.client = client = Client(engine, link, layout, deadline_s)
    me = engine.job_rank
    if me in layout.servers:
        index = layout.servers.index(me)
        desk.server = Server(index, layout, link, lambda nbytes: memory_of(engine, nbytes))
    of_role = {"worker": layout.workers, "server": layout.servers, "evaluator": layout.evaluators}
    group = Group.of_job(of_role[layout.role_of(me)])
    engine.attach(desk)
    return Session(engine, layout, group, everyone, desk, client)


def _serve(session: Session) -> None:
    """Drive this rank until everybody has left.

    Raises:
        PeerFailedError: a rank died.
    """
    engine, server = session.engine, session.desk.server
    assert server is not None
    wait = Wait("ps.serve", tuple(range(engine.job_size)))
    hopeless: list[RingcommError] = []

    def is_enough() -> bool:
        try:
            refuse_hopeless(wait, engine.watch)
        except RingcommError as error:
            hopeless.append(error)
        return bool(hopeless) or (server.is_over and not session.desk.link.is_busy)

    engine.run_until(is_enough)
    if hopeless:
        raise hopeless[0]


def session() -> Session:
    """Return what ps.init() has set up.

    Raises:
        NotInitializedError: it has not run.
    """
    found = _sessions.get(world.engine())
    if found is None:
        raise NotInitializedError("ps is not initialized: call ps.init() first")
    return found


def rank() -> int:
    """Return this worker's rank among the workers."""
    return session().group.index


def size() -> int:
    """Return the number of workers."""
    return len(session().layout.workers)


def is_chief() -> bool:
    """Return True on the worker that initialises, checkpoints and logs: the lowest one."""
    current = session()
    return current.engine.job_rank == current.layout.workers[0]


def workers() -> Group:
    """Return the group of the workers; on a worker."""
    return session().group
