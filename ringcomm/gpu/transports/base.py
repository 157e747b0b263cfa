"""The protocol of a GPU transport, which carries out works. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from ringcomm.arrays.base import Span
from ringcomm.gpu.kernels.base import Kernel
from ringcomm.gpu.transports.works import Work


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
    def is_released(self) -> bool:
        """True once a rank has ended waits: what streams have done since may be worthless."""

    @property
    def late(self) -> tuple[int, ...]:
        """Ranks of the team for which this rank's stream waits; empty if that is not known."""

    def scratch(self, nbytes: int) -> Span:
        """Return memory in which arrays can be fused; the stream may use it until the next call."""

    def close(self, *, is_clean: bool) -> None:
        """Free everything; `is_clean`: no rank has an operation under way."""
