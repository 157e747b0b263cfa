"""The base of allreduce, reduce, reduce_scatter: the array that is reduced, the step on a host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ringcomm.arrays import Flat
from ringcomm.arrays.base import Bytes
from ringcomm.collectives.operators import Op, ReductionOptions
from ringcomm.collectives.scale_factors import scale
from ringcomm.engine.core.group import Group
from ringcomm.engine.operations.base import Operation, contiguous
from ringcomm.transport.node import To
from ringcomm.transport.node.steps import NodeReduction


@dataclass(slots=True, eq=False)
class ArrayReduction(Operation):
    options: ReductionOptions
    in_place: bool  # x gets the result
    is_borrowed: bool = False  # the caller keeps x unchanged until the end, so no copy is needed
    root: int = 0  # the rank that gets the result of a reduce
    to: ClassVar[To]
    mirrored: ClassVar[dict[str, Any]] = {"in_place": True}

    def working_copy(self) -> tuple[Any, Flat]:
        """Return a contiguous array, x times own_prescale, to reduce in place, and its memory."""
        adapter, options = self.adapter, self.options
        if self.in_place and not options.is_scaled:
            work = contiguous(self.x, adapter)
        else:
            work = adapter.copy(self.x)
        flat = adapter.flat(work)
        scale(flat, options.own_prescale)
        return work, flat


def reduction_in_node(
    source: Flat,
    target: Bytes | None,
    op: Op,
    group: Group,
    *,
    parts: Sequence[slice] = (),
    root: int | None = None,
) -> NodeReduction:
    """Return the reduction as a step in shared memory.

    With `parts`, each rank gets its part; with a root, it alone gets the result.
    """
    to = To.OWNER if parts else To.ALL if root is None else To.ROOT
    item = source.dtype.itemsize
    has_parts = parts and group.takes_steps
    bounds = [0, *(part.stop * item for part in parts)] if has_parts else ()
    divisor = op.divisor(group.size)
    return NodeReduction(
        source.bytes, target, op.kernel, source.dtype.kernel, divisor, to, root or 0, bounds
    )
