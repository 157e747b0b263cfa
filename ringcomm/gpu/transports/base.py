"""The protocol of a GPU transport, and the works that it carries out. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ringcomm.arrays.base import Span
from ringcomm.arrays.dtypes import DType
from ringcomm.collectives.operators import Op
from ringcomm.gpu.kernels.base import Argument, Kernel
from ringcomm.gpu.kernels.reduce_and_optimizer_step import Rule
from ringcomm.transport.node import To


@dataclass(frozen=True)
class Reduce:
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
        """The dtype of source and target."""
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
class Move:
    """Copies of bytes from rank to rank, as one rank sees them."""

    source: Span | None  # bytes of this rank that others get; None: they get none
    target: Span | None  # where this rank gets bytes; None: it gets none
    pulls: tuple[Pull, ...]  # the pulls of all ranks, the same on each rank


@dataclass(frozen=True)
class UpdatePiece:
    """Elements [start, stop) of the weights, which this rank updates with the same numbers.

    Attributes:
        owned: float32 arrays of stop - start elements that only this rank has: the master weights,
            then the states of the rule.
        numbers: parameters of the rule for this step; see kernels/reduce_and_optimizer_step.py.
    """

    start: int
    stop: int
    owned: tuple[Span, ...]
    rule: Rule
    numbers: Argument


@dataclass(frozen=True)
class Update:
    """A step of an optimizer whose state is sharded over the ranks, as one rank sees it.

    Each weight has one owner. The owner sums the gradients of all ranks in float32 in rank order,
    scales the sum, and writes the new weight to all ranks.
    """

    source: Span  # this rank's gradients
    target: Span  # this rank's copy of all weights, written by their owners
    pieces: tuple[UpdatePiece, ...]  # owned by this rank; no two ranks own the same element
    scale: float  # factor of the sum of gradients
    is_reduced: bool = False  # within `pieces`, the source is already the mean of all ranks


Work = Reduce | Move | Update


@dataclass(frozen=True)
class Job:
    """A Work, with the copies that this rank makes before and after it, and the factors."""

    work: Work
    packed: Sequence[Span] = ()  # arrays copied to `buffer` before the work, without gaps
    unpacked: Sequence[Span] = ()  # arrays copied from `buffer` after the work
    buffer: Span | None = None  # source of the work; None: nothing is copied
    prescale: float = 1.0  # factor of `buffer` before the work; needs a buffer
    postscale: float = 1.0  # factor of the work's target after the work


class GpuTransport(Protocol):
    """Carries out works among the ranks of a team; each rank uses one stream.

    Attributes:
        stream: the CUDA stream of this rank.
        meets_on_stream: the streams wait for each other; False: the hosts must do so.
        has_outlines: the ranks have to exchange outlines; False: these are empty, and kernels(work)
            are the same on all ranks.
    """

    stream: int
    meets_on_stream: bool
    has_outlines: bool

    def kernels(self, work: Work) -> Sequence[Kernel]:
        """Return the kernels of a work, to load them; their arguments do not matter."""

    def outline(self, work: Work) -> bytes:
        """Return what other ranks must know of this rank's part; equally long on all ranks."""

    def known_outline(self, work: Work) -> bytes | None:
        """Return outline(work) if it is known; None: it takes calls of CUDA, or a lock."""

    def phases(self, work: Work, outlines: Sequence[bytes]) -> Iterator[None]:
        """Enqueue this rank's part of a work; all ranks enqueue their works in the same order.

        All ranks have loaded kernels(work). Enqueues nothing before the first `next()`. Yields
        between phases: all ranks must have reached this point before any rank goes on.

        Args:
            work: the work, as this rank sees it.
            outlines: the results of outline(), by rank.
        """

    def meet(self) -> None:
        """Make the stream wait for the streams of all ranks, if meets_on_stream."""

    def release(self) -> None:
        """End all waits of the stream for other ranks. Any thread may call this, repeatedly."""

    @property
    def late(self) -> tuple[int, ...]:
        """Ranks of the team for which this rank's stream waits; empty if that is not known."""

    def scratch(self, nbytes: int) -> Span:
        """Return memory in which arrays can be fused; the stream may use it until the next call."""

    def close(self, *, is_clean: bool) -> None:
        """Free everything; `is_clean`: no rank has an operation under way."""
