"""A reduction with its operator and factors: one body for all of Horovod's forms."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from ringcomm.collectives.op import AVERAGE, SUM, Op
from ringcomm.collectives.scaling import Scaling
from ringcomm.engine.api import collectives
from ringcomm.engine.operations import adasum, plans
from ringcomm.errors import RingcommError
from ringcomm.torch.horovod.autograd_functions import listed
from ringcomm.torch.horovod.data_collectives import allgather
from ringcomm.torch.horovod.dispatch import begin
from ringcomm.torch.horovod.handles import Handle
from ringcomm.torch.horovod.process_sets import ProcessSet


class _Adasum:
    """The operator of Adasum; see ringcomm.engine.operations.adasum."""

    def __repr__(self) -> str:
        return "Adasum"


Adasum = _Adasum()
AnyOp = Op | _Adasum


def op_of(op: AnyOp | None, average: bool | None) -> AnyOp:
    """Return the operator that is meant.

    Raises:
        ValueError: both are given.
        TypeError: op is none of them.
    """
    if average is not None:
        if op is not None:
            raise ValueError("pass op, or average, which it replaces; not both")
        warnings.warn(
            "average is Horovod's older way: pass op=hvd.Average or op=hvd.Sum",
            DeprecationWarning,
            stacklevel=3,
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
    """A reduction, but for the tensors: one body for all of its forms."""

    def __init__(
        self,
        op: AnyOp,
        before: float,
        after: float,
        process_set: ProcessSet,
        name: str | None,
        is_awaited: bool = False,
    ) -> None:
        ProcessSet.require(process_set)
        self._op = op
        self._scaling = Scaling.of(before, after)
        self._set = process_set
        self._name = name
        self._is_awaited = is_awaited

    def start(self, x: torch.Tensor, *, in_place: bool = False) -> Handle[torch.Tensor]:
        """Start an allreduce."""
        is_plain = in_place and self._name is None and not self._scaling
        if self._is_awaited and is_plain and isinstance(self._op, Op):
            result = collectives.allreduce_(x, self._op, group=self._set.group)
            return Handle((), lambda: result)
        options: dict[str, Any] = {
            "in_place": in_place,
            "scaling": self._scaling,
            "is_awaited": self._is_awaited,
        }
        kind = "allreduce_" if in_place else "allreduce"
        if isinstance(self._op, _Adasum):
            kind, plan = kind.replace("allreduce", "adasum"), adasum.plan
            several = begin(kind, self._name, self._set, "allreduce", plan, [x], **options)
            return Handle([several], lambda results: results[0])
        return begin(
            kind, self._name, self._set, "allreduce", plans.allreduce, x, self._op, **options
        )

    def start_group(
        self, xs: Sequence[torch.Tensor], *, in_place: bool = False
    ) -> Handle[list[torch.Tensor]]:
        """Start an allreduce of several."""
        options: dict[str, Any] = {
            "in_place": in_place,
            "scaling": self._scaling,
            "is_awaited": self._is_awaited,
        }
        if isinstance(self._op, _Adasum):
            kind = "adasum_" if in_place else "adasum"
            return begin(kind, self._name, self._set, "grouped", adasum.plan, listed(xs), **options)
        kind = "grouped_allreduce_" if in_place else "grouped_allreduce"
        plan = plans.grouped_allreduce
        return begin(kind, self._name, self._set, "grouped", plan, listed(xs), self._op, **options)

    def start_scatter(self, x: torch.Tensor) -> Handle[torch.Tensor]:
        """Start a reduce_scatter."""
        op, plan = self._plain_op(), plans.reduce_scatter
        options: dict[str, Any] = {"scaling": self._scaling, "is_awaited": self._is_awaited}
        return begin(
            "reduce_scatter", self._name, self._set, "reducescatter", plan, x, op, **options
        )

    def start_group_scatter(self, xs: Sequence[torch.Tensor]) -> Handle[list[torch.Tensor]]:
        """Start a reduce_scatter of several."""
        op, plan = self._plain_op(), plans.grouped_reduce_scatter
        options: dict[str, Any] = {"scaling": self._scaling, "is_awaited": self._is_awaited}
        return begin(
            "grouped_reduce_scatter",
            self._name,
            self._set,
            "grouped",
            plan,
            listed(xs),
            op,
            **options,
        )

    def backward(self, grads: Sequence[torch.Tensor], _: Any) -> list[torch.Tensor]:
        """Return the gradients of an allreduce: they are reduced in the same way."""
        factors = self._scaling.before, self._scaling.after
        how = Reduction(self._op, *factors, self._set, None, True)
        return [how.start(grad).wait() for grad in grads]

    def backward_of_scatter(self, grads: Sequence[torch.Tensor], _: Any) -> list[torch.Tensor]:
        """Return the gradients of a reduce_scatter: each rank has those of its rows."""
        factor = self._scaling.before * self._scaling.after
        if self._op is SUM:
            factor *= self._set.size()
        gathered = [allgather(grad.contiguous(), process_set=self._set) for grad in grads]
        return [grad if factor == 1 else grad * factor for grad in gathered]

    def _plain_op(self) -> Op:
        if isinstance(self._op, _Adasum):
            raise RingcommError(  # a HorovodInternalError, as Horovod raises
                "reducescatter: op is Average, Sum, Min, Max or Product, not Adasum"
            )
        return self._op
