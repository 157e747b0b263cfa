"""ps.init(): ranks become workers, servers and evaluators; and what a worker knows of the job."""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ringcomm import config
from ringcomm.arrays.base import Bytes
from ringcomm.engine.api import world
from ringcomm.engine.api.collectives import allgather_object
from ringcomm.engine.core.engine import Engine
from ringcomm.engine.core.extensions import Extension
from ringcomm.engine.core.group import Group
from ringcomm.errors import ConfigError, NotInitializedError, RingcommError
from ringcomm.ps import leaving
from ringcomm.ps.client import Ask, Client
from ringcomm.ps.desk import Desk
from ringcomm.ps.frames import Header, Kind
from ringcomm.ps.functions import Function, registered
from ringcomm.ps.future import Future
from ringcomm.ps.link import Link
from ringcomm.ps.post import Pipes, Post
from ringcomm.ps.roles import Layout, Role, Wish, assign
from ringcomm.ps.serving import LEADER, Server

_LINE = 64
# A wake-up costs who wakes 20 to 40 us, so a server stays awake for as long as a client takes to
# make its next small request; who awaits a reply to a large one had better sleep (measured).
_LOOKS_OF_SERVER, _LOOKS_OF_CLIENT = 2000, 400
_STEPS_MAX = 1 << 62  # which nobody completes; see ps.subscribe()


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
        functions: names of those that are marked @ps.function, by server's rank; of this one as -1.
        clock: steps that this worker has completed.
        snapshot: number of the one that pulls see; 0: the values of now.
        last_save: the latest checkpoint that it has begun to save.
        tables: that this process has opened, by name.
        opening: held while one is opened.
        saving: held while a save begins.
    """

    engine: Engine
    layout: Layout
    group: Group
    everyone: Group
    desk: Desk
    client: Client
    functions: dict[int, tuple[str, ...]]
    clock: int = 0
    snapshot: int = 0
    has_left: bool = False
    last_save: Future[Path] | None = None
    tables: dict[str, Any] = field(default_factory=dict)
    opening: threading.Lock = field(default_factory=threading.Lock)
    saving: threading.Lock = field(default_factory=threading.Lock)

    def memory(self, nbytes: int) -> Bytes:
        """Return memory that this node maps, or ordinary memory where none is shared."""
        return memory_of(self.engine, nbytes)

    def tick(self, clock: int | None = None) -> None:
        """Tell the servers that this worker has completed a step: all it pushed is on its way."""
        self.client.wait_until_sent("tick")
        clock = self.clock + 1 if clock is None else clock
        client = self.client
        future: Future[None] = Future(
            client, "tick", client.n_servers, lambda: None, client.timestamp()
        )
        servers = range(client.n_servers)
        client.ask([Ask(Kind.TICK, server=s, clock=clock) for s in servers], future)
        self.clock = clock

    def leave(self) -> None:
        """Tell the servers that this rank asks nothing more; waits for what is under way.

        Raises:
            CommTimeoutError: a server that it names does not answer.
            PeerFailedError: a rank died.
        """
        if self.has_left:
            return
        self.has_left = True
        leaving.leave(self)


_SESSION = Extension[Session]()


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
    rebalance_every_s: float | None = None,
) -> None:
    """Make this rank a worker, a server or an evaluator. Collective over all ranks of the job.

    Calls rc.init(). Workers become the default group: rc.rank(), rc.size() and whatever asks them
    speak of workers. On a server this does not return: it serves until all workers and evaluators
    have left, and raises SystemExit(0).

    Args:
        servers: how many; None: RINGCOMM_PS_SERVERS, or as many as declare the role, or 1. They are
            taken one per host in turn from the highest rank down.
        evaluators: how many of the ranks below the servers evaluate. One that fails ends the job,
            as any rank does.
        role: what this command says it is; None: what remains. Where one command declares servers
            (`python -m ringcomm.ps.server`), no others are made.
        replication: copies of each partition; more than 1 is not there yet.
        placement: "balanced": slices go to the server with the fewest bytes.
        colocated: servers live in the processes of workers.
        deadline_s: of each wait for a server, in seconds.
        rebalance_every_s: how often the servers look at their traffic, in seconds, and let
            partitions move if one of them has been overloaded for a while; None: never, but see
            ps.rebalance().

    Raises:
        ConfigError: ranks contradict each other, or too few are there; the same on every rank.
    """
    if not (isinstance(deadline_s, int | float) and deadline_s > 0):
        raise ConfigError(f"ps.init: deadline_s is {deadline_s!r}; it must be more than 0 seconds")
    world.init()
    engine = world.engine()
    if engine.extensions.get(_SESSION) is not None:
        return
    if servers is None and role != "server":
        servers = config.settings().ps_servers or None
    marked = _evaluation
    functions = registered()
    wish = Wish(
        role, servers, evaluators, colocated, replication, placement, marked is not None,
        tuple(sorted(functions)), rebalance_every_s,
    )  # fmt: skip
    nodes = engine.groups.default.ranks.nodes
    wishes = allgather_object(wish)
    layout = assign(wishes, nodes)
    if replication > 1:
        raise ConfigError(f"ps.init: replication={replication} is not there yet; leave it out")
    if placement != "balanced":
        raise ConfigError(f"ps.init: placement is {placement!r}; it must be 'balanced'")
    names = {rank: wishes[rank].functions for rank in layout.servers} | {-1: wish.functions}
    session = _start(engine, layout, deadline_s, functions, names)
    engine.extensions.keep(_SESSION, session)
    if (every_s := wishes[layout.workers[0]].rebalance_every_s) is not None:
        _balance(session, every_s)
    engine.groups.default = session.group
    if session.desk.server is None:
        engine.extensions.before_leaving(session.leave)
        is_evaluator = layout.role_of(engine.job_rank) == "evaluator"
        if is_evaluator and role is None and marked is not None:
            marked.run(session, marked.function, marked.every)
            session.leave()
            _end()
    elif layout.is_colocated:
        engine.extensions.before_leaving(session.leave)
        engine.progress.work_in_background()
    else:
        leaving.serve(session, "ps.serve")
        _end()


def _end() -> NoReturn:
    """End a rank that has nothing to do any more; those that call rc.shutdown() wait for it."""
    world.shutdown()
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
    require_not_begun("ps.evaluator", "which calls it")
    _evaluation = _Evaluation(function, every, run)


def require_not_begun(what: str, why: str) -> None:
    """Raise ConfigError if ps.init() has run already."""
    if world.is_initialized() and world.engine().extensions.get(_SESSION) is not None:
        raise ConfigError(f"{what}: must stand before ps.init(), {why}")


def _connect(engine: Engine, layout: Layout) -> Post | None:
    """Return pipes to the ranks of this node that this rank exchanges frames with. Collective."""
    is_server = engine.job_rank in layout.servers
    mates = range(engine.job_size) if is_server else layout.servers
    pipes = Pipes(engine.transport, mates)
    places = allgather_object(pipes.places)
    looks = _LOOKS_OF_SERVER if is_server else _LOOKS_OF_CLIENT
    return pipes.connect(places, goes_on_alone=is_server and layout.is_colocated, looks=looks)


def _start(
    engine: Engine,
    layout: Layout,
    deadline_s: float,
    functions: dict[str, Function],
    names: dict[int, tuple[str, ...]],
) -> Session:
    everyone = Group.of_job(range(engine.job_size))
    desk = Desk()
    context = everyone.ledger_for(engine).context
    transport = engine.transport
    desk.link = link = Link(
        transport, transport.mail(), context, desk.place_for, _connect(engine, layout)
    )
    desk.client = client = Client(engine, link, layout, deadline_s)
    me = engine.job_rank
    if me in layout.servers:
        index = layout.servers.index(me)
        memory = partial(memory_of, engine)
        desk.server = Server(index, layout, link, memory, functions)
    of_role = {"worker": layout.workers, "server": layout.servers, "evaluator": layout.evaluators}
    group = Group.of_job(of_role[layout.role_of(me)])
    engine.extensions.add_service(desk)
    return Session(engine, layout, group, everyone, desk, client, names)


def _balance(session: Session, every_s: float) -> None:
    from ringcomm.ps.balancing import Balancer  # it asks by what stands here

    if session.layout.servers[LEADER] == session.engine.job_rank:
        session.engine.extensions.add_service(Balancer(session, every_s))


def session() -> Session:
    """Return what ps.init() has set up.

    Raises:
        NotInitializedError: it has not run.
    """
    found = world.engine().extensions.get(_SESSION)
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


def complete_step(step: int | None = None) -> int:
    """Tell the servers that this worker has completed a step, with all it has pushed so far.

    ps.SSP(s) and evaluators go by it. ps.DistributedOptimizer.step() does it by itself; a worker
    that has none, but tables, calls this at the end of each step. It waits for nothing.

    Args:
        step: how many it has completed, e.g. after ps.restore(); one more than before if not given.

    Returns:
        How many it has completed.

    Raises:
        ValueError: fewer than before.
        RingcommError: this rank is no worker.
    """
    current = session()
    if current.layout.role_of(current.engine.job_rank) != "worker":
        raise RingcommError("ps.complete_step: this rank is no worker; only their steps count")
    step = None if step is None else operator.index(step)
    if step is not None and not current.clock <= step < _STEPS_MAX:
        raise ValueError(
            f"ps.complete_step: step is {step}, and this worker has completed {current.clock}; "
            f"{_STEPS_MAX - 1} are the most"
        )
    if step is None or step > current.clock:
        current.tick(step)
    return current.clock


def stop() -> None:
    """Let should_stop() be True on all workers and evaluators, soon; on the chief.

    Nobody is interrupted, and nothing is waited for: who is in a step ends it. A worker that leaves
    holds up no round, so workers need not stop after the same step.

    Raises:
        RingcommError: this rank is not the chief.
    """
    current = session()
    if not is_chief():
        raise RingcommError("ps.stop: the chief decides when training ends; see ps.is_chief()")
    current.desk.is_to_stop = True
    for rank in (*current.layout.workers[1:], *current.layout.evaluators):
        current.desk.link.send(rank, Header(Kind.STOP, origin=current.engine.job_rank))
    current.engine.nudge()


def should_stop() -> bool:
    """Return True once the chief has called ps.stop(): for the condition of a training loop."""
    current = session()
    current.client.listen()
    return current.desk.is_to_stop


def workers() -> Group:
    """Return the group of the workers; on a worker."""
    return session().group
