"""The reductions of a process group; process_group.py has the rest of its operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ringcomm.engine.core.execution import Plan
from ringcomm.engine.core.group import Group
from ringcomm.engine.executors.node import short_calls_of
from ringcomm.torch.distributed.compat import c10d, traced
from ringcomm.torch.distributed.group import collectives
from ringcomm.torch.distributed.group.base import BaseGroup
from ringcomm.torch.distributed.group.flatten import flatten
from ringcomm.torch.distributed.group.options import (
    are_local,
    call_options,
    one_list,
    one_tensor,
    or_default,
)
from ringcomm.torch.distributed.group.work import Work

Tensor = torch.Tensor
Tensors = Sequence[Tensor]


class ReducingGroup(BaseGroup):
    """A process group that reduces; see ProcessGroup."""

    @traced
    def allreduce(self, tensors: Any, opts: Any = None, *more: Any, **named: Any) -> Any:
        """Replace a tensor by its reduction over all ranks. A sparse one stays sparse."""
        (x,) = tensors = one_tensor(tensors)
        if not x.is_cpu:
            return self._devices.of(x).allreduce(tensors, or_default(opts, c10d.AllreduceOptions))
        call = call_options(opts, *more, **named)
        if x.layout is not torch.strided:
            plan = collectives.allreduce_sparse
            return self.start(call, "allreduce", tensors, plan, x, call.reduction)
        op = collectives.scaled_(x, call.reduction)
        line = flatten(x)
        is_own = line is x or line.data_ptr() == x.data_ptr()
        is_short = is_own and not (call.is_async or self._is_special)
        short = short_calls_of(self.group) if is_short else None
        if short is not None and short.allreduce_(line, op, call.timeout_s or self._timeout_s):
            return Work(None, tensors)
        return self.start(call, "allreduce", tensors, collectives.allreduce, x, line, op)

    @traced
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        """Replace each tensor by its reduction; fused."""
        if not are_local(tensors):
            return self._devices.of(*tensors).allreduce_coalesced(tensors, opts)
        call = call_options(opts)
        plan = collectives.allreduce_all
        return self.start(call, "allreduce", tensors, plan, tensors, call.reduction)

    def allreduce_sparse(self, tensors: Any, opts: Any = None) -> Any:
        """Replace a sparse tensor by its reduction over all ranks."""
        return self.allreduce(tensors, opts)

    @traced
    def reduce(self, tensors: Any, opts: Any = None, *more: Any, **named: Any) -> Any:
        """Replace the root's tensor by the reduction; the others' keep their values."""
        (x,) = tensors = one_tensor(tensors)
        if not x.is_cpu:
            return self._devices.of(x).reduce(tensors, opts)
        call = call_options(opts, *more, **named)
        how = call.reduction, call.root
        return self.start(call, "reduce", tensors, collectives.reduce, x, *how)

    @traced
    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, *more: Any, **named: Any
    ) -> Any:
        """Fill the output with the reduction of what all ranks pass for this one."""
        (out,), parts = one_tensor(outputs), one_list(inputs)
        if not out.is_cpu:
            return self._devices.of(out).reduce_scatter([out], [parts], opts)
        call = call_options(opts, *more, **named)
        plan = collectives.reduce_scatter
        return self.start(call, "reduce_scatter", [out], plan, out, parts, call.reduction)

    @traced
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Fill `output` with this rank's part of the reduction of `input`."""
        if not output.is_cpu:
            other = self._devices.of(output)
            return other._reduce_scatter_base(output, input, opts)
        call = call_options(opts)
        plan = collectives.reduce_scatter_single
        return self.start(call, "reduce_scatter", [output], plan, output, input, call.reduction)

    @traced
    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        """Several reduce_scatter_single() as one."""
        if not are_local(outputs):
            other = self._devices.of(*outputs)
            return other.reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        call = call_options(opts)

        def plan(g: Group) -> Plan[Any]:
            pairs, plan = zip(outputs, inputs, strict=True), collectives.reduce_scatter_single
            each = [plan(g, out, x, call.reduction) for out, x in pairs]
            return collectives.grouped("grouped_reduce_scatter", each)

        return self.start(call, "reduce_scatter", outputs, plan)

    # torch calls them so up to 2.12, and warns of these names from 2.13 on.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
