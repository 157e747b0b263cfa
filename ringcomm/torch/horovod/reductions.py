"""Reductions of torch tensors, with the names, arguments and defaults of Horovod.

The contracts are those of ringcomm.engine.api.collectives. Forms that end in `_` overwrite their
argument; `grouped_` forms reduce several tensors as one operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ringcomm.collectives.operators import AVERAGE, SUM, Op, ReductionOptions
from ringcomm.engine.operations.adasum import plan_adasum
from ringcomm.engine.operations.allreduce import plan_allreduce
from ringcomm.engine.operations.grouped import plan_grouped_allreduce, plan_grouped_reduce_scatter
from ringcomm.engine.operations.reduce_scatter import plan_reduce_scatter
from ringcomm.errors import RingcommError
from ringcomm.torch.compression import Compression, compressor_of
from ringcomm.torch.horovod.autograd_functions import apply, tensor_list
from ringcomm.torch.horovod.call_forms import (
    AWAITED,
    Form,
    async_form,
    begin,
    carry_out,
    document,
    in_place_form,
)
from ringcomm.torch.horovod.data_collectives import allgather
from ringcomm.torch.horovod.handles import HorovodHandle
from ringcomm.torch.horovod.process_sets import ProcessSet, global_process_set
from ringcomm.torch.horovod.reduce_op import Adasum, AnyOp, op_of
from ringcomm.torch.sparse import add_up, plan_elements

Tensor = torch.Tensor
Tensors = Sequence[Tensor]


# --- allreduce ----------------------------------------------------------------------------------
@document
def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the reduction of `tensor` over the ranks: a new tensor of its shape and dtype.

    Gradients flow through it: the gradient of a mean is the mean of the ranks' gradients.

    Args:
        tensor: a tensor of any shape; the same shape and dtype on every rank.
    """
    how = op_of(op, average), prescale_factor, postscale_factor, process_set
    (result,) = _apply(
        lambda xs: [_allreduce(AWAITED, xs[0], None, name, *how).wait()],
        lambda grads, _: _reduce_gradients(grads, *how),
        [tensor],
        compression,
    )
    return result


@document
def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Return the reduction of each tensor over the ranks; all tensors are in one operation.

    Gradients flow through it: the gradient of a mean is the mean of the ranks' gradients.

    Args:
        tensors: a list of tensors, with the same shapes and dtypes on every rank.
    """
    how = op_of(op, average), prescale_factor, postscale_factor, process_set
    return _apply(
        lambda xs: _grouped_allreduce(AWAITED, xs, None, name, *how).wait(),
        lambda grads, _: _reduce_gradients(grads, *how),
        tensors,
        compression,
    )


def _allreduce(
    form: Form,
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> HorovodHandle[Tensor]:
    which = op_of(op, average, stacklevel=4)
    if isinstance(which, Op) and _is_one(prescale_factor) and _is_one(postscale_factor):
        done = carry_out(form, "allreduce", name, process_set, tensor, which)
        if done is not None:
            return done
    options = _options(which, prescale_factor, postscale_factor)
    if which is Adasum:
        args = form, "adasum", name, process_set, plan_adasum, [tensor], options
        return HorovodHandle([begin(*args, family="allreduce")], lambda results: results[0])
    return begin(form, "allreduce", name, process_set, plan_allreduce, tensor, options)


def _is_one(factor: float) -> bool:
    return type(factor) is float and factor == 1.0  # the fast path checks no other types


def _grouped_allreduce(
    form: Form,
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> HorovodHandle[list[Tensor]]:
    which = op_of(op, average, stacklevel=4)
    options = _options(which, prescale_factor, postscale_factor)
    kind, plan = "grouped_allreduce", plan_grouped_allreduce
    if which is Adasum:
        kind, plan = "adasum", plan_adasum
    xs = tensor_list(tensors)
    return begin(form, kind, name, process_set, plan, xs, options, family="grouped")


allreduce_async = async_form(_allreduce, allreduce)
allreduce_ = in_place_form(_allreduce, allreduce)
allreduce_async_ = async_form(_allreduce, allreduce, in_place=True)
grouped_allreduce_async = async_form(_grouped_allreduce, grouped_allreduce)
grouped_allreduce_ = in_place_form(_grouped_allreduce, grouped_allreduce)
grouped_allreduce_async_ = async_form(_grouped_allreduce, grouped_allreduce, in_place=True)


@document
def sparse_allreduce_async(
    tensor: Tensor,
    name: str | None = None,
    op: AnyOp | None = None,
    process_set: ProcessSet = global_process_set,
) -> HorovodHandle[Tensor]:
    """Start the reduction of a torch.sparse_coo tensor; the result is a coalesced sparse tensor.

    Args:
        tensor: a sparse tensor of the same shape and dtype on every rank; any number of elements.
        op: Average (the default) or Sum.
    """
    ProcessSet.require(process_set)
    which = op_of(op, None)
    if which not in (AVERAGE, SUM):
        raise ValueError(f"sparse_allreduce_async: op is Average or Sum, not {which}")
    if not (isinstance(tensor, Tensor) and tensor.is_sparse):
        raise TypeError(
            f"sparse_allreduce_async takes a torch.sparse_coo tensor, not {type(tensor).__name__}"
        )
    shape, divisor = tensor.shape, process_set.size() if which is AVERAGE else 1
    kind, plan = "sparse_allreduce", plan_elements
    handle = begin(Form(), kind, name, process_set, plan, tensor, family="grouped")
    return HorovodHandle([handle], lambda elements: add_up(elements, shape, divisor))


# --- reducescatter ------------------------------------------------------------------------------
@document
def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: AnyOp = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Return this rank's rows of the reduction, a new tensor.

    Of n rows, the first n % size ranks get one more than the others. Gradients flow through it: the
    gradient of a mean is the mean of the ranks' gradients.

    Args:
        tensor: a tensor of at least one dimension; the same shape and dtype on every rank.
        op: Average, Sum, Min, Max or Product.
    """
    how = op, process_set, prescale_factor, postscale_factor
    (result,) = _apply(
        lambda xs: [_reducescatter(AWAITED, xs[0], name, *how).wait()],
        lambda grads, _: _gather_gradients(grads, *how),
        [tensor],
        compression,
    )
    return result


@document
def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Any = Compression.none,
    op: AnyOp = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Return this rank's rows of the reduction of each tensor; all are in one operation.

    Gradients flow through it: the gradient of a mean is the mean of the ranks' gradients.

    Args:
        tensors: a list of tensors with at least one dimension, of the same shapes and dtypes on
            every rank. Of n rows, the first n % size ranks get one more than the others.
        op: Average, Sum, Min, Max or Product.
    """
    how = op, process_set, prescale_factor, postscale_factor
    return _apply(
        lambda xs: _grouped_reducescatter(AWAITED, xs, name, *how).wait(),
        lambda grads, _: _gather_gradients(grads, *how),
        tensors,
        compression,
    )


def _reducescatter(
    form: Form,
    tensor: Tensor,
    name: str | None = None,
    op: AnyOp = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> HorovodHandle[Tensor]:
    options, kind = _scatter_options(op, prescale_factor, postscale_factor), "reduce_scatter"
    if not options.is_scaled:
        done = carry_out(form, kind, name, process_set, tensor, options.op)
        if done is not None:
            return done
    return begin(form, kind, name, process_set, plan_reduce_scatter, tensor, options)


def _grouped_reducescatter(
    form: Form,
    tensors: Tensors,
    name: str | None = None,
    op: AnyOp = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> HorovodHandle[list[Tensor]]:
    options, xs = _scatter_options(op, prescale_factor, postscale_factor), tensor_list(tensors)
    kind, plan = "grouped_reduce_scatter", plan_grouped_reduce_scatter
    return begin(form, kind, name, process_set, plan, xs, options, family="grouped")


reducescatter_async = async_form(_reducescatter, reducescatter)
grouped_reducescatter_async = async_form(_grouped_reducescatter, grouped_reducescatter)


def _options(op: AnyOp, prescale: float, postscale: float) -> ReductionOptions:
    return ReductionOptions(op if isinstance(op, Op) else SUM).scaled(prescale, postscale)


def _scatter_options(op: AnyOp, prescale: float, postscale: float) -> ReductionOptions:
    op = op_of(op, None)
    if op is Adasum:
        raise RingcommError(  # a HorovodInternalError, as Horovod raises
            "reducescatter: op is Average, Sum, Min, Max or Product, not Adasum"
        )
    return _options(op, prescale, postscale)


def _reduce_gradients(
    grads: Tensors, op: AnyOp, prescale: float, postscale: float, process_set: ProcessSet
) -> list[Tensor]:
    """Return the gradients of an allreduce, which can be differentiated again."""
    _require_gradient(op)
    how: dict[str, Any] = {"prescale_factor": prescale, "postscale_factor": postscale}
    return [allreduce(grad, op=op, process_set=process_set, **how) for grad in grads]


def _gather_gradients(
    grads: Tensors, op: AnyOp, process_set: ProcessSet, prescale: float, postscale: float
) -> list[Tensor]:
    """Return the gradients of a reducescatter, gathered: each rank has those of its own rows."""
    _require_gradient(op)
    factor = float(prescale) * float(postscale) * (process_set.size() if op is SUM else 1)
    gathered = [allgather(grad.contiguous(), process_set=process_set) for grad in grads]
    return [grad if factor == 1 else grad * factor for grad in gathered]


def _require_gradient(op: AnyOp) -> None:
    if op_of(op, None) not in (AVERAGE, SUM):
        raise ValueError(
            f"gradients flow through an allreduce or reducescatter by Average or Sum, not by {op}: "
            "pass tensor.detach(), so that the result counts as a constant"
        )


def _apply(
    forward: Callable[[Tensors], list[Tensor]],
    backward: Callable[[Tensors, Tensors], list[Tensor]],
    tensors: Tensors,
    compression: Any,
) -> list[Tensor]:
    compressor = compressor_of("allreduce or reducescatter", compression)
    sent = [compressor.compress(tensor) for tensor in tensor_list(tensors)]
    results = apply(forward, backward, [x for x, _ in sent])
    return [
        compressor.decompress(result, ctx) for result, (_, ctx) in zip(results, sent, strict=True)
    ]
