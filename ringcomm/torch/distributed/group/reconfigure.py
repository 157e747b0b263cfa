"""c10d's reconfigure (torch 2.15): a process group goes on with the processes that live."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

from ringcomm.elastic.current_view_and_listeners import tell_listeners
from ringcomm.engine.api.begin_next_view import heal, require_all_live
from ringcomm.engine.api.world import World, current
from ringcomm.engine.control.commands_missed_in_a_loss import take_missed_commands
from ringcomm.errors import CommTimeoutError, ConfigError, PeerFailedError

_PREFIX = "ringcomm process "
_NAP_S = 1e-3


def own_handle() -> str:
    """Return the text that names this process to other ranks, in all views."""
    transport = _world().transport
    return f"{_PREFIX}{transport.view.members[transport.rank]}"


def go_on_with(handles: Collection[str], timeout_s: float) -> None:
    """Return once the view of this job has these processes, in this order. Collective among them.

    Args:
        handles: those of own_handle(); a set stands for the order of the view.
        timeout_s: how long to wait until the other processes of the view are lost.

    Raises:
        ValueError: a handle is none, or names no process of the view, or they are in another order.
        ConfigError: this job does not go on without lost ranks.
        CommTimeoutError: other processes of the view live.
        PeerFailedError: another process was lost in the new view: call this again without it.
    """
    wanted = [_process_of(handle) for handle in handles]
    deadline = time.monotonic() + timeout_s
    _world().engine.extensions.require_view("reconfigure")
    while True:
        world = _world()
        members = world.transport.view.members
        unknown = sorted(set(wanted) - set(members))
        if unknown:
            raise ValueError(
                f"reconfigure: the handles name processes {unknown}, and the job has {members} "
                "now: take the handles of ranks that live"
            )
        others = [rank for rank, number in enumerate(members) if number not in wanted]
        if not others:
            break
        heal(_wait_for_loss(world, others, deadline))
        take_missed_commands(in_new_view=True)
        tell_listeners()
    if not isinstance(handles, set | frozenset) and wanted != list(members):
        raise ValueError(
            f"reconfigure: the handles give the order {wanted}, but ranks keep theirs, which is "
            f"{list(members)}: pass the handles in that order, or as a set"
        )


def _process_of(handle: str) -> int:
    number = handle.removeprefix(_PREFIX)
    if number == handle or not number.isdecimal():
        raise ValueError(
            f"reconfigure: {handle!r} is no handle of dist._get_reconfigure_handle() of ringcomm"
        )
    return int(number)


def _wait_for_loss(world: World, others: Iterable[int], deadline: float) -> PeerFailedError:
    """Return the loss of a rank of the view, once one of the others is lost."""
    if not world.heals:
        raise ConfigError(world.gap_text("reconfigure"))
    while time.monotonic() < deadline:
        try:
            world.presence.look(at_once=True)
            require_all_live()
        except PeerFailedError as error:
            return error
        failure = world.engine.state.error
        if isinstance(failure, PeerFailedError) and failure.rank in others:
            return failure
        world.presence.parking.sleep(_NAP_S)
    ranks = list(others)
    raise CommTimeoutError(
        f"reconfigure: no handles of ranks {ranks} were passed, but they live. A process group of "
        "ringcomm is reconfigured to all processes that live: let these end, or wait for them",
        missing=ranks,
    )


def _world() -> World:
    world = current()
    if world is None:
        raise ConfigError("reconfigure: call torch.distributed.init_process_group() first")
    return world
