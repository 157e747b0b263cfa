"""The operations that an algorithm may use: move bytes between ranks, and combine them.

An algorithm touches memory through its Performer alone, and never looks at the values. So the same
coroutine can run step by step (ringcomm.transport.channel), or be recorded once and then run
without Python (ringcomm.collectives.recording).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, Self

from ringcomm.arrays.base import Bytes, Flat
from ringcomm.arrays.dtypes import DType
from ringcomm.transport.base import WireRequest


class Reduction(Protocol):
    """A reduction operator; see ringcomm.collectives.operators.Op."""

    @property
    def kernel(self) -> int:
        """The number of this operator in the reduction kernels."""
        ...

    def divisor(self, size: int) -> int:
        """Return the divisor of the combined values of `size` ranks; 1 for all but an average."""
        ...

    def is_at_once(self, dtype: DType) -> bool:
        """Return True if all ranks' values of an element must be combined in one step."""
        ...


class Performer(ABC):
    """Carries out the actions of one rank in one algorithm, or records them."""

    rank: int  # index of this rank in the group
    size: int  # number of ranks of the group

    @property
    @abstractmethod
    def nodes(self) -> tuple[int, ...]:
        """For each rank of the group, a number that identifies its node."""

    @abstractmethod
    def among(self, ranks: Sequence[int]) -> Self:
        """Return a view for some of the ranks, numbered by their index in `ranks`.

        All views share the tag: between two ranks, messages arrive in the order in which they were
        sent, also through different views. So algorithms may follow each other on several views if
        each algorithm receives all messages that were sent to it, and if any two ranks use the
        views that they share in the same order.

        Args:
            ranks: ranks of the group, this rank included; the same sequence on each of them.
        """

    @abstractmethod
    def isend(self, data: Bytes, dest: int) -> WireRequest:
        """Start to send `data`, which must not change until wait() has returned."""

    @abstractmethod
    def irecv(self, out: Bytes, source: int) -> WireRequest:
        """Start to receive exactly out.nbytes bytes."""

    @abstractmethod
    async def wait(self, *requests: WireRequest) -> None:
        """Return when all requests are complete. If they cannot complete, the operation fails."""

    @abstractmethod
    def scratch(self, like: Flat, count: int) -> Flat:
        """Return `count` uninitialised elements of like's dtype, alive while the algorithm runs."""

    @abstractmethod
    def copy(self, out: Flat, x: Flat) -> None: ...

    @abstractmethod
    def combine(self, total: Flat, x: Flat, op: Reduction) -> None:
        """Set total to total op x, element by element. Not if op.is_at_once(dtype)."""

    @abstractmethod
    def divide(self, total: Flat, divisor: int) -> None:
        """Divide each element. Not for 16-bit floats."""

    @abstractmethod
    def combine_at_once(self, out: Flat, sources: list[Flat], op: Reduction, divisor: int) -> None:
        """Set out to ((sources[0] op sources[1]) op ...) / divisor, rounded once."""

    async def exchange(self, data: Bytes, dest: int, out: Bytes, source: int) -> None:
        await self.wait(self.irecv(out, source), self.isend(data, dest))

    def finish(self, total: Flat, op: Reduction, size: int) -> None:
        """Divide the combined values of `size` ranks if op needs that. Their owner calls this."""
        if op.divisor(size) != 1:
            self.divide(total, op.divisor(size))

    def combine_all(self, out: Flat, sources: list[Flat], op: Reduction) -> None:
        """Set out to the complete reduction of `sources`; out may be one of them.

        Combines them in the order of the list, so the bits do not depend on the size of the
        buffers. Overwrites sources[0].
        """
        if op.is_at_once(out.dtype):
            self.combine_at_once(out, sources, op, op.divisor(len(sources)))
            return
        total = sources[0]
        for source in sources[1:]:
            self.combine(total, source, op)
        self.finish(total, op, len(sources))
        if total is not out:
            self.copy(out, total)
