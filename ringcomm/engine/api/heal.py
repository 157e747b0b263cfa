"""Goes on after the loss of ranks: the others agree on the next view, and begin to work in it."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ringcomm.config import Settings
from ringcomm.engine.api.world import World, begin_view, current, engine_for
from ringcomm.engine.core.lifecycle import end_view
from ringcomm.errors import CommTimeoutError, PeerFailedError, RingcommError
from ringcomm.transport.group_members import ranks_text
from ringcomm.transport.membership.machine import Cleared, Finish, Heal, Leave, Phase, Withdraw

if TYPE_CHECKING:
    from ringcomm.transport.membership.service import MembershipService

_log = logging.getLogger("ringcomm")
_NAP_S, _LONGEST_NAP_S = 50e-6, 1e-3


def heal(error: PeerFailedError) -> bool:
    """Return True once this rank works in the next view, False if the run is over instead.

    All live ranks of the view call this when an operation has failed with `error`. rank() and
    size() change in here and nowhere else.

    Raises:
        CommTimeoutError: a rank has not come within RINGCOMM_TIMEOUT_S. The others go on without
            this rank, which must end.
        RingcommError: more ranks are lost than init() has prepared for.
    """
    world, membership = _elastic_world()
    while True:
        run, presence = membership.state.run, world.presence
        end_view(world.engine, error)
        world.transport.stop()
        _agree(world, membership)
        world.transport.forget_steps()
        world.transport.bury()
        if membership.state.run > run:
            return False
        view = membership.state.view
        if view.number >= len(presence.lines):
            raise RingcommError(
                f"the job has lost {view.number} ranks, and init() was prepared for "
                f"{len(presence.lines) - 1}: set RINGCOMM_ELASTIC_LOSSES to more. End this job"
            )
        presence.views.append(view)
        world = _in_next_view(world)
        try:
            begin_view(world)
        except PeerFailedError as another:
            error = another
        else:
            return True


def finish_run() -> None:
    """Return once all ranks of the view have called this: they are all done with their run.

    If one rank returns, all others that live do. Raises PeerFailedError if a rank is lost before
    it is done, and CommTimeoutError after RINGCOMM_TIMEOUT_S.
    """
    world, membership = _elastic_world()
    engine, run = world.engine, membership.state.run
    membership.handle(Finish())

    def is_enough() -> bool:
        state = membership.state
        return state.run > run or state.must_heal

    limit_s = engine.settings.timeout_or_inf
    engine.progress.run_until(is_enough, timeout_s=limit_s)
    state = membership.state
    if state.run > run:
        return
    ranks = [world.transport.view.members.index(number) for number in state.missing]
    if not state.must_heal:
        withdraw(world)
        raise CommTimeoutError(_text_of_wait("is done", world, ranks, limit_s), missing=ranks)
    reason = engine.watch.peers.dead.get(ranks[0], "is lost")
    raise PeerFailedError(
        f"elastic.run: {world.transport.label(ranks[0])} {reason}, before it was done",
        rank=ranks[0],
        reason=reason,
        view=world.transport.view.number,
    )


def announce_leave(world: World) -> None:
    """Tell the membership that this rank begins no operation any more: others heal without it."""
    if world.membership is not None:
        world.membership.handle(Leave())


def withdraw(world: World) -> None:
    """Tell the other ranks that this one takes part no more, so that nobody waits for it."""
    if world.membership is not None:
        world.membership.handle(Withdraw())


def _elastic_world() -> tuple[World, MembershipService]:
    world = current()
    assert world is not None
    assert world.membership is not None
    return world, world.membership


def _agree(world: World, membership: MembershipService) -> None:
    """Return once the next view is agreed on, or the run is over."""
    settings, presence = world.engine.settings, world.presence
    membership.handle(Heal())
    try:
        patience = _Patience(world, settings)
        nap_s = _NAP_S
        while membership.state.phase is Phase.HEALING:
            presence.look(at_once=True)
            if membership.must_clear:
                _clear_memory(world, membership)
                continue
            patience.check(membership)
            presence.parking.sleep(nap_s)
            nap_s = min(1.2 * nap_s, _LONGEST_NAP_S)
    except BaseException:
        withdraw(world)  # this rank does not count as one that has come
        raise


def _clear_memory(world: World, membership: MembershipService) -> None:
    membership.must_clear = False
    if world.transport.node is not None:
        world.transport.node.clear_all()
    membership.handle(Cleared())


def _in_next_view(world: World) -> World:
    from ringcomm.transport.mpi import MpiTransport

    is_native = world.transport.runner is not None
    transport = MpiTransport(world.presence, is_native=is_native)
    engine = engine_for(transport, world.engine.settings)
    return replace(world, engine=engine, transport=transport)


class _Patience:
    """The wait of a rank that heals: warns once, then raises CommTimeoutError."""

    def __init__(self, world: World, settings: Settings) -> None:
        self._world = world
        self._limit_s = settings.timeout_or_inf
        self._start = time.monotonic()
        self._warn_at = self._start + settings.stall_warning_or_inf

    def check(self, membership: MembershipService) -> None:
        now = time.monotonic()
        if now < min(self._warn_at, self._start + self._limit_s):
            return
        self._warn_at = math.inf
        ranks = [self._world.transport.view.members.index(n) for n in membership.state.missing]
        text = _text_of_wait("heals", self._world, ranks, now - self._start)
        if now >= self._start + self._limit_s:
            raise CommTimeoutError(text, missing=ranks)
        _log.warning("%s", text)


def _text_of_wait(what: str, world: World, ranks: list[int], waited_s: float) -> str:
    whom = f"ranks {ranks_text(ranks)} of view {world.transport.view.number}"
    if not ranks:
        whom = "the end of a rank that has failed"
    return (
        f"elastic.run: rank {world.transport.rank} {what} and has waited {waited_s:.1f} s for "
        f"{whom}. They may be busy, or hang; RINGCOMM_TIMEOUT_S ends this wait."
    )
