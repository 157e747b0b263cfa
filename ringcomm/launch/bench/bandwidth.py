"""What each collective moves: its buffers, and nccl-tests' definitions of bandwidth. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Collective:
    """How a collective is measured.

    Attributes:
        name: as in ringcomm.
        is_reduction: it takes an operator.
        has_in_place: ringcomm has a form that overwrites its argument.
        has_parts: its buffer consists of one equal part per rank.
        gives_part: each rank passes in one part, not the whole buffer.
        takes_part: each rank gets one part, not the whole buffer.
    """

    name: str
    is_reduction: bool = False
    has_in_place: bool = False
    has_parts: bool = False
    gives_part: bool = False
    takes_part: bool = False


COLLECTIVES: Final = {
    each.name: each
    for each in (
        Collective("allreduce", is_reduction=True, has_in_place=True),
        Collective("reduce", is_reduction=True, has_in_place=True),
        Collective(
            "reduce_scatter",
            is_reduction=True,
            has_in_place=True,
            has_parts=True,
            takes_part=True,
        ),
        Collective("allgather", has_parts=True, gives_part=True),
        Collective("broadcast", has_in_place=True),
        Collective("gather", has_parts=True, gives_part=True),
        Collective("scatter", has_parts=True, takes_part=True),
        Collective("alltoall", has_parts=True),
        Collective("barrier"),
    )
}


def total_count(collective: Collective, nbytes: int, itemsize: int, size: int) -> int:
    """Return the elements of a buffer of about `nbytes`: whole parts, at least one element each.

    "The size" of a collective with parts is that of all of them, as in nccl-tests.
    """
    if collective.name == "barrier":
        return 0
    count = max(nbytes // itemsize, 1)
    return max(count // size, 1) * size if collective.has_parts else count


def bus_factor(collective: str, size: int) -> float:
    """Return busbw / algbw: what the busiest link carries per byte of the buffer (nccl-tests).

    So busbw compares with the hardware's bandwidth whatever the number of ranks.
    """
    if collective == "allreduce":
        return 2 * (size - 1) / size
    if COLLECTIVES[collective].has_parts:
        return (size - 1) / size
    return 1.0


def wire_bytes(collective: str, nbytes: int, *, hosts: int, ranks: int) -> float:
    """Return the least that must cross the link of the busiest host, each way.

    An algorithm may send more: then wire bytes / time is further from the link's speed, which is
    what one wants to see.
    """
    if hosts == 1 or collective == "barrier":
        return 0.0
    if collective == "alltoall":  # each rank has its own buffer for all others
        return ranks / hosts * nbytes * (hosts - 1) / hosts
    return bus_factor(collective, hosts) * nbytes
