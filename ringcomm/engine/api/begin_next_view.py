"""Goes on after ranks are lost or come: all agree on the next view, and begin to work in it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ringcomm.config import Settings
from ringcomm.engine.api.await_others_at_end import await_others_at_end
from ringcomm.engine.api.world import World, begin_view, current, engine_for
from ringcomm.engine.core.current_engine import engine, has_engine
from ringcomm.engine.core.meet_and_leave import end_view
from ringcomm.errors import CommTimeoutError, NewViewInterrupt, PeerFailedError, RingcommError
from ringcomm.ranks_as_text import ranks_text
from ringcomm.transport.membership.events_and_actions import (
    Cleared,
    EvictRanks,
    Finish,
    GiveUp,
    Heal,
    Leave,
    Withdraw,
)
from ringcomm.transport.membership.state_machine import Phase
from ringcomm.transport.membership.view import Eviction, eviction

if TYPE_CHECKING:
    from ringcomm.transport.membership.service import MembershipService

_log = logging.getLogger("ringcomm")
_NAP_S, _LONGEST_NAP_S = 50e-6, 1e-3
OTHERS_END = "a rank has waited in vain for others, which may live, so that nobody may go on"


def heal(error: RingcommError) -> bool:
    """Return False if the run is over; else True, once this rank works in the next view.

    All live ranks of the view call this when an operation has failed with `error`, or when ranks
    are to join or to leave; it returns True, too, if the next view has no place for this rank.
    rank() and size() change in here and in take_place(), and nowhere else.

    Raises:
        CommTimeoutError: a rank has not come within RINGCOMM_TIMEOUT_S. The others go on without
            this rank, which must end; see is_given_up().
        RingcommError: more ranks are lost than init() has prepared for, or a layer cannot go along.
    """
    world, membership = elastic_world()
    world.engine.extensions.require_view("another view")
    while True:
        run = membership.state.run
        end_view(world.engine, error)
        world.transport.stop()
        _agree(world, membership)
        world.transport.forget_steps()
        world.transport.bury()
        if not membership.state.is_member:
            return True
        if membership.state.run > run:
            return False
        world = in_next_view(world, membership)
        try:
            begin_view(world)
        except CommTimeoutError as another:
            if not evict(another):
                raise
            error = another
        except PeerFailedError as another:
            error = another
        else:
            return True


def ranks_to_stay(n: int) -> int:
    world = current()
    return n if world is None or world.membership is None else min(n, world.membership.state.size)


def stop_for_another_size(least: int = 1) -> None:
    """Raise NewViewInterrupt on rank 0 if ranks are to join the view, or to leave it.

    least: not if fewer ranks would be left.
    """
    world = current()
    if world is None or world.membership is None or world.transport.rank != 0:
        return
    state = world.membership.state
    if state.wants_another_size and state.is_member and state.size >= least:
        raise NewViewInterrupt("elastic.run: ranks are to join the job, or to leave it")


def evict(error: CommTimeoutError) -> bool:
    """Kill the ranks for which an operation has waited in vain, if the user wants that.

    Return False if that is not to be, or may not be (eviction()). In the second case the job ends,
    or this rank does if others have waited for it; see is_given_up().
    """
    world, membership = elastic_world()
    view, state = world.transport.view, world.engine.state
    waits_in_vain = state.is_broken or membership.state.phase is Phase.FINISHING
    if not (world.engine.settings.kills_hanging_ranks and waits_in_vain and error.missing):
        return False
    if world.transport.rank in error.missing:
        withdraw(world)
        return False
    processes = frozenset(view.members[rank] for rank in error.missing)
    may = eviction(processes, view.members, world.presence.near)
    if may is not Eviction.NOW and _await_end_of_any(world, membership, processes):
        return True  # some of them only waited for the others, and have had those killed
    if may is Eviction.NEVER or membership.state.phase is Phase.GONE:
        _log.error("%s The job ends, because half of its ranks or more do not come.", error)
        membership.handle(GiveUp())
        return False
    membership.handle(EvictRanks(processes))
    return True


def is_given_up(error: Exception) -> bool:
    """Return True if this rank ends because others do not come, and the user limits such waits.

    If those others may live, on a host that cannot be reached, or as half of the job or more, no
    part of the job goes on. If they have waited for this rank, they do.
    """
    world = current()
    if world is None or world.membership is None or not isinstance(error, CommTimeoutError):
        return False
    is_over = world.membership.state.phase is Phase.GONE
    return world.engine.settings.kills_hanging_ranks and is_over


def end_with_others(missing: Iterable[int] = ()) -> None:
    """Return once the ranks of this host are at their end, too, or have had time for that.

    They have as long as any wait may take. Then those of them are killed that are `missing`, so
    that the job ends.
    """
    world, membership = elastic_world()
    members = world.transport.view.members
    left = await_others_at_end(world, members, world.engine.settings.timeout_or_inf)
    membership.to_kill |= left.intersection(members[rank] for rank in missing)
    world.presence.look(at_once=True)


def _await_end_of_any(
    world: World, membership: MembershipService, processes: frozenset[int]
) -> bool:
    """Return True once one of these processes has ended, False after RINGCOMM_GRACE_S."""
    end = time.monotonic() + world.engine.settings.grace_s
    while time.monotonic() < end and membership.state.phase is not Phase.GONE:
        if processes & membership.state.changes.lost:
            return True
        world.presence.look(at_once=True)
        world.presence.parking.sleep(_LONGEST_NAP_S)
    return False


def finish_run() -> None:
    """Return once all ranks of the view have called this: they are all done with their run.

    If one rank returns, all others that live do. Raises PeerFailedError if a rank is lost before
    it is done, and CommTimeoutError after RINGCOMM_TIMEOUT_S.
    """
    world, membership = elastic_world()
    engine, run = world.engine, membership.state.run
    membership.handle(Finish())

    def is_enough() -> bool:
        state = membership.state
        return state.run > run or state.must_heal or state.phase is Phase.GONE

    limit_s = engine.settings.timeout_or_inf
    engine.progress.run_until(is_enough, timeout_s=limit_s)
    state = membership.state
    if state.run > run:
        return
    _refuse_if_others_end(membership)
    ranks = [world.transport.view.members.index(number) for number in state.missing]
    if not state.must_heal:
        if not engine.settings.kills_hanging_ranks:
            withdraw(world)
        raise CommTimeoutError(
            _text_of_wait("is done", world, state.missing, limit_s), missing=ranks
        )
    reason = engine.watch.peers.dead.get(ranks[0], "is lost")
    raise PeerFailedError(
        f"elastic.run: {world.transport.label(ranks[0])} {reason}, before it was done",
        rank=ranks[0],
        reason=reason,
        view=world.transport.view.number,
    )


def require_all_live() -> None:
    """Raise PeerFailedError if this rank has heard that a member of the view is lost. Local."""
    world = current()
    if world is None or world.membership is None or not world.membership.state.has_new_loss:
        return
    view, lost = world.transport.view, world.membership.state.changes.lost
    rank = next(rank for rank, number in enumerate(view.members) if number in lost)
    reason = world.engine.watch.peers.dead.get(rank, "is lost")
    raise PeerFailedError(
        f"elastic: {world.transport.label(rank)} {reason}",
        rank=rank,
        reason=reason,
        view=view.number,
    )


def await_streams() -> None:
    """Return once what operations have left on streams of GPUs is done. Local.

    A collective on a GPU returns before its result is there. If a rank dies meanwhile, streams go
    on, and what they then hold must not be kept as the result of a step.

    Raises:
        PeerFailedError, CommTimeoutError: an operation failed there; its result is worthless.
    """
    if has_engine():
        engine().completion.await_streams()


def announce_leave(world: World) -> None:
    if world.membership is not None:
        world.membership.handle(Leave())


def withdraw(world: World) -> None:
    if world.membership is not None:
        world.membership.handle(Withdraw())


def elastic_world() -> tuple[World, MembershipService]:
    world = current()
    assert world is not None
    assert world.membership is not None
    return world, world.membership


def _agree(world: World, membership: MembershipService) -> None:
    """Return once the next view is agreed on, or the run is over."""
    settings, presence = world.engine.settings, world.presence
    membership.handle(Heal())
    try:
        patience = _HealingWait(world, settings)
        nap_s = _NAP_S
        while membership.state.phase is Phase.HEALING and membership.state.is_member:
            presence.look(at_once=True)
            if membership.must_clear:
                clear_memory(world, membership)
                continue
            patience.check(membership)
            presence.parking.sleep(nap_s)
            nap_s = min(1.2 * nap_s, _LONGEST_NAP_S)
        _refuse_if_others_end(membership)
    except BaseException:
        withdraw(world)  # this rank does not count as one that has come
        raise


def _refuse_if_others_end(membership: MembershipService) -> None:
    if membership.state.phase is Phase.GONE:
        raise CommTimeoutError(f"elastic.run: {OTHERS_END}.")


def clear_memory(world: World, membership: MembershipService) -> None:
    membership.must_clear = False
    world.transport.clear_memory()
    membership.handle(Cleared())


def in_next_view(world: World, membership: MembershipService) -> World:
    from ringcomm.transport.mpi import MpiTransport

    view, presence = membership.state.view, world.presence
    if view.number >= len(presence.lines):
        raise RingcommError(
            f"{membership.state.changes}, and init() was prepared for {presence.n_losses}: set "
            "RINGCOMM_ELASTIC_LOSSES to more. End this job"
        )
    presence.views.append(view)
    is_native = world.transport.runner is not None
    transport = MpiTransport(world.presence, is_native=is_native)
    engine = engine_for(transport, world.engine.settings)
    return world._replace(engine=engine, transport=transport)


class _HealingWait:
    """The wait of a rank that heals: warns once, then kills who hangs, or raises an error.

    It begins anew when others come or are awaited: those that make progress do not hang.
    """

    def __init__(self, world: World, settings: Settings) -> None:
        self._world = world
        self._settings = settings
        self._has_evicted, self._is_late = False, False
        self._start = time.monotonic()
        self._warn_at = self._start + settings.stall_warning_or_inf
        self._limit_at = self._start + settings.timeout_or_inf
        self._missing: tuple[int, ...] = ()

    def check(self, membership: MembershipService) -> None:
        now, missing = time.monotonic(), membership.state.missing
        if missing != self._missing:
            self._missing, self._has_evicted, self._is_late = missing, False, False
            self._limit_at = now + self._settings.timeout_or_inf
        if now < min(self._warn_at, self._limit_at):
            return
        if now >= self._limit_at and self._evicts(membership, frozenset(missing), now):
            return
        self._warn_at = math.inf
        text = _text_of_wait("heals", self._world, missing, now - self._start)
        if now >= self._limit_at:
            if self._settings.kills_hanging_ranks:
                membership.handle(GiveUp())
            ranks = [self._world.transport.view.rank_of(number) for number in missing]
            raise CommTimeoutError(text, missing=[rank for rank in ranks if rank is not None])
        _log.warning("%s", text, extra={"event": "stall"})

    def _evicts(self, membership: MembershipService, missing: frozenset[int], now: float) -> bool:
        """Return False if this rank must give up; else it has had others killed, or will soon."""
        if not missing or self._has_evicted or not self._settings.kills_hanging_ranks:
            return False
        state = membership.state
        live = [m for m in state.view.members if m == state.me or m in state.colleagues]
        may = eviction(missing, live, self._world.presence.near)
        if may is Eviction.NEVER:
            return False
        if may is Eviction.IF_UNHARMED and not self._is_late:
            self._is_late, self._limit_at = True, now + self._settings.grace_s
            return True
        self._has_evicted = True
        self._limit_at = now + self._settings.timeout_or_inf  # who can be killed is by then
        membership.handle(EvictRanks(missing))
        return True


def _text_of_wait(what: str, world: World, missing: Iterable[int], waited_s: float) -> str:
    view = world.transport.view
    ranks = [number for number in missing if number in view.members]
    spares = [number for number in missing if number not in view.members]
    parts = [f"ranks {ranks_text([view.members.index(n) for n in ranks])} of view {view.number}"]
    parts = (parts if ranks else []) + ([f"spares {ranks_text(spares)}"] if spares else [])
    return (
        f"elastic.run: rank {world.transport.rank} {what} and has waited {waited_s:.1f} s for "
        f"{' and '.join(parts) or 'the end of a rank that has failed'}. They may be busy, or hang; "
        f"{world.engine.settings.timeout_name} ends this wait."
    )
