"""Reductions: the contract of allreduce, reduce and reduce_scatter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ringcomm.arrays import Flat
from ringcomm.arrays.base import Bytes
from ringcomm.collectives.op import Op, ReductionOptions
from ringcomm.collectives.scaling import scale
from ringcomm.engine.core.group import Group
from ringcomm.engine.operations.base import Operation, contiguous
from ringcomm.transport.node import To
from ringcomm.transport.node.steps import NodeReduction


@dataclass(slots=True, eq=False)
class Reduction(Operation):
    """Any reduction of one array."""

    options: ReductionOptions
    in_place: bool  # x gets the result
    is_borrowed: bool = False  # x stays as it is until the end, so it need not be copied
    root: int = 0  # the rank that gets the result, if one alone does
    to: ClassVar[To]
    mirrored: ClassVar[dict[str, Any]] = {"in_place": True}

    def working_copy(self) -> tuple[Any, Flat]:
        """Return contiguous memory to reduce in, times the first factor: x only if in place."""
        adapter, options = self.adapter, self.options
        if self.in_place and not options.is_scaled:
            work = contiguous(self.x, adapter)
        else:
            work = adapter.copy(self.x)
        flat = adapter.flat(work)
        scale(flat, options.prescale)
        return work, flat


def reduction_in_node(
    source: Flat, target: Bytes, op: Op, group: Group, parts: Sequence[slice] = ()
) -> NodeReduction:
    """Return a reduction where all ranks share memory; with `parts`, each rank gets its part."""
    to = To.OWNER if parts else To.ALL
    item = source.dtype.itemsize
    has_parts = parts and group.team is not None  # else it is no step
    bounds = [0, *(part.stop * item for part in parts)] if has_parts else ()
    divisor = op.divisor(group.size)
    return NodeReduction(
        source.bytes, target, op.kernel, source.dtype.kernel, divisor, to, 0, bounds
    )
