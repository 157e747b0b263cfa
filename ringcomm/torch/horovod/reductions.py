"""Reductions of torch tensors, with the names, arguments and defaults of Horovod.

The contracts are those of ringcomm.engine.api.collectives; this face translates. Forms that end in
`_` overwrite their argument, `grouped_` ones reduce several tensors as one operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ringcomm.collectives.op import AVERAGE, SUM, Op
from ringcomm.engine.api import collectives
from ringcomm.torch.compression import Compression, compress
from ringcomm.torch.horovod import autograd_functions
from ringcomm.torch.horovod.forms import (
    AWAITED,
    IN_PLACE,
    Form,
    async_form,
    begin,
    document,
    in_place_form,
)
from ringcomm.torch.horovod.handles import Handle
from ringcomm.torch.horovod.process_sets import ProcessSet, global_process_set
from ringcomm.torch.horovod.reduce_op import AnyOp, Reduction, op_of
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

    Gradients flow through it; that of a mean is the mean of the ranks' gradients.

    Args:
        tensor: any shape; the same shape and dtype on every rank.
    """
    which = op_of(op, average)
    how = Reduction(AWAITED, which, prescale_factor, postscale_factor, process_set, name)
    (result,) = _apply(lambda xs: [how.start(xs[0]).wait()], how.backward, [tensor], compression)
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
    """Return the reduction of each tensor over the ranks; all travel as one operation.

    Gradients flow through it; that of a mean is the mean of the ranks' gradients.

    Args:
        tensors: a list, of the same shapes and dtypes on every rank.
    """
    xs = autograd_functions.tensor_list(tensors)
    which = op_of(op, average)
    how = Reduction(AWAITED, which, prescale_factor, postscale_factor, process_set, name)
    return _apply(lambda xs: how.start_group(xs).wait(), how.backward, xs, compression)


def _allreduce(
    form: Form,
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[Tensor]:
    which = op_of(op, average, stacklevel=4)
    is_plain = name is None and _is_one(prescale_factor) and _is_one(postscale_factor)
    if form is IN_PLACE and is_plain and isinstance(which, Op):  # the shortest way
        ProcessSet.require(process_set)
        result = collectives.allreduce_(tensor, which, group=process_set.group)
        return Handle((), lambda: result)
    how = Reduction(form, which, prescale_factor, postscale_factor, process_set, name)
    return how.start(tensor)


def _is_one(factor: float) -> bool:
    return type(factor) is float and factor == 1.0  # others are checked as they are used


def _grouped_allreduce(
    form: Form,
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[Tensor]]:
    which = op_of(op, average, stacklevel=4)
    how = Reduction(form, which, prescale_factor, postscale_factor, process_set, name)
    return how.start_group(tensors)


allreduce_async = async_form(_allreduce, allreduce)
allreduce_ = in_place_form(
    _allreduce, allreduce, "Overwrite `tensor` with its reduction, and return it."
)
allreduce_async_ = async_form(_allreduce, allreduce, in_place=True)
grouped_allreduce_async = async_form(_grouped_allreduce, grouped_allreduce)
grouped_allreduce_ = in_place_form(
    _grouped_allreduce,
    grouped_allreduce,
    "Overwrite each tensor with its reduction, and return them.",
)
grouped_allreduce_async_ = async_form(_grouped_allreduce, grouped_allreduce, in_place=True)


@document
def sparse_allreduce_async(
    tensor: Tensor,
    name: str | None = None,
    op: AnyOp | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Tensor]:
    """Start the reduction of a torch.sparse_coo tensor; the result is one, and coalesced.

    Args:
        tensor: the same shape and dtype on every rank; any number of elements.
        op: Average (the default) or Sum.
    """
    ProcessSet.require(process_set)
    kind, which = "sparse_allreduce", op_of(op, None)
    if which not in (AVERAGE, SUM):
        raise ValueError(f"sparse_allreduce_async: op is Average or Sum, not {which}")
    if not (isinstance(tensor, Tensor) and tensor.is_sparse):
        raise TypeError(
            f"sparse_allreduce_async takes a torch.sparse_coo tensor, not {type(tensor).__name__}"
        )
    shape, divisor = tensor.shape, process_set.size() if which is AVERAGE else 1
    handle = begin(Form(), kind, name, process_set, plan_elements, tensor, lane="grouped")
    return Handle([handle], lambda elements: add_up(elements, shape, divisor))


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
    """Return this rank's rows of the reduction; the first n % size ranks get one row more.

    Gradients flow through it; that of a mean is the mean of the ranks' gradients.

    Args:
        tensor: at least one dimension; the same shape and dtype on every rank.
        op: Average, Sum, Min, Max or Product.
    """
    how = Reduction(AWAITED, op_of(op, None), prescale_factor, postscale_factor, process_set, name)
    (result,) = _apply(
        lambda xs: [how.start_scatter(xs[0]).wait()], how.backward_of_scatter, [tensor], compression
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
    """Return this rank's rows of the reduction of each tensor; all travel as one operation.

    Gradients flow through it; that of a mean is the mean of the ranks' gradients.

    Args:
        tensors: a list of tensors with at least one dimension, of the same shapes and dtypes on
            every rank. The first n % size ranks get one row more of n.
        op: Average, Sum, Min, Max or Product.
    """
    xs = autograd_functions.tensor_list(tensors)
    how = Reduction(AWAITED, op_of(op, None), prescale_factor, postscale_factor, process_set, name)
    return _apply(
        lambda xs: how.start_group_scatter(xs).wait(), how.backward_of_scatter, xs, compression
    )


def _reducescatter(
    form: Form,
    tensor: Tensor,
    name: str | None = None,
    op: AnyOp = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[Tensor]:
    how = Reduction(form, op_of(op, None), prescale_factor, postscale_factor, process_set, name)
    return how.start_scatter(tensor)


def _grouped_reducescatter(
    form: Form,
    tensors: Tensors,
    name: str | None = None,
    op: AnyOp = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[Tensor]]:
    how = Reduction(form, op_of(op, None), prescale_factor, postscale_factor, process_set, name)
    return how.start_group_scatter(tensors)


reducescatter_async = async_form(_reducescatter, reducescatter)
grouped_reducescatter_async = async_form(_grouped_reducescatter, grouped_reducescatter)


def _apply(
    forward: Callable[[Tensors], list[Tensor]],
    backward: Callable[[Tensors, Tensors], list[Tensor]],
    tensors: Tensors,
    compression: Any,
) -> list[Tensor]:
    """Return what a reduction makes of tensors that are compressed on their way."""
    sent = [compress(compression, tensor) for tensor in tensors]
    results = autograd_functions.apply(forward, backward, [x for x, _ in sent])
    return [
        compression.decompress(result, ctx) for result, (_, ctx) in zip(results, sent, strict=True)
    ]
