"""The protocol of a GPU transport, and the works that it carries out. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ringcomm.arrays.base import Span
from ringcomm.arrays.dtypes import DType
from ringcomm.collectives.op import Op
from ringcomm.gpu.kernels.kernel import Argument
from ringcomm.gpu.kernels.update import Rule
from ringcomm.transport.node import To


@dataclass(frozen=True)
class Reduce:
    """A reduction over the ranks of a team, as one of them sees it."""

    source: Span  # this rank's values
    target: Span | None  # where its result goes; may be the source; None if it gets none
    op: Op
    to: To = To.ALL
    root: int = 0  # the rank that gets the result, for To.ROOT
    parts: tuple[slice, ...] = ()  # of each rank: its part of the elements, for To.OWNER
    is_deterministic: bool = False  # values are to be combined in the order of ranks

    @property
    def dtype(self) -> DType:
        """Of the elements."""
        return self.source.dtype


@dataclass(frozen=True)
class Pull:
    """Bytes [start, stop) of rank `source`'s source go to `dest`, to its target at `at`."""

    source: int
    dest: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class Move:
    """Bytes that go from rank to rank, as one of them sees it."""

    source: Span | None  # this rank's bytes; None: it gives none
    target: Span | None  # where those that it gets go; None: it gets none
    pulls: tuple[Pull, ...]  # of all ranks, alike on all


@dataclass(frozen=True)
class UpdatePiece:
    """Elements [start, stop) of the weights, which this rank updates with one set of numbers.

    Attributes:
        owned: float32 arrays of as many elements, this rank's alone: master weights, then the
            rule's states.
        numbers: of the rule, for this step; see kernels/update.py.
    """

    start: int
    stop: int
    owned: tuple[Span, ...]
    rule: Rule
    numbers: Argument


@dataclass(frozen=True)
class Update:
    """A step of an optimizer whose state is spread over the ranks: reduce, update, push, in one.

    Every element is read from the gradients of all ranks, summed in float32 in rank order, scaled,
    and its new weight is written to all ranks, by the one that owns it.
    """

    source: Span  # this rank's gradients
    target: Span  # this rank's weights, all of them, updated by whoever owns them
    pieces: tuple[UpdatePiece, ...]  # of this rank. Those of all ranks do not overlap.
    scale: float  # of the sum of gradients
    is_reduced: bool = False  # this rank's gradients are the sum already, where its pieces are


Work = Reduce | Move | Update


@dataclass(frozen=True)
class Job:
    """One operation's part of a stream: a Work, and the copies of this rank around it."""

    work: Work
    packed: Sequence[Span] = ()  # arrays that are copied first, one behind the other, into `buffer`
    unpacked: Sequence[Span] = ()  # arrays that are copied last, likewise, out of it
    buffer: Span | None = None  # of the work; None: nothing is packed


class GpuTransport(Protocol):
    """Carries out works among the ranks of a team, on one stream of each.

    Attributes:
        name: "nccl" or "ipc".
        stream: everything happens on it.
        meets_on_stream: where all ranks must meet, their streams do; else their hosts must.
    """

    name: str
    stream: int
    meets_on_stream: bool

    def outline(self, work: Work) -> bytes:
        """Return what the others need to know of this rank's part: as many bytes on each rank."""

    def phases(self, work: Work, outlines: Sequence[bytes]) -> Iterator[None]:
        """Put this rank's part on the stream; all ranks do so in the same order of works.

        Yields where all ranks must have come before any goes on. `outlines` are those of all ranks.
        """

    def meet(self) -> None:
        """Make the stream wait until those of all ranks are here; see meets_on_stream."""

    def release(self) -> None:
        """End all waits of the stream for other ranks; any thread, again and again."""

    @property
    def late(self) -> tuple[int, ...]:
        """Ranks of the team that this one's stream waits for, as far as it is known."""

    def scratch(self, nbytes: int) -> Span:
        """Return memory in which arrays can be fused; the stream may use it until the next call."""

    def close(self, *, is_clean: bool) -> None:
        """Free everything; `is_clean`: nothing is under way on any rank."""
