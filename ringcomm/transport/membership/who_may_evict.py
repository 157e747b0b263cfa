"""The rule by which ranks that wait in vain may have others killed, so that they go on. Pure.

No rule here can let two parts of a job go on: a process counts as lost only when it has ended. The
rule keeps two parts that wait for each other from killing each other, so that one is left.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from enum import IntEnum


class Eviction(IntEnum):
    """The time at which ranks that wait in vain have the others killed."""

    NOW = 0
    IF_UNHARMED = 1  # after RINGCOMM_GRACE_S, in which the others would have killed them first
    NEVER = 2  # the job ends


def eviction(missing: Set[int], members: Sequence[int], near: Set[int]) -> Eviction:
    """Return what the members that are not missing may do to those that are.

    More than half of the members may kill the others, and so may half of them with the first. The
    other half may do so later, if it is on the host of all that it waits for: what cannot be
    reached may be well, and cannot be killed.

    Args:
        missing: processes for which the others wait; some may be no members, such as a spare.
        members: the members that live, in the order of their ranks.
        near: the processes on this host.
    """
    waiting = [each for each in members if each not in missing]
    lead = 2 * len(waiting) - len(members)
    if lead > 0 or (lead == 0 and waiting[:1] == list(members[:1])):
        return Eviction.NOW
    return Eviction.IF_UNHARMED if lead == 0 and missing <= near else Eviction.NEVER
