"""elastic.run: calls a training function again in each new view, from the last committed state."""

from __future__ import annotations

import functools
import logging
import os
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Concatenate, Final, NoReturn, ParamSpec, TypeVar, cast

import numpy as np

from ringcomm.elastic.commit_file import KeptFile
from ringcomm.elastic.state import ArrayState, HostsUpdatedInterrupt, State
from ringcomm.elastic.views import begin_in_new_view
from ringcomm.engine.api import collectives
from ringcomm.engine.api.begin_next_view import (
    elastic_world,
    end_with_others,
    evict,
    finish_run,
    heal,
    is_given_up,
    stop_for_another_size,
    withdraw,
)
from ringcomm.engine.api.init_rank_size import init, rank, shutdown, size
from ringcomm.engine.api.spares_and_reserves import end_outside, request_size, take_place
from ringcomm.engine.api.world import current, is_outside
from ringcomm.engine.control.live_parameters_and_callbacks import PROGRAM
from ringcomm.engine.control.missed_commands import take_missed_commands
from ringcomm.errors import (
    CommTimeoutError,
    NewViewInterrupt,
    PeerFailedError,
    RingcommError,
    ServerLostError,
)
from ringcomm.status.run_events import record_event

# --- enough ranks ---------------------------------------------------------------------------------
_NAP_S = 20e-3
_log = logging.getLogger("ringcomm")
TOO_FEW: Final = os.EX_TEMPFAIL  # 75: start the job again to go on
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=State)
_n_running = 0
_has_warned = False
_SHOWN = 3  # differences in an error
_LACKING = "nothing"
_Outline = dict[str, str]


def await_enough_ranks() -> bool:
    """Return True once the view has RINGCOMM_ELASTIC_MIN ranks, False if no others come.

    Collective; the same on all ranks. Waits for at most RINGCOMM_TIMEOUT_S.
    """
    world, membership = elastic_world()
    settings, n = world.engine.settings, world.transport.size
    if n >= settings.elastic_min:
        return True
    too_few = f"elastic.run: {n} ranks are left, and RINGCOMM_ELASTIC_MIN is {settings.elastic_min}"
    if world.transport.rank == 0:
        _log.warning("%s: the job waits for others", too_few)
    deadline = time.monotonic() + settings.timeout_or_inf
    while True:
        others = set(membership.state.everyone) - set(membership.state.colleagues)
        may_hope = n + len(others) >= settings.elastic_min and time.monotonic() < deadline
        mine = np.array([may_hope], np.int64)
        if not collectives.broadcast(mine, 0, name="elastic: wait for others")[0]:
            break
        stop_for_another_size()
        time.sleep(_NAP_S)
    if world.transport.rank == 0:
        _log.error("%s; no others have come. The job ends: start it again to go on", too_few)
    return False


def run(train: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorate a training function, so that training goes on after ranks are lost.

    All ranks call the decorated function with a State. It first gives all ranks the same state,
    then calls `train`. If an operation raises PeerFailedError, the ranks that are left agree on a
    new view: rank() and size() change, arrays of rc.zeros() stay registered, and groups, process
    sets and handles of the old view are over. Then the listeners of on_new_view() are called, each
    rank gets the last state that any of them has committed, the state's reset callbacks are called,
    and so is `train`.

    A process that comes with another state than the job has (its class, names and shapes of its
    values) ends with an error, and the others go on without it.

    Spares (RINGCOMM_SPARES) wait in here for the place of a lost rank. If the view has room for one
    that comes later, or is to have another size, commit() ends the view by a NewViewInterrupt,
    which this catches. A rank that is one too many then waits in here, as spares do. With
    RINGCOMM_ELASTIC_HANG_S, ranks for which the others wait in vain are killed.

    When `train` has returned on all ranks, the decorated function returns its result on each of
    them; in a process that has no place then, it ends the program. A rank that is lost later is an
    error as in any other job.

    RINGCOMM_ELASTIC=1 must be set, and the launcher must let the others go on: `mpirun --with-ft
    ulfm`, or on one host `mpirun --runtime-options continuous`. Otherwise a failure ends the job as
    always; a warning says so.

    Raises:
        ConfigError: the job has parameter servers, whose workers go on without this.
        PeerFailedError: a handle of an earlier view was waited for.
        CommTimeoutError: a rank that is not lost has not come within RINGCOMM_TIMEOUT_S.
        RingcommError: more ranks are lost than RINGCOMM_ELASTIC_LOSSES, or all but spares.
        SystemExit: this process has no place, and the job is over; or, with code 75, fewer than
            RINGCOMM_ELASTIC_MIN ranks are left, and no others come within RINGCOMM_TIMEOUT_S; or
            ranks for which the others wait in vain cannot be killed (RINGCOMM_ELASTIC_HANG_S).
    """

    @functools.wraps(train)
    def run_elastic(state: S, *args: P.args, **kwargs: P.kwargs) -> R:
        global _n_running  # noqa: PLW0603 - as many as are nested in this process
        if not isinstance(state, State):
            raise TypeError(f"elastic.run: the first argument is a State, not {state!r}")
        init()
        bound = functools.partial(train, state, *args, **kwargs)
        _n_running += 1
        try:
            return _run(bound, state, is_elastic=warn_unless_elastic("elastic.run"))
        finally:
            _n_running -= 1

    return cast(Callable[Concatenate[S, P], R], run_elastic)


def is_running() -> bool:
    """Return True within elastic.run: it handles the failures of this rank."""
    return _n_running > 0


def warn_unless_elastic(what: str) -> bool:
    """Return True if this job is elastic; else warn on rank 0, once, and return False.

    What an elastic job does not survive, init() has said.

    Raises:
        ConfigError: a layer of the job, such as parameter servers, can go on in no other view.
    """
    global _has_warned  # noqa: PLW0603 - once per process
    world = current()
    assert world is not None
    if world.membership is not None:
        world.engine.extensions.require_view(what)
        return True
    if world.engine.job_rank == 0 and not _has_warned and (text := world.gap_text(what)):
        _has_warned = True
        _log.warning("%s", text)
    return False


def _run(train: Callable[[], R], state: State, *, is_elastic: bool) -> R:
    results: list[R] = []
    begin: Callable[[], None] = functools.partial(_begin, state, is_elastic)
    is_newcomer = False  # until it has the state of the job
    loss: tuple[float, RingcommError] | None = None  # since when, and why, there is a new view
    while True:
        try:
            if is_elastic and is_outside():
                state.forget_commits()
                is_newcomer = True
                if not take_place():
                    end_outside()  # what follows in the program is for the ranks of the job
                begin = functools.partial(_resume, state, is_newcomer=True)
            begin()
            _record_view(loss, state, is_newcomer=is_newcomer)
            is_newcomer, loss = False, None
            results[:] = [train()]
            if is_elastic:
                finish_run()
            break
        except HostsUpdatedInterrupt as interrupt:
            begin = functools.partial(_begin_again, state, interrupt.skip_sync)
        except Exception as error:
            end = end_of_view(error) if is_elastic else None
            if end is None:
                _stop_if_given_up(error, state)
                raise
            since = time.monotonic()
            if not _heal(end, state):
                break
            _clear_locals(error)
            loss = loss or (since, end.with_traceback(None))
            del end
            begin = functools.partial(_resume, state, is_newcomer=is_newcomer)
    return results[0]


def _record_view(
    loss: tuple[float, RingcommError] | None, state: State, *, is_newcomer: bool
) -> None:
    """Record, on one rank, that the job goes on in a new view: who was lost, and for how long."""
    if is_newcomer:
        record_event("spare", f"this process takes a place, as rank {rank()} of {size()}")
    if loss is None or rank() != 0:
        return
    since, error = loss
    world, _ = elastic_world()
    view = f"view {world.transport.view.number}: {size()} ranks go on"
    if isinstance(error, PeerFailedError):
        after = f"{time.monotonic() - since:.2f} s after rank {error.rank} {error.reason}"
        record_event("recovery", f"{view} {after}, from commit {state.n_commits}")
    else:
        record_event("view", f"{view} after {time.monotonic() - since:.2f} s")


def _begin(state: State, is_elastic: bool) -> None:
    if is_elastic:
        take_missed_commands(in_new_view=False)
    state.sync()


def _resume(state: State, *, is_newcomer: bool) -> None:
    refuse_newcomers(state, is_newcomer=is_newcomer)
    has_enough = await_enough_ranks()
    begin_in_new_view()
    state.resume()
    state.on_reset()
    if not has_enough:
        _save(state)
        end_with_others()
        raise SystemExit(TOO_FEW)


def _heal(end: RingcommError, state: State) -> bool:
    try:
        return heal(end)
    except CommTimeoutError as error:
        _stop_if_given_up(error, state)
        raise


def _stop_if_given_up(error: Exception, state: State) -> None:
    """If others do not come, go back to the last commit, save a checkpoint, and end with 75."""
    cause = _cause_of(error)
    if not isinstance(cause, CommTimeoutError) or not is_given_up(cause):
        return
    is_late = rank() in cause.missing  # the others go on, as far as they can
    who = "This rank, for which others have waited," if is_late else "The job"
    if state.has_commit:
        _log.error("%s %s ends with a checkpoint: start it again to go on", cause, who)
        state.restore()
        _save(state)
    else:
        _log.error("%s %s ends before its first commit: start it again", cause, who)
    if not is_late:
        end_with_others(cause.missing)
    raise SystemExit(TOO_FEW)


def _save(state: State) -> None:
    for save in PROGRAM.checkpoints:
        save(PROGRAM.n_steps or state.n_commits)


def _begin_again(state: State, skip_sync: bool) -> None:
    state.begin_again(skip_sync=skip_sync)
    state.on_reset()


def _clear_locals(error: BaseException | None) -> None:
    """Drop what the calls that have failed hold, such as a DistributedDataParallel with its hooks.

    The error lives on: it is the one of all handles of the old view.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def leave() -> NoReturn:
    """Leave the job for good; the others go on without this rank. Ends this program, with code 0.

    Call it after commit(), on the ranks that are to go. It returns when the others have seen that
    this rank leaves, which is in their next operation; they go on from their last commit.

    Raises:
        RingcommError: the job is not elastic, or its launcher would end the others, too.
        SystemExit: always, at the end.
    """
    world = current()
    if world is None or world.membership is None:
        raise RingcommError(
            "elastic.leave: the others could not go on without this rank. Start the job by "
            "`ringcomm run --elastic MIN:MAX`, and call this after init()"
        )
    if not world.survives_deaths and (text := world.gap_text("elastic.leave")):
        raise RingcommError(text)
    shutdown()
    raise SystemExit(0)


def request_scale(n: int) -> None:
    """Resize the job to n ranks, from the next commit of rank 0 on; any rank may call this.

    More ranks come from the reserves (RINGCOMM_RESERVES), which run the program up to elastic.run
    first, while the others train on. If there are to be fewer, the last ranks wait in elastic.run,
    and may come back.

    Raises:
        ValueError: n is more than the processes of the job, or less than RINGCOMM_ELASTIC_MIN.
        ConfigError: the job has had as many changes as init() has prepared for.
        ConfigError: or it has parameter servers.
        RingcommError: the job is not elastic.
    """
    request_size(n)


def end_of_view(error: Exception) -> RingcommError | None:
    """Return why the view of this rank ends; None: it does not, and the error is the program's.

    The ranks that hang are killed.
    """
    world = current()
    if world is None or not world.heals or isinstance(error, ServerLostError):
        return None
    cause = _cause_of(error)
    if isinstance(cause, NewViewInterrupt):
        return cause
    if isinstance(cause, CommTimeoutError):
        return cause if evict(cause) else None
    if isinstance(cause, PeerFailedError) and cause.view == world.transport.view.number:
        return cause
    return None


def _cause_of(error: Exception) -> Exception | None:
    """Return the error that ended an operation, also if DistributedDataParallel has hidden it.

    That raises RuntimeError: errors that pass through C++ keep only their text.
    """
    names = (PeerFailedError.__name__, CommTimeoutError.__name__)
    if type(error) is RuntimeError and any(name in str(error) for name in names):
        world = current()
        return None if world is None else world.engine.state.error
    return error


def refuse_newcomers(state: State, *, is_newcomer: bool) -> None:
    """Return once it is known that all newcomers to the view have the outline of the job's state.

    Others run another program, or with other arguments: in sync() their calls would not match those
    of the ranks, which would all end with an error. So a newcomer ends, and the ranks go on without
    it, as after a loss. Collective over the view.

    Raises:
        RingcommError: on a newcomer whose state has another outline.
        PeerFailedError: on the ranks, which go on without it.
    """
    outline = outline_of(state)
    mine = np.array([[is_newcomer, zlib.crc32(repr(sorted(outline.items())).encode())]], np.int64)
    ranks = collectives.allgather(mine, name="elastic newcomers").tolist()
    members = [r for r, (is_new, _) in enumerate(ranks) if not is_new]
    if not members or all(each == ranks[members[0]][1] for is_new, each in ranks if is_new):
        return
    wanted = collectives.broadcast_object(outline, members[0], name="elastic outline")
    problem = differences(outline, wanted) if is_newcomer else ""
    problems = collectives.allgather_object(problem, name="elastic refusals")
    refused = [r for r, each in enumerate(problems) if each]
    world, _ = elastic_world()
    if problem:
        withdraw(world)  # nobody waits for the end of this process
        raise RingcommError(
            f"elastic.run: {world.transport.label(rank())} gets no place, for its state is not "
            f"that of the job: {problem}. Start all processes with the same program and arguments"
        )
    if not refused:
        return
    if rank() == members[0]:
        for each in refused:
            _log.warning(
                "elastic.run: %s gets no place, for its state is not that of the job: %s. The job "
                "goes on without it",
                world.transport.label(each),
                problems[each],
            )
    collectives.barrier(name="elastic: who was refused is lost")


def outline_of(state: State) -> _Outline:
    """Return what must be the same of the states of all processes: names, shapes and the like.

    Of the values that a commit keeps; a program may set other attributes.
    """
    found = {"its class": type(state).__qualname__}
    file = next((each for each in vars(state).values() if isinstance(each, KeptFile)), None)
    found["the path of keep_in()"] = "none" if file is None else file.given
    if state.COPIES and not state.has_commit:
        state.save()
    for name in (name for copies in state.COPIES for name in getattr(state, copies)):
        value = getattr(state, name, None)
        found.update(_outlines(name, value, has_arrays=isinstance(state, ArrayState)))
    return found


def _outlines(name: str, value: Any, *, has_arrays: bool) -> Iterable[tuple[str, str]]:
    if has_arrays and isinstance(value, np.ndarray):
        yield name, f"{value.dtype} {value.shape}"
    elif hasattr(value, "named_parameters") and hasattr(value, "named_buffers"):  # torch.nn.Module
        yield name, "a model"
        for inner, tensor in [*value.named_parameters(), *value.named_buffers()]:
            yield f"{name}.{inner}", f"{tensor.dtype} {tuple(tensor.shape)}"
    elif hasattr(value, "param_groups"):
        yield name, type(value).__qualname__  # which sends more in sync() if it shards its state
    else:
        yield name, "a value"


def differences(mine: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """Return what differs of two outlines, with both values; "" if nothing does."""
    texts = []
    for name in {**wanted, **mine}:
        here, there = mine.get(name, _LACKING), wanted.get(name, _LACKING)
        if here != there:
            texts.append(f"{name} is {here} here, and {there} in the job")
    more = f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return "; ".join(texts[:_SHOWN]) + more
