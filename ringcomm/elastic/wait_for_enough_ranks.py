"""Decides what an elastic job with too few ranks does: it waits for others, or ends."""

from __future__ import annotations

import logging
import time

import numpy as np

from ringcomm.engine.api import collectives
from ringcomm.engine.api.begin_next_view import elastic_world, stop_for_another_size

_log = logging.getLogger("ringcomm")
_NAP_S = 20e-3


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
