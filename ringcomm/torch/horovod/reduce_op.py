"""A reduction with its operator and factors: one body for all of Horovod's forms."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ringcomm.collectives.op import AVERAGE, SUM, Op, ReductionOptions
from ringcomm.engine.core.execution import Plan
from ringcomm.engine.operations.adasum import plan_adasum
from ringcomm.engine.operations.allreduce import plan_allreduce
from ringcomm.engine.operations.grouped import plan_grouped_allreduce, plan_grouped_reduce_scatter
from ringcomm.engine.operations.reduce_scatter import plan_reduce_scatter
from ringcomm.errors import RingcommError
from ringcomm.torch.horovod.autograd_functions import tensor_list
from ringcomm.torch.horovod.data_collectives import allgather
from ringcomm.torch.horovod.forms import AWAITED, Form, begin
from ringcomm.torch.horovod.handles import Handle
from ringcomm.torch.horovod.process_sets import ProcessSet


class _Adasum:
    """The operator of Adasum; see ringcomm.engine.operations.adasum."""

    def __repr__(self) -> str:
        return "Adasum"


Adasum = _Adasum()
AnyOp = Op | _Adasum


def op_of(op: AnyOp | None, average: bool | None, *, stacklevel: int = 3) -> AnyOp:
    """Return the operator that is meant.

    Raises:
        ValueError: both are given.
        TypeError: op is not one of them.
    """
    if average is not None:
        if op is not None:
            raise ValueError("pass op, or average, which it replaces; not both")
        warnings.warn(
            "average is Horovod's older way: pass op=hvd.Average or op=hvd.Sum",
            DeprecationWarning,
            stacklevel=stacklevel,
        )
        return AVERAGE if average else SUM
    if op is None:
        return AVERAGE
    if not isinstance(op, Op | _Adasum):
        raise TypeError(
            f"op must be one of hvd.Average, Sum, Min, Max, Product, Adasum: not {op!r}"
        )
    return op


class Reduction:
    """A reduction, but for the tensors."""

    def __init__(
        self,
        form: Form,
        op: AnyOp,
        before: float,
        after: float,
        process_set: ProcessSet,
        name: str | None,
    ) -> None:
        ProcessSet.require(process_set)
        self._form = form
        self._op = op
        plain = op if isinstance(op, Op) else SUM
        self._options = ReductionOptions(plain).scaled(before, after)
        self._set = process_set
        self._name = name

    def start(self, x: torch.Tensor) -> Handle[torch.Tensor]:
        """Start an allreduce."""
        in_place = self._form.in_place
        if isinstance(self._op, _Adasum):
            several = self._begin("adasum", "allreduce", plan_adasum, [x], in_place=in_place)
            return Handle([several], lambda results: results[0])
        return self._begin("allreduce", "allreduce", plan_allreduce, x, in_place=in_place)

    def start_group(self, xs: Sequence[torch.Tensor]) -> Handle[list[torch.Tensor]]:
        """Start an allreduce of several."""
        in_place = self._form.in_place
        if isinstance(self._op, _Adasum):
            return self._begin("adasum", "grouped", plan_adasum, tensor_list(xs), in_place=in_place)
        kind, plan = "grouped_allreduce", plan_grouped_allreduce
        return self._begin(kind, "grouped", plan, tensor_list(xs), in_place=in_place)

    def start_scatter(self, x: torch.Tensor) -> Handle[torch.Tensor]:
        """Start a reduce_scatter."""
        self._require_plain_op()
        return self._begin("reduce_scatter", "reducescatter", plan_reduce_scatter, x)

    def start_group_scatter(self, xs: Sequence[torch.Tensor]) -> Handle[list[torch.Tensor]]:
        """Start a reduce_scatter of several."""
        self._require_plain_op()
        kind, plan = "grouped_reduce_scatter", plan_grouped_reduce_scatter
        return self._begin(kind, "grouped", plan, tensor_list(xs))

    def backward(self, grads: Sequence[torch.Tensor], _: Any) -> list[torch.Tensor]:
        """Return the gradients of an allreduce: they are reduced in the same way."""
        factors = self._options.prescale, self._options.postscale
        how = Reduction(AWAITED, self._op, *factors, self._set, None)
        return [how.start(grad).wait() for grad in grads]

    def backward_of_scatter(self, grads: Sequence[torch.Tensor], _: Any) -> list[torch.Tensor]:
        """Return the gradients of a reduce_scatter: each rank has those of its rows."""
        factor = self._options.prescale * self._options.postscale
        if self._op is SUM:
            factor *= self._set.size()
        gathered = [allgather(grad.contiguous(), process_set=self._set) for grad in grads]
        return [grad if factor == 1 else grad * factor for grad in gathered]

    def _begin(
        self, kind: str, lane: str, plan: Callable[..., Plan[Any]], *args: Any, **options: Any
    ) -> Handle[Any]:
        kind += "_" if self._form.in_place else ""
        args = (*args, self._options)
        return begin(self._form, kind, self._name, self._set, plan, *args, lane=lane, **options)

    def _require_plain_op(self) -> None:
        if isinstance(self._op, _Adasum):
            raise RingcommError(  # a HorovodInternalError, as Horovod raises
                "reducescatter: op is Average, Sum, Min, Max or Product, not Adasum"
            )
