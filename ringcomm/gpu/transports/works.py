"""The works of a team, as data: reductions and moves; see the glossary. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ringcomm.arrays.base import Span
from ringcomm.arrays.dtypes import DType
from ringcomm.collectives.operators import Op, ReductionOptions
from ringcomm.transport.node import To


@dataclass(slots=True, eq=False)  # frozen ones take three times as long to make
class GpuReduce:
    """A reduction over the ranks of a team, as one rank sees it."""

    source: Span  # this rank's values
    target: Span | None  # memory for this rank's result, may be the source; None: no result
    op: Op
    to: To = To.ALL
    root: int = 0  # To.ROOT: the rank that gets the result
    parts: tuple[slice, ...] = ()  # To.OWNER: the elements that each rank gets, by rank
    is_deterministic: bool = False  # the values are combined in the order of ranks

    @property
    def dtype(self) -> DType:
        return self.source.dtype


@dataclass(frozen=True)
class Pull:
    """A copy of bytes [start, stop) of rank `source`'s source, to byte `at` of `dest`'s target."""

    source: int
    dest: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class GpuMove:
    """Copies of bytes from rank to rank, as one rank sees them."""

    source: Span | None  # bytes of this rank that others get; None: they get none
    target: Span | None  # where this rank gets bytes; None: it gets none
    pulls: tuple[Pull, ...]  # the pulls of all ranks, the same on each rank


Work = GpuReduce | GpuMove
_UNSCALED: Final = ReductionOptions()


@dataclass(slots=True, eq=False)
class Job:
    """A Work, with the copies that this rank makes before and after it, and the factors.

    `options.own_prescale` is the factor of `buffer` before the work; it needs a buffer.
    `options.postscale` is the factor of the work's target after the work.
    """

    work: Work
    packed: Sequence[Span] = ()  # arrays copied to `buffer` before the work, without gaps
    unpacked: Sequence[Span] = ()  # arrays copied from `buffer` after the work
    buffer: Span | None = None  # source of the work; None: nothing is copied
    options: ReductionOptions = _UNSCALED  # all ranks load the kernels of these factors
