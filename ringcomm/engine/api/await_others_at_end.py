"""Ends this program no earlier than those of the other ranks, which may still save their work."""

from __future__ import annotations

import time
from collections.abc import Iterable

from ringcomm.engine.api.world import World
from ringcomm.status.page_enums import PageState

_NAP_S = 10e-3


def await_others_at_end(world: World, processes: Iterable[int], limit_s: float) -> frozenset[int]:
    """Return once these processes of this node are at their end, as this one is; or after limit_s.

    Returns those that are not at their end. Open MPI's mpirun ends all processes of a job when half
    of them have exited with another code than 0, also with `--with-ft ulfm` (measured with 5.0.11).
    """
    presence, awaited = world.presence, frozenset(processes)
    world.transport.page.set_state(PageState.LEAVING)
    end = time.monotonic() + limit_s
    while True:
        left = frozenset(n for n in awaited & presence.near if not presence.is_at_end(n))
        if not left or time.monotonic() >= end:
            return left
        presence.look(at_once=True)
        presence.parking.sleep(_NAP_S)
