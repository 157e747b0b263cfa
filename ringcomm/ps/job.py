"""ps.init(), ps.rank(), ps.stop() and others: begins a job, gives each rank its role."""

from __future__ import annotations

import operator
import os
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

from ringcomm.config import argument_or, read_settings
from ringcomm.data.work_queue import keep_queues
from ringcomm.engine.api import init_rank_size
from ringcomm.engine.api.collectives import allgather_object
from ringcomm.engine.core.engine import Engine
from ringcomm.engine.core.group import Group
from ringcomm.errors import ConfigError, RingcommError
from ringcomm.ps.checkpoint.arguments import path_of
from ringcomm.ps.checkpoint.client import save, save_at_stop
from ringcomm.ps.client.client import Client
from ringcomm.ps.client.json_requests import ask_leader
from ringcomm.ps.control.commands import MEET, STAND_STILL
from ringcomm.ps.end_of_job import EndOfTraining, serve
from ringcomm.ps.evaluation import evaluate, is_marked
from ringcomm.ps.members.let_in import end_step, let_in, meet, note_newcomer
from ringcomm.ps.members.stand_by import stand_by
from ringcomm.ps.protocol.deaths import Deaths
from ringcomm.ps.protocol.frame_dispatcher import FrameDispatcher
from ringcomm.ps.protocol.frames import STEPS_MAX, NewsOption
from ringcomm.ps.protocol.link import Link
from ringcomm.ps.protocol.node_pipes import Pipes
from ringcomm.ps.roles import InitOptions, Layout, Role, assign, refuse_what_cannot_be
from ringcomm.ps.server.user_functions import Function, registered
from ringcomm.ps.session import SESSION, Session, is_chief, memory_of, session

# A wake-up costs the rank that wakes another 20 to 40 us, so a server stays awake for as long as a
# client takes to make its next small request. A client that awaits a reply to a large one had
# better sleep (measured).
_LOOKS_OF_SERVER, _LOOKS_OF_CLIENT = 2000, 400

_threads: Final = threading.local()  # in tests a rank is a thread


def init(
    servers: int | None = None,
    *,
    evaluators: int | None = None,
    spares: int | None = None,
    worker_spares: int | None = None,
    role: Role | None = None,
    replication: int = 1,
    colocated: bool = False,
    deadline_s: float | None = None,
    recover: str | Path | None = None,
    save_every_s: float | None = None,
) -> None:
    """Make this rank a worker, a server or an evaluator. Collective over all ranks of the job.

    Calls rc.init(). Workers become the default group, so rc.rank() and rc.size() are about workers.
    On a server this does not return: it serves until all workers and evaluators have left, and
    raises SystemExit(0).

    With RINGCOMM_ELASTIC=1, under a launcher that lets the others go on, ranks may die, also
    servers: docs/parameter_server.md says what follows. Without it, any death ends the job.

    Args:
        servers: how many; None: RINGCOMM_PS_SERVERS, or as many as declare the role, or 1. They are
            taken one per host in turn from the highest rank down.
        evaluators: how many of the ranks below the servers evaluate; None: RINGCOMM_PS_EVALUATORS,
            or none.
        spares: servers more, on the highest ranks, that have no partitions until they take the
            place of one that died, or are added: docs/parameter_server.md says how. None:
            RINGCOMM_PS_SPARES, or none. They need RINGCOMM_ELASTIC=1.
        worker_spares: ranks more that wait in this call until a worker or an evaluator dies, and
            return from it in its place; where nobody dies, the program ends there. None:
            RINGCOMM_PS_WORKER_SPARES, or none. They need RINGCOMM_ELASTIC=1.
        role: of this command; None: what remains. Where one command declares servers
            (`python -m ringcomm.ps.server`), no others are made.
        replication: copies of each partition, 1 or 2. With 2, another server goes on in the place
            of one that dies, and nothing is lost; it needs RINGCOMM_ELASTIC=1, and two servers.
        colocated: servers live in the processes of workers.
        deadline_s: of each wait for a server, in seconds; None: RINGCOMM_TIMEOUT_S, as of
            collectives. After RINGCOMM_STALL_WARNING_S a warning says which workers are missing.
        recover: folder of checkpoints. If a server dies, step() of a ps.DistributedOptimizer calls
            ps.recover(), and training goes on from there; see ps.step_number(). After SIGTERM or
            SIGUSR1 a checkpoint is saved there, and all ranks end with code 75.
        save_every_s: seconds between checkpoints that the chief saves there; None: the program
            saves.

    Raises:
        ConfigError: ranks contradict each other, or too few are there; the same on every rank. Or
            a second call asks for another job than the first has begun.
        TypeError, ValueError: recover is no path.
    """
    _refuse_to_begin_again()
    _require_seconds(deadline_s=deadline_s, save_every_s=save_every_s)
    if save_every_s is not None and recover is None:
        raise ConfigError("ps.init: save_every_s= needs a folder: recover=")
    root = None if recover is None else path_of("ps.init", recover, "recover")
    init_rank_size.init()
    engine = init_rank_size.engine()
    if (begun := engine.extensions.get(SESSION)) is not None:
        _require_alike(
            begun.layout, servers=servers, evaluators=evaluators, spares=spares,
            worker_spares=worker_spares, replication=None if replication == 1 else replication,
            colocated=colocated or None,
        )  # fmt: skip
        return
    _refuse_other_views(engine)
    found, warns = read_settings(), engine.job_rank == 0
    of_job = None if role == "server" else found.ps_servers or None
    servers = argument_or(of_job, "servers", servers, warns=warns)
    evaluators = argument_or(found.ps_evaluators, "evaluators", evaluators, warns=warns)
    spares = argument_or(found.ps_spares, "spares", spares, warns=warns)
    worker_spares = argument_or(found.ps_worker_spares, "worker_spares", worker_spares, warns=warns)
    functions, is_evaluating = registered(), is_marked()
    options = InitOptions(
        role, servers, evaluators, spares, colocated, replication, is_evaluating,
        tuple(sorted(functions)), worker_spares,
    )  # fmt: skip
    all_options = allgather_object(options)
    layout = assign(all_options, engine.groups.default.ranks.nodes)
    if engine.page is not None:
        engine.page.set_role(_role_text(layout, engine.job_rank))
    refuse_what_cannot_be(layout, is_elastic=bool(engine.settings.elastic))
    names = {rank: all_options[rank].functions for rank in layout.servers}
    if deadline_s is None:
        deadline_s = engine.settings.timeout_or_inf
    current = _start(engine, layout, deadline_s, functions, names | {-1: options.functions})
    engine.extensions.keep(SESSION, current)
    engine.groups.default = current.group
    engine.extensions.check_joins(current.refuse_join)
    engine.extensions.check_views(current.refuse_view)
    if layout.role_of(engine.job_rank) == "spare":
        if not stand_by(current, evaluates=role is None and is_evaluating):
            _end()
        engine.groups.default = current.group
    if root is not None and layout.role_of(engine.job_rank) == "worker":
        _let_recover(current, root, save_every_s)
    _begin(current, evaluates=role is None and is_evaluating)


def _begin(current: Session, *, evaluates: bool) -> None:
    """Do what a rank of this role does; return on a worker, or if the program evaluates."""
    engine, layout = current.engine, current.layout
    if current.dispatcher.server is None:
        engine.extensions.before_leaving(current.leave)
        if evaluates and layout.role_of(engine.job_rank) == "evaluator":
            evaluate()
            current.leave()
            _end()
    elif layout.is_colocated:
        engine.extensions.before_leaving(current.leave)
        engine.progress.work_in_background()
    else:
        serve(engine, current.dispatcher, "ps.serve")
        _end()


def _require_seconds(**seconds: float | None) -> None:
    for name, value in seconds.items():
        if value is not None and not (hasattr(value, "__float__") and value > 0):
            raise ConfigError(f"ps.init: {name} is {value!r}; it must be more than 0 seconds")


def _require_alike(begun: Layout, **asked: int | None) -> None:
    """Raise ConfigError if a second call asks for another job than the one that has begun."""
    facts = {
        "servers": begun.n_places, "spares": begun.spares, "worker_spares": len(begun.waiting),
        "evaluators": len(begun.evaluators), "replication": begun.replication,
        "colocated": begun.is_colocated,
    }  # fmt: skip
    for name, wanted in asked.items():
        if wanted is not None and wanted != (is_so := facts[name]):
            raise ConfigError(
                f"ps.init: {name}={wanted}, but this job has begun with {name}={is_so}. The first "
                "call decides for the whole job; call rc.shutdown() before another one"
            )


def _refuse_other_views(engine: Engine) -> None:
    """Raise ConfigError where ranks are to come, or others to go on in a new view."""
    from ringcomm.elastic.run import is_running

    settings = engine.settings
    what = ""
    if settings.elastic and is_running():
        what = "elastic.run"
    elif settings.spares or settings.reserves:
        what = f"RINGCOMM_SPARES={settings.spares} and RINGCOMM_RESERVES={settings.reserves}"
    if what:
        raise ConfigError(
            f"ps.init: it does not go with {what}: in a job with parameter servers the others go "
            "on after a death without a new view. Leave it out; spares of servers are "
            "ps.init(spares=), or RINGCOMM_PS_SPARES, and those of workers "
            "ps.init(worker_spares=), or RINGCOMM_PS_WORKER_SPARES"
        )


def _let_recover(current: Session, root: Path, save_every_s: float | None) -> None:
    current.recovers_from = root
    if save_every_s is None:
        save_at_stop(current, root)
    else:
        save(root, every_s=save_every_s)


def _refuse_to_begin_again() -> None:
    if getattr(_threads, "has_ended", False):
        raise ConfigError(
            "ps.init: this rank was a server or an evaluator, and its job is over. There ps.init() "
            "ends the program by SystemExit(0): let it pass, and call it once"
        )


def _role_text(layout: Layout, rank: int) -> str:
    role = layout.role_of(rank)
    return f"server {layout.number_of(rank)}" if role == "server" else role


def _end() -> NoReturn:
    """End a rank that has nothing to do any more; ranks that call rc.shutdown() wait for it."""
    _threads.has_ended = True
    control = init_rank_size.engine().control
    init_rank_size.shutdown()
    raise SystemExit(os.EX_TEMPFAIL if control.signals.has_stopped else 0)


def _start(
    engine: Engine,
    layout: Layout,
    deadline_s: float,
    functions: dict[str, Function],
    names: dict[int, tuple[str, ...]],
) -> Session:
    context = Group.of_job(range(engine.job_size)).ledger_for(engine).context
    transport, me = engine.transport, engine.job_rank
    dispatcher = FrameDispatcher()
    pipes = _connect(engine, layout)
    survivable = layout.survivable if engine.settings.elastic else frozenset[int]()
    engine.watch.peers.survivable = survivable
    link = Link(
        transport, transport.short_messages(), context, dispatcher.place_for, pipes,
        survivable=survivable,
    )  # fmt: skip
    client = Client(engine, link, layout, deadline_s)
    tables: dict[str, Any] = {}
    dispatcher.link, dispatcher.client = link, client
    client.waits.tables = tables
    if me in layout.servers:
        _make_server(engine, layout, dispatcher, pipes, functions)
    of_role = {
        "worker": layout.workers, "server": layout.servers, "evaluator": layout.evaluators,
        "spare": layout.waiting,
    }  # fmt: skip
    group = Group.of_job(of_role[layout.role_of(me)])
    dispatcher.deaths = Deaths(engine.watch.peers)
    current = Session(
        engine, layout, group, dispatcher, client, EndOfTraining(), names, tables=tables
    )
    dispatcher.deaths.listeners.append(current.on_death)
    dispatcher.take_order = current.take_order
    dispatcher.takes[NewsOption.MOVED] = client.on_notice
    dispatcher.takes[NewsOption.HOMES] = current.on_homes
    dispatcher.takes[NewsOption.MEMBERS] = current.note_members
    current.orders.handlers[STAND_STILL] = partial(note_newcomer, current)
    current.orders.handlers[MEET] = partial(meet, current)
    keep_queues(engine, layout.rank_of(layout.leader))
    engine.extensions.add_service(dispatcher)
    engine.extensions.add_waits(lambda: client.waits.label)
    return current


def _make_server(
    engine: Engine,
    layout: Layout,
    dispatcher: FrameDispatcher,
    pipes: Pipes,
    functions: dict[str, Function],
) -> None:
    # These take 30 ms, which a worker saves.
    from ringcomm.ps.server.homes.home_pushes import make_pushes
    from ringcomm.ps.server.homes.local_homes import Homes
    from ringcomm.ps.server.server import Server

    memory, link = partial(memory_of, engine), dispatcher.link
    number = layout.number_of(engine.job_rank)
    if layout.replication == 1:
        dispatcher.server = Server(number, replace(layout), link, memory, functions)
        dispatcher.server.display.page = engine.page
        return
    dispatcher.server = dispatcher.homes = Homes(
        number,
        layout,
        link,
        lambda home, seen, wire, clock: Server(home, seen, wire, memory, functions, clock=clock),
        partial(make_pushes, pipes.endpoint),
    )
    dispatcher.homes.display.page = engine.page


def _connect(engine: Engine, layout: Layout) -> Pipes:
    """Return pipes to the ranks of this node that this rank exchanges frames with. Collective."""
    is_server = engine.job_rank in layout.servers
    pipes = Pipes(engine.transport, range(engine.job_size) if is_server else layout.servers)
    pipes.connect(
        allgather_object(pipes.places),
        goes_on_alone=is_server and layout.is_colocated,
        looks=_looks_of_server(engine, layout) if is_server else _LOOKS_OF_CLIENT,
    )
    return pipes


def _looks_of_server(engine: Engine, layout: Layout) -> int:
    node = engine.transport.node
    has_no_core = node is not None and node.is_crowded and layout.replication > 1
    return 0 if has_no_core else _LOOKS_OF_SERVER  # the other copy is to have the core


def rank() -> int:
    """Return this worker's rank among the workers: that of the one whose place it has taken."""
    return session().group.index


def size() -> int:
    """Return the number of workers."""
    return len(session().layout.workers)


def workers() -> Group:
    """Return the group of the workers; on a worker."""
    return session().group


def complete_step(step: int | None = None) -> int:
    """Report to the servers that this worker has completed a step, with all its pushes so far.

    ps.SSP(s) and evaluators go by it. ps.DistributedOptimizer.step() does it by itself; a worker
    that has none, but tables, calls this at the end of each step. Commands of `ringcomm ctl` are
    taken here, as in rc.step(); else it waits for nothing.

    Args:
        step: how many it has completed, e.g. after ps.restore(); one more than before if not given.

    Returns:
        How many it has completed.

    Raises:
        ValueError: fewer than before.
        RingcommError: this rank is no worker.
        SystemExit: see rc.step().
    """
    current = session()
    if current.layout.role_of(current.engine.job_rank) != "worker":
        raise RingcommError("ps.complete_step: this rank is no worker; only their steps count")
    step = None if step is None else operator.index(step)
    if step is not None and not current.clock <= step < STEPS_MAX:
        raise ValueError(
            f"ps.complete_step: step is {step}, and this worker has completed {current.clock}; "
            f"{STEPS_MAX - 1} are the most"
        )
    if step is None or step > current.clock:
        current.tick(step)
    end_step(current)
    current.engine.note_step(current.clock)
    current.engine.control.come_to_boundary(current, current.clock)
    let_in(current)
    return current.clock


def step_number() -> int:
    """Return how many steps this worker has completed: less than before after a recovery.

    A loop that goes by it takes the data of lost steps again: while ps.step_number() < n.
    """
    return session().clock


def stop() -> None:
    """Make should_stop() True on all workers and evaluators, soon; on the chief.

    Nobody is interrupted, and this waits for nothing: a rank within a step ends it. If a table has
    the mode "sync", should_stop() returns True after the same number of calls on every worker,
    which is the next one or the one after it. So all contribute to the same rounds, also the
    chief, which must go on until its should_stop() returns True. In other modes each worker ends
    after the step that it is in.

    Raises:
        RingcommError: this rank is not the chief.
    """
    current = session()
    if not is_chief():
        raise RingcommError("ps.stop: the chief decides when training ends; see ps.is_chief()")
    training = current.training
    if training.is_begun():
        return
    try:
        ask_leader(current.client, "ps.stop", "stop", by_count=current.has_mode("sync"))
    except BaseException:
        training.give_up()
        raise


def should_stop() -> bool:
    """Return True once the chief has called ps.stop(): for the condition of a training loop.

    Call it on every worker equally often. It waits only if the chief has just called ps.stop(), for
    workers that compute. What follows the loop may use collectives, and the tables as they are.

    Raises:
        CommTimeoutError: a worker that it names does not answer.
        PeerFailedError: a rank died.
    """
    current = session()
    current.client.listen()
    client, training = current.client, current.training
    while (is_over := training.is_over()) is None:
        client.wait_until(
            lambda: training.is_decided, "ps.should_stop", lambda: (client.leader,)
        )  # fmt: skip
    if is_over and current.layout.role_of(current.engine.job_rank) == "worker":
        current.rest()
    return is_over
