"""Finds how this job was started, and which losses of ranks it therefore does not survive."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ringcomm.launched.launcher import is_by_srun, mpirun_command
from ringcomm.system_text import text_of
from ringcomm.transport.membership.launcher_fault_tolerance import Gap, Launch, gap_of

if TYPE_CHECKING:
    from ringcomm.transport.presence import Presence


def find_gap(presence: Presence) -> Gap | None:
    """Return what is not covered, None if nothing. In an elastic job, collective and the same."""
    launch = Launch(
        library=presence.implementation,
        size=presence.size,
        n_hosts=len(hosts_of(presence)),
        is_ulfm=presence.is_fault_tolerant,
        is_by_srun=is_by_srun(),
        mpirun=mpirun_command(),
    )
    gap = gap_of(launch)
    if presence.membership is not None:
        gap = presence.lines[0].data.bcast(gap)  # its first process is most often beside mpirun
    return gap


def hosts_of(presence: Presence) -> dict[str, int]:
    """Return how many processes there were on each host at first."""
    return dict(Counter(text_of(name) for name in presence.places["host"].tolist()))
