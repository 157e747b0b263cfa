"""Reductions of torch tensors, with the names, arguments and defaults of Horovod.

The contracts are those of the engine (ringcomm.engine.ops); this face translates. Common to all:

- `name` matches operations of ranks that start them in different orders. Without one they are
  matched by their order among those of their kind, in each process set.
- `op` is Average by default. `average=True` or False is Horovod's older way to say Average or Sum.
- `prescale_factor` multiplies what is reduced, `postscale_factor` the result. Integers are
  truncated toward zero after each.
- `process_set`: the ranks that take part; every one of them must call. `root_rank` is a rank of the
  job among them.
- The forms that end in `_` overwrite their argument, `grouped_` ones take a list of tensors that
  are reduced or gathered as one operation, `_async` ones return a handle for poll() and
  synchronize(); until then, tensors passed in must not be changed. The others return the result,
  and gradients flow through them: a mean's gradient is the mean of the ranks' gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from ringcomm.collectives.op import AVERAGE, SUM, Op
from ringcomm.collectives.scaling import Scaling
from ringcomm.engine import adasum, ops, plans
from ringcomm.torch import gradients
from ringcomm.torch.compression import Compression
from ringcomm.torch.dispatch import begin
from ringcomm.torch.handles import Handle
from ringcomm.torch.movements import allgather, allgather_async
from ringcomm.torch.process_sets import ProcessSet, global_process_set


class _Adasum:
    """The operator of Adasum; see ringcomm.engine.adasum."""

    def __repr__(self) -> str:
        return "Adasum"


Adasum = _Adasum()
AnyOp = Op | _Adasum


# --- allreduce ----------------------------------------------------------------------------------
def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the reduction of `tensor` over the ranks: a new tensor of its shape and dtype.

    Args:
        tensor: any shape; the same shape and dtype on every rank.
        average: see above.
        name: see above.
        compression: what is sent: Compression.none, fp16 or bf16.
        op: Average, Sum, Min, Max, Product or Adasum.
        prescale_factor: see above.
        postscale_factor: see above.
        process_set: see above.
    """
    sent, ctx = compression.compress(tensor)
    how = _How(op_of(op, average), prescale_factor, postscale_factor, process_set, name, True)
    (result,) = gradients.apply(lambda xs: [how.start(xs[0]).wait()], how.backward, [sent])
    received: torch.Tensor = compression.decompress(result, ctx)
    return received


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Start allreduce(); gradients do not flow through it."""
    how = _How(op_of(op, average), prescale_factor, postscale_factor, process_set, name)
    return how.start(tensor)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrite `tensor` with its reduction, and return it."""
    how = _How(op_of(op, average), prescale_factor, postscale_factor, process_set, name, True)
    return how.start(tensor, in_place=True).wait()


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Start allreduce_()."""
    how = _How(op_of(op, average), prescale_factor, postscale_factor, process_set, name)
    return how.start(tensor, in_place=True)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Return the reduction of each tensor; see allreduce()."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    how = _How(op_of(op, average), prescale_factor, postscale_factor, process_set, name, True)
    results = gradients.apply(
        lambda xs: how.start_group(xs).wait(), how.backward, [sent for sent, _ in pairs]
    )
    return [
        compression.decompress(result, ctx) for result, (_, ctx) in zip(results, pairs, strict=True)
    ]


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[torch.Tensor]]:
    """Start grouped_allreduce()."""
    how = _How(op_of(op, average), prescale_factor, postscale_factor, process_set, name)
    return how.start_group(tensors)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Overwrite each tensor with its reduction, and return them."""
    how = _How(op_of(op, average), prescale_factor, postscale_factor, process_set, name, True)
    return how.start_group(tensors, in_place=True).wait()


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[torch.Tensor]]:
    """Start grouped_allreduce_()."""
    how = _How(op_of(op, average), prescale_factor, postscale_factor, process_set, name)
    return how.start_group(tensors, in_place=True)


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: AnyOp | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Start the reduction of a torch.sparse_coo tensor; the result is one, and coalesced.

    Args:
        tensor: the same shape and dtype on every rank; any number of elements.
        name: see above.
        op: Average or Sum.
        process_set: see above.
    """
    which = op_of(op, None)
    if which not in (AVERAGE, SUM):
        raise ValueError(f"sparse_allreduce_async: op is Average or Sum, not {which}")
    coalesced = tensor.detach().coalesce()
    # Gathered along the first dimension: one row per element.
    indices = coalesced.indices().t().contiguous()
    names = (None, None) if name is None else (f"{name}.indices", f"{name}.values")
    handles = [
        allgather_async(part, part_name, process_set)
        for part, part_name in zip((indices, coalesced.values()), names, strict=True)
    ]
    divisor = process_set.size() if which is AVERAGE else 1

    def finish(rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        total = torch.sparse_coo_tensor(rows.t(), values, tensor.shape, check_invariants=True)
        total = total.coalesce()
        return total if divisor == 1 else total / divisor

    return Handle(handles, finish)


# --- reducescatter ------------------------------------------------------------------------------
def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: AnyOp = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's rows of the reduction; the first n % size ranks get one row more."""
    sent, ctx = compression.compress(tensor)
    how = _How(op_of(op, None), prescale_factor, postscale_factor, process_set, name, True)
    (result,) = gradients.apply(
        lambda xs: [how.start_scatter(xs[0]).wait()], how.backward_of_scatter, [sent]
    )
    received: torch.Tensor = compression.decompress(result, ctx)
    return received


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: AnyOp = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[torch.Tensor]:
    """Start reducescatter()."""
    how = _How(op_of(op, None), prescale_factor, postscale_factor, process_set, name)
    return how.start_scatter(tensor)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: AnyOp = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Return reducescatter() of each tensor."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    how = _How(op_of(op, None), prescale_factor, postscale_factor, process_set, name, True)
    results = gradients.apply(
        lambda xs: how.start_group_scatter(xs).wait(),
        how.backward_of_scatter,
        [sent for sent, _ in pairs],
    )
    return [
        compression.decompress(result, ctx) for result, (_, ctx) in zip(results, pairs, strict=True)
    ]


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: AnyOp = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[torch.Tensor]]:
    """Start grouped_reducescatter()."""
    how = _How(op_of(op, None), prescale_factor, postscale_factor, process_set, name)
    return how.start_group_scatter(tensors)


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


class _How:
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
        self._op = op
        self._scaling = Scaling.of(before, after)
        self._set = process_set
        self._name = name
        self._is_awaited = is_awaited

    def start(self, x: torch.Tensor, *, in_place: bool = False) -> Handle[torch.Tensor]:
        """Start an allreduce."""
        is_plain = in_place and self._name is None and not self._scaling
        if self._is_awaited and is_plain and isinstance(self._op, Op):
            result = ops.allreduce_(x, self._op, group=self._set.group)
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
            return begin(kind, self._name, self._set, "grouped", adasum.plan, list(xs), **options)
        kind = "grouped_allreduce_" if in_place else "grouped_allreduce"
        plan = plans.grouped_allreduce
        return begin(kind, self._name, self._set, "grouped", plan, list(xs), self._op, **options)

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
            list(xs),
            op,
            **options,
        )

    def backward(self, grads: Sequence[torch.Tensor], _: Any) -> list[torch.Tensor]:
        """Return the gradients of an allreduce: they are reduced in the same way."""
        factors = self._scaling.before, self._scaling.after
        how = _How(self._op, *factors, self._set, None, True)
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
            raise ValueError("reducescatter: op is Average, Sum, Min, Max or Product, not Adasum")
        return self._op
