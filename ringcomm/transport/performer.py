"""The interface of an algorithm to its wire: move bytes between ranks, and combine them.

An algorithm touches memory through its performer alone, and never looks at the values. So the same
coroutine can be carried out step by step (ringcomm.transport.channel) or written down once, to be
run without Python (ringcomm.collectives.recording).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, Self

from ringcomm.arrays.base import Bytes, Flat
from ringcomm.transport.base import Request


class Reduction(Protocol):
    """How values are combined; see ringcomm.collectives.op.Op."""

    @property
    def kernel(self) -> int:
        """Code of the reduction kernels."""
        ...

    def divisor(self, size: int) -> int:
        """Return what the combination of `size` ranks' values is divided by at the end."""
        ...


class Performer(ABC):
    """Carries out what one rank does in one algorithm, or notes it for later.

    Attributes:
        rank: index of this rank in the group.
        size: of the group.
    """

    rank: int
    size: int

    @property
    @abstractmethod
    def nodes(self) -> tuple[int, ...]:
        """For each rank of the group, a number that identifies its node."""

    @abstractmethod
    def among(self, ranks: Sequence[int]) -> Self:
        """Return this as some of its ranks see it, numbered by their place in `ranks`.

        It shares the tag: between two ranks messages arrive in the order they were sent, whichever
        view they were sent through. So algorithms may follow each other on several views if each
        receives all that was sent to it, and any two ranks that meet in several of them do so in
        the same order.

        Args:
            ranks: of the group, this one among them; the same on all of them.
        """

    @abstractmethod
    def isend(self, data: Bytes, dest: int) -> Request:
        """Start to send `data`, which must not change until wait() has returned."""

    @abstractmethod
    def irecv(self, out: Bytes, source: int) -> Request:
        """Start to receive exactly out.nbytes bytes."""

    @abstractmethod
    async def wait(self, *requests: Request) -> None:
        """Return when all requests are complete; the operation ends here if they never will be."""

    @abstractmethod
    def scratch(self, like: Flat, count: int) -> Flat:
        """Return `count` uninitialised elements that live as long as the algorithm runs."""

    @abstractmethod
    def copy(self, out: Flat, x: Flat) -> None:
        """Set out to x."""

    @abstractmethod
    def combine(self, total: Flat, x: Flat, op: Reduction) -> None:
        """Set total to total op x, element by element. Not for 16-bit floats."""

    @abstractmethod
    def divide(self, total: Flat, divisor: int) -> None:
        """Divide each element; integers truncate toward zero. Not for 16-bit floats."""

    @abstractmethod
    def combine_rounded(self, out: Flat, sources: list[Flat], op: Reduction, divisor: int) -> None:
        """Set out to ((sources[0] op sources[1]) op ...) / divisor, in float32, rounded once."""

    async def exchange(self, data: Bytes, dest: int, out: Bytes, source: int) -> None:
        """Send to one rank while receiving from another; return when both are done."""
        await self.wait(self.irecv(out, source), self.isend(data, dest))

    def finish(self, total: Flat, op: Reduction, size: int) -> None:
        """Turn the combination of `size` ranks' values into what `op` asks for.

        To be called by the one owner of each element.
        """
        if op.divisor(size) != 1:
            self.divide(total, op.divisor(size))

    def combine_all(self, out: Flat, sources: list[Flat], op: Reduction) -> None:
        """Set out to ((sources[0] op sources[1]) op ...), finished; out may be one of the sources.

        The order is that of the list: the same bits whatever the size of the buffers. sources[0] is
        overwritten.
        """
        if out.dtype.is_16bit_float:
            self.combine_rounded(out, sources, op, op.divisor(len(sources)))
            return
        total = sources[0]
        for source in sources[1:]:
            self.combine(total, source, op)
        self.finish(total, op, len(sources))
        if total is not out:
            self.copy(out, total)
