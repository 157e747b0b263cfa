"""init(), shutdown(), and the functions that describe this rank."""

from __future__ import annotations

import atexit
import gc
import logging
import math
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ringcomm._core import exit_at_last, kill_at_last, pass_stop_signals_on
from ringcomm._version import __version__
from ringcomm.config import Settings, read_settings
from ringcomm.engine.api.await_others_at_end import await_others_at_end
from ringcomm.engine.api.begin_next_view import announce_leave, withdraw
from ringcomm.engine.api.spares_and_reserves import (
    end_outside,
    leave_outside,
    request_size,
    sleep_until_needed,
)
from ringcomm.engine.api.world import (
    World,
    begin_view,
    blamed,
    current,
    engine_for,
    enter,
    stay_outside,
    tell_the_others,
)
from ringcomm.engine.control.live_parameters_and_callbacks import PROGRAM
from ringcomm.engine.core import current_engine
from ringcomm.engine.core.call import Call, explain_mismatch
from ringcomm.engine.core.engine import Engine
from ringcomm.engine.core.meet_and_leave import (
    close,
    leave,
    see_others_leave,
    settings_to_compare,
    stop,
)
from ringcomm.engine.progress.deadlines import PROGRAM_ENDED
from ringcomm.engine.progress.timeline import Timeline
from ringcomm.errors import MismatchError, NotInitializedError, PeerFailedError, RingcommError
from ringcomm.launched.child_marks import mark_children_of_this_rank, parent_rank_pid
from ringcomm.launched.launcher import is_fault_tolerant, is_hydra, refuse_foreign_ranks
from ringcomm.launched.mpi_defaults import missed_settings
from ringcomm.launched.rank_program import say_place_as_srun_would
from ringcomm.status.child_signals import let_children_hold
from ringcomm.status.error_printer import note_watch
from ringcomm.status.last_words import Failure, LastWords
from ringcomm.status.page_enums import PageState
from ringcomm.status.run_events import begin_events
from ringcomm.system_text import host_name

if TYPE_CHECKING:
    from ringcomm.status.guardian import Guardian
    from ringcomm.transport.mpi import MpiTransport
    from ringcomm.transport.presence import Presence
    from ringcomm.transport.start_mpi import MPI, Started

_log = logging.getLogger("ringcomm")


engine: Callable[[], Engine] = current_engine.engine
_mpi: Started | None = None  # MPI is started once per process and survives shutdown()
_is_mpi_broken = False  # a rank died or left early: MPI_Finalize would wait for it
_is_exiting = False  # _at_exit() has begun
_was_elastic = False  # of a job that goes on after it has lost ranks
_unended: World | None = None  # shutdown() waited for others in vain; init() may end it
_unheard: LastWords | None = None  # of a world whose shutdown() raised an error


def init(comm: MPI.Comm | None = None) -> None:
    """Make this process a rank of its job. Collective; a second call does nothing.

    Starts MPI unless it is running, with settings for a fast start and for failures; the user's
    own settings stay. From now on the other ranks learn if this rank dies or leaves.

    Args:
        comm: mpi4py communicator whose ranks take part, MPI.COMM_WORLD by default. It is
            duplicated. Each of its ranks must call init().

    Raises:
        ConfigError: no MPI library, an unknown RINGCOMM_ variable, or a launcher that does not
            fit the MPI library, or that starts no MPI ranks, such as torchrun (every process
            would be "rank 0 of 1").
        MismatchError: ranks differ in their version of ringcomm, or in a setting that must be
            the same.
        NotInitializedError: this process is a child of a rank, such as a DataLoader worker.
        TypeError, ValueError: comm is no communicator, or MPI.COMM_NULL, or an intercommunicator.
        RingcommError: a rank failed before this second init(); end the job.
        CommTimeoutError: this is a second init() after an error, and a rank has not called
            shutdown() within RINGCOMM_TIMEOUT_S.
    """
    start(read_settings, comm)


def start(read: Callable[[], Settings], comm: MPI.Comm | None = None) -> None:
    """Do init() with settings from read(), which is called unless this is a rank already."""
    global _mpi, _is_mpi_broken  # noqa: PLW0603 - one world per process, as in MPI
    _refuse_child()
    if current_engine.has_engine():
        return
    note_watch(lambda: current() is not None)
    settings = read()
    from ringcomm.transport.mpi import MpiTransport
    from ringcomm.transport.presence import Presence
    from ringcomm.transport.start_mpi import (
        refuse_late_settings,
        refuse_silent_singleton,
        require_ranks,
        require_running,
        start_deadline,
    )

    if _unended is not None:
        _end_in_order(_unended)
    if _is_mpi_broken:
        raise RingcommError(
            "ringcomm.init: a rank of this job has failed, so MPI cannot bring its ranks together "
            "again. End this job"
        )
    if _mpi is None:
        refuse_foreign_ranks()
    with start_deadline(settings.timeout_s or math.inf):
        if _mpi is None:
            _mpi = _begin_mpi()
        require_running(_mpi.mpi)
        refuse_silent_singleton(_mpi.mpi.COMM_WORLD.size)
        require_ranks(_mpi.mpi, comm)
        refuse_late_settings(_mpi, is_fault_tolerant=is_fault_tolerant())
        _is_mpi_broken = _mpi.mpi.COMM_WORLD.size > 1  # until all ranks have started
        n_losses = settings.elastic_losses if settings.elastic else 0
        presence = Presence(
            _mpi.mpi,
            comm,
            n_losses=n_losses,
            n_spares=settings.spares,
            n_reserves=settings.reserves,
        )
        transport = MpiTransport(presence)
    words = LastWords(transport.page, tell_the_others, blamed)  # first: the others watch this rank
    try:
        world = _make_world(transport, words, settings, partial(start, read, comm))
        begin_events(transport.page)
        PROGRAM.scale = request_size
        presence.close_handed()
        machines = transport.places["machine"].tolist()
        say_place_as_srun_would(sorted(set(machines)).index(machines[transport.rank]))
        mark_children_of_this_rank()
        let_children_hold()
        if settings.spares or settings.reserves:
            _require_alike_outside(presence, settings)
        if world.is_outside:
            stay_outside(world)
            is_needed = sleep_until_needed()
        else:
            begin_view(world)
            is_needed = True
    except BaseException:
        enter(None)
        if presence.size == 1:  # nobody watches: the program may go on without ringcomm
            words.disarm()
        raise
    _is_mpi_broken = False
    if not is_needed:
        end_outside()
    if world.engine.job_rank == 0:
        _warn_at_start(world, _mpi)


def _require_alike_outside(presence: Presence, settings: Settings) -> None:
    """Compare what meet() compares with processes that are no ranks yet, too.

    The first meeting of such a process with the ranks is when it takes a place; an error would then
    end them all.
    """
    shared = settings_to_compare(settings, __version__)
    calls = [Call("init", settings=each) for each in presence.allgather_object(shared)]
    if any(call != calls[0] for call in calls):
        raise MismatchError(explain_mismatch(calls, 0, range(presence.size)))


def _begin_mpi() -> Started:
    from ringcomm.transport.start_mpi import before_finalize, start_mpi

    started = start_mpi()
    atexit.register(_at_exit)
    before_finalize(started.mpi, _before_finalize)
    return started


def _make_world(
    transport: MpiTransport, words: LastWords, settings: Settings, start_again: Callable[[], None]
) -> World:
    from ringcomm.transport.membership.detect_launcher_fault_tolerance import find_gap

    engine = engine_for(transport, settings)
    world = World(engine, transport, words, None, start_again, find_gap(transport.presence))
    return world._replace(guardian=_start_guardian(world, settings))


def _warn_at_start(world: World, started: Started) -> None:
    if world.engine.settings.elastic and (gap := world.gap_text("elastic job")):
        _log.warning("%s", gap)
    transport = world.transport
    missed = missed_settings(
        started.settings if started.was_early else (),
        is_open_mpi=transport.presence.implementation.startswith("Open MPI"),
        n_hosts=len(set(transport.places["machine"].tolist())),
    )
    if missed:
        _log.warning(
            "mpi4py.MPI was imported before ringcomm.init(), so these settings came too late: %s. "
            "Call ringcomm.init() first, or set them for mpirun (-x NAME=VALUE).",
            " ".join(missed),
        )


def shutdown() -> None:
    """Leave the job; return when all ranks have left. Collective. init() may follow.

    Asynchronous operations that are under way are completed first. After an error that has made the
    engine unusable, this returns at once; with more than 16 ranks it may wait up to a second, to
    pass news on. Even then init() may follow, if all ranks call shutdown() and no rank has failed.
    The error is then a CommTimeoutError, or the PeerFailedError of a rank that had left.

    Raises:
        PeerFailedError, CommTimeoutError: an operation could not be completed.
        NotInitializedError: this process is a child of a rank.
    """
    global _unended, _unheard  # noqa: PLW0603
    _refuse_child()
    world = current()
    if world is None:
        return
    enter(None)
    is_clean = _leave(world, "called shutdown()", keeps_wire=True)
    _note_end(world, is_clean=is_clean)
    error = world.engine.state.broke_while_leaving
    if world.engine.state.has_waited_in_vain:
        _unended = world
    if error is None:
        world.words.disarm()
    else:
        _unheard = world.words  # they stay armed: nobody has reported the error yet
    if is_clean:
        world.transport.page.set_state(PageState.LEFT)
    if world.guardian is not None:
        world.guardian.disown() if _is_mpi_broken else world.guardian.wait()
    if error is not None:
        raise error


def begin_anew() -> None:
    """Call shutdown(), then init() with the same arguments as before. Collective."""
    world = current()
    assert world is not None
    start_again = world.start_again
    shutdown()
    start_again()


def is_initialized() -> bool:
    """Return True between init() and shutdown(), in the rank itself; False in its children."""
    return current_engine.has_engine() and parent_rank_pid() is None


def rank() -> int:
    """Return this process's rank, 0..size()-1."""
    return engine().rank


def size() -> int:
    """Return the number of ranks."""
    return engine().size


def start_timeline(prefix: str | os.PathLike[str]) -> None:
    """Record this rank's operations from now on in `<prefix>.<rank>.json`, for ui.perfetto.dev.

    Local: each rank decides for itself. RINGCOMM_TIMELINE=prefix does the same from the start. An
    earlier timeline ends.

    Raises:
        OSError: the file cannot be made; its folder must exist.
        TypeError: prefix is no path.
        NotInitializedError: init() has not run.
    """
    this = engine()
    if not isinstance(prefix, str | os.PathLike):
        raise TypeError(f"start_timeline: prefix must be a path, not {prefix!r}")
    this.pending.record(Timeline(prefix, this.job_rank, this.transport.view))


def stop_timeline() -> None:
    """End the timeline, if there is one."""
    engine().pending.record(None)


def local_rank() -> int:
    """Return the index of this rank among the ranks of its host."""
    return engine().topology.local_rank


def local_size() -> int:
    """Return the number of ranks on this host."""
    return engine().topology.local_size


def cross_rank() -> int:
    """Return the index of this host among the hosts that have this local rank."""
    return engine().topology.cross_rank


def cross_size() -> int:
    """Return the number of hosts that have this local rank."""
    return engine().topology.cross_size


def _refuse_child() -> None:
    parent = parent_rank_pid()
    if parent is None:
        return
    raise NotInitializedError(
        f"this process (pid {os.getpid()}) is a child of the rank with pid {parent}: a DataLoader "
        "worker, or a subprocess. Only the rank itself calls ringcomm.init(); keep the call under "
        'if __name__ == "__main__"'
    )


def _start_guardian(world: World, settings: Settings) -> Guardian | None:
    """Start the guardian on the first rank of a node, unless the job has one rank only."""
    from ringcomm.status.guardian import Guardian

    transport, presence = world.transport, world.presence
    if transport.nodes[transport.rank] != transport.rank or presence.size == 1:
        return None
    try:
        return Guardian(
            presence.wards(),
            grace_s=settings.grace_s,
            is_fault_tolerant=world.survives_deaths,
            is_hydra=is_hydra(),
        )
    except OSError as error:
        _log.warning(
            "host %s has no guardian: if a rank is killed there, no message names it, and only "
            "MPI ends the others. %s",
            host_name(),
            error,
        )
        return None


def _end_in_order(world: World) -> None:
    """Return when all ranks have left a world in which shutdown() waited in vain."""
    global _unended, _unheard, _is_mpi_broken
    see_others_leave(world.engine)
    world.words.disarm()
    close(world.engine, is_clean=False)  # old messages may still be under way
    world.transport.page.set_state(PageState.LEFT)
    if world.guardian is not None:
        world.guardian.wait()
    _unended, _unheard, _is_mpi_broken = None, None, False


def _before_finalize() -> None:
    """Leave the job, because the program calls MPI_Finalize, which ends the wire."""
    world = current()
    if world is None or _is_exiting:
        return
    world.words.notice_unseen_exception()  # a sys.excepthook of the program may be what calls
    if world.words.failure is None:
        shutdown()
    else:
        tell_the_others(world.words.failure)
        stop(world.engine)  # no thread may call MPI any more


def _at_exit() -> None:
    """Leave the job. MPI is finalized after this, unless a rank has failed: it would hang then."""
    global _is_exiting  # noqa: PLW0603
    if parent_rank_pid() is not None or _mpi is None:
        return
    _is_exiting = True
    pass_stop_signals_on()
    world = current()
    failure = None if world is None else _leave_job(world)
    if failure is not None:  # the job waits for this process, and torch takes 1.0 s of CPU to end,
        gc.freeze()  # but 0.24 s without garbage collection (sys.exit(1) after a step, measured)
    if _unended is not None:
        close(_unended.engine, is_clean=False)
    if _unheard is not None and _unheard.failure is not None:
        _unheard.wait_for_report()
    if not _is_mpi_broken:
        from ringcomm.transport.start_mpi import finalize_after_program

        finalize_after_program(_mpi.mpi)
    elif failure is not None and failure.blames is None and is_fault_tolerant():
        kill_at_last()  # ULFM reports only a death by signal to all ranks (measured)
    else:
        # A rank is missing. An mpi4py that was imported before ringcomm would call MPI_Finalize
        # after this, and hang. And MPICH's mpiexec returns 0 if the others return 0 (measured).
        survives = failure is None and (is_fault_tolerant() or _was_elastic)
        was_too_late = world is not None and world.engine.state.broke_while_leaving is not None
        if not _mpi.is_ours_to_finalize or was_too_late or (failure is None and not survives):
            exit_at_last(failure.exit_code if failure is not None else int(not survives))


def _leave_job(world: World) -> Failure | None:
    """Leave, or announce how this rank failed; return that failure, or None."""
    world.words.notice_unseen_exception()
    failure = world.words.failure
    if failure is None:
        is_clean = _leave(world, PROGRAM_ENDED)
        blamed = _blamed(world.engine)
        if world.engine.state.broke_while_leaving is not None:
            world.words.end_with(world.engine.state.broke_while_leaving)
            world.words.wait_for_report()
            failure = world.words.failure
        elif blamed is not None and not world.survives_deaths:
            world.words.follow(blamed)
    else:
        tell_the_others(failure)
        stop(world.engine)
        world.transport.page.set_state(PageState.LEAVING)
        world.words.wait_for_report()
        if failure.blames is not None or not world.survives_deaths:
            await_others_at_end(world, world.transport.view.members, world.engine.settings.grace_s)
        is_clean = world.engine.job_size == 1
    _note_end(world, is_clean=is_clean)
    if failure is None and is_clean and _is_mpi_broken:
        world.transport.page.set_state(PageState.LEFT)  # MPI is not finalized
    if world.guardian is not None:
        world.guardian.disown()
    return failure


def _blamed(engine: Engine) -> int | None:
    """Return the rank because of which this one cannot leave in order; None if there is none.

    It may have left in order itself, while an operation of this rank was under way, which the
    program did not wait for.
    """
    for rank in engine.watch.peers.dead:
        return rank
    error = engine.state.error
    return error.rank if isinstance(error, PeerFailedError) else None


def _leave(world: World, how: str, *, keeps_wire: bool = False) -> bool:
    """Leave the job in order; return True if no process of it has failed."""
    if world.is_outside:
        return leave_outside(world)
    announce_leave(world)
    return leave(world.engine, how, keeps_wire=keeps_wire)


def _note_end(world: World, *, is_clean: bool) -> None:
    """Note whether MPI can be finalized; if not, no rank must wait for this one to heal."""
    global _is_mpi_broken, _was_elastic  # noqa: PLW0603
    # A rank that has said that it failed may be alive still, but it does not call MPI_Finalize.
    has_lost = world.presence.deaths or world.engine.watch.peers.dead
    is_whole = is_clean and not world.is_changed and not has_lost
    _is_mpi_broken = _is_mpi_broken or not is_whole
    _was_elastic = _was_elastic or world.heals
    if not is_clean:
        withdraw(world)
