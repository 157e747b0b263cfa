"""The cases of `ringcomm bench`, and the bandwidths that nccl-tests defines. Pure."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Collective:
    is_reduction: bool = False
    has_in_place: bool = False  # ringcomm has a form that overwrites its argument
    has_parts: bool = False  # the buffer consists of one part per rank, of equal sizes
    gives_part: bool = False  # each rank passes one part, not the whole buffer
    takes_part: bool = False  # each rank gets one part, not the whole buffer


COLLECTIVES: Final = {
    "allreduce": Collective(is_reduction=True, has_in_place=True),
    "reduce": Collective(is_reduction=True, has_in_place=True),
    "reduce_scatter": Collective(
        is_reduction=True, has_in_place=True, has_parts=True, takes_part=True
    ),
    "allgather": Collective(has_parts=True, gives_part=True),
    "broadcast": Collective(has_in_place=True),
    "gather": Collective(has_parts=True, gives_part=True),
    "scatter": Collective(has_parts=True, takes_part=True),
    "alltoall": Collective(has_parts=True),
    "barrier": Collective(),
}


@dataclass(frozen=True)
class BenchCase:
    collective: str  # a key of COLLECTIVES; the root is rank 0
    op: str  # value of an rc.Op; "" if nothing is reduced
    dtype: np.dtype[Any]
    count: int  # elements of the whole buffer, with the parts of all ranks, as in nccl-tests
    size: int  # number of ranks

    @property
    def how(self) -> Collective:
        return COLLECTIVES[self.collective]

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    @property
    def part(self) -> int:
        return self.count // self.size


def make_case(collective: str, op: str, dtype: np.dtype[Any], nbytes: int, size: int) -> BenchCase:
    """Return the case of about `nbytes`; each rank's part has at least one element."""
    how = COLLECTIVES[collective]
    count = max(nbytes // dtype.itemsize, 1)
    if how.has_parts:
        count = max(count // size, 1) * size
    if collective == "barrier":
        count = 0
    return BenchCase(collective, op if how.is_reduction else "", dtype, count, size)


def bus_factor(collective: str, size: int) -> float:
    """Return busbw / algbw, as in nccl-tests: bytes on the busiest link per byte of the buffer."""
    if collective == "allreduce":
        return 2 * (size - 1) / size
    return (size - 1) / size if COLLECTIVES[collective].has_parts else 1.0


def wire_bytes(case: BenchCase, hosts: int) -> float:
    """Return the fewest bytes that an algorithm can send over the link of the busiest host."""
    if hosts == 1:
        return 0.0
    if case.collective == "alltoall":  # each rank has a whole buffer for the others
        return case.size / hosts * case.nbytes * (hosts - 1) / hosts
    return bus_factor(case.collective, hosts) * case.nbytes


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return the sizes of "64K", "8:256M", "8:256M:4", "1K,64K,1M" or a mixture, ascending.

    K is 1024. FIRST:LAST:FACTOR is a geometric range, whose factor is 2 by default.

    Raises:
        ArgumentTypeError: a part is not a size, or a range does not increase.
    """
    return tuple(sorted({size for part in text.split(",") for size in _range(part)}))


def _range(part: str) -> list[int]:
    first, *rest = part.split(":")
    start = _parse_bytes(first)
    stop = _parse_bytes(rest[0]) if rest else start
    factor = int(rest[1]) if len(rest) == 2 and rest[1].isdigit() else 2 * (len(rest) <= 1)
    if stop < start or factor < 2:
        raise ArgumentTypeError(
            f"{part!r} is no range of sizes: write FIRST:LAST or FIRST:LAST:FACTOR"
        )
    sizes = [start]
    while sizes[-1] * factor <= stop:
        sizes.append(sizes[-1] * factor)
    return sizes


def _parse_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    nbytes = int(match[1]) * _UNITS[match[2].upper()] if match else 0
    if nbytes == 0:
        raise ArgumentTypeError(f"{text!r} is no size: write 8, 64K, 1M or 2G")
    return nbytes
