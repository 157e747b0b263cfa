"""Processes without a place in the job: reserves that sleep, and spares that wait for one."""

from __future__ import annotations

import logging
import math
import os
import time
from typing import NoReturn

from ringcomm.engine.api.await_others_at_end import await_others_at_end
from ringcomm.engine.api.begin_next_view import (
    OTHERS_END,
    clear_memory,
    elastic_world,
    in_next_view,
    withdraw,
)
from ringcomm.engine.api.world import World, begin_view, current
from ringcomm.errors import ConfigError, RingcommError
from ringcomm.status.page_enums import SPARE, OpState, PageState
from ringcomm.transport.membership.events_and_actions import (
    Arrive,
    Resize,
)
from ringcomm.transport.membership.state_machine import Membership, Phase

_log = logging.getLogger("ringcomm")
_NAP_S, _SLEEP_S = 1e-3, 10e-3
_LAST_WORDS_S = 1.0  # messages of a rank that has left in order come in this time


def sleep_until_needed() -> bool:
    """Return True once this process is to prepare for a place; False if the job is over before."""
    world, membership = elastic_world()
    orphans = _Orphans()
    # After the first run nobody gets a place. But who ends before the ranks leave does not call
    # MPI_Finalize, so a launcher that tolerates no death ends them, and MPI_Finalize may hang.
    while membership.state.run or not membership.state.is_needed:
        world.presence.look(at_once=True)
        if _is_over(membership.state):
            return False
        orphans.check(membership.state)
        world.presence.parking.sleep(_SLEEP_S)
    return True


def take_place() -> bool:
    """Return True once this process works in a view; False if the job is over before.

    Raises:
        RingcommError: all ranks are lost, and with them the state of the job.
        PeerFailedError: a rank is lost as the view begins.
    """
    world, membership = elastic_world()
    _show_idle(world)
    world.transport.stop()
    if membership.state.phase is Phase.OUTSIDE:
        membership.handle(Arrive())
    orphans = _Orphans()
    try:
        while not membership.state.is_member:
            world.presence.look(at_once=True)
            if membership.must_clear:
                clear_memory(world, membership)
                continue
            if _is_over(membership.state):
                return False
            orphans.check(membership.state)
            world.presence.parking.sleep(_NAP_S)
    except BaseException:
        withdraw(world)
        raise
    begin_view(in_next_view(world, membership))
    return True


def end_outside() -> NoReturn:
    """End the program of this process, which gets no place: the job is over, or a rank gave up."""
    world, membership = elastic_world()
    if membership.state.phase is not Phase.GONE:
        raise SystemExit(0)
    _log.error("elastic.run: %s. This process, without a place, ends, too", OTHERS_END)
    limit_s = 2 * world.engine.settings.timeout_or_inf  # of a checkpoint, and of those that hang
    await_others_at_end(world, membership.state.view.members, limit_s)
    raise SystemExit(os.EX_TEMPFAIL)


def leave_outside(world: World) -> bool:
    """End a process that has no place in the job; return True if MPI can be finalized."""
    assert world.membership is not None
    world.transport.page.set_state(PageState.LEAVING)
    is_clean = world.membership.state.is_job_over and not world.presence.deaths
    if not is_clean:
        withdraw(world)
    world.transport.close(is_clean=is_clean)
    if not is_clean:
        world.transport.page.set_state(PageState.LEFT)  # nobody waits for MPI_Finalize
    return is_clean


def request_size(n: int) -> None:
    """Resize the job to n ranks, from a commit on."""
    world = current()
    if world is None or world.membership is None:
        raise RingcommError(
            "elastic.request_scale: the number of ranks of this job cannot change. Start it by "
            "`ringcomm run --elastic MIN:MAX`, and call this after init()"
        )
    world.engine.extensions.require_view("elastic.request_scale")
    state, presence = world.membership.state, world.presence
    n_live = presence.size - len(state.changes.lost)
    least = world.engine.settings.elastic_min
    if not least <= n <= n_live:
        raise ValueError(
            f"elastic.request_scale({n}): it must be {least} (RINGCOMM_ELASTIC_MIN) to {n_live}, "
            "which is how many processes the job has. Start it with more RINGCOMM_RESERVES"
        )
    if n == state.size:  # another rank, or this one before a loss, has asked for it
        return
    if state.changes.number + 1 >= len(presence.lines):
        raise ConfigError(
            f"elastic.request_scale({n}): {state.changes}, and init() was prepared for "
            f"{presence.n_losses}: set RINGCOMM_ELASTIC_LOSSES to more"
        )
    world.membership.handle(Resize(n))


def _show_idle(world: World) -> None:
    page = world.transport.page
    page.set_role(SPARE)
    page.set_state(PageState.STARTING)
    page.end_op(OpState.IDLE)


def _is_over(state: Membership) -> bool:
    return state.is_job_over or state.phase is Phase.GONE


class _Orphans:
    """Ends the wait of a process that waits for ranks which are all lost."""

    def __init__(self) -> None:
        self._since = math.inf

    def check(self, state: Membership) -> None:
        now = time.monotonic()
        self._since = min(self._since, now) if state.is_orphaned else math.inf
        if now > self._since + _LAST_WORDS_S:
            raise RingcommError(
                "elastic.run: all ranks that had the state of the job are lost, and only spares "
                "are left. Start the job again from a checkpoint"
            )
